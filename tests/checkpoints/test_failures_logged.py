"""What is logged of a save that fails: a line, and no traceback of those below."""

import asyncio
import gc
import logging

from vit_jax.checkpoints.saving import Checkpoints
from vit_jax.config import Checkpoint


def unwatched_failure(file: str) -> None:
    """A task that fails in code of this file, and that nobody waits for."""
    places = {}
    exec(compile("async def fail(): raise ValueError('no space left')", file, "exec"), places)

    async def begin():
        task = asyncio.get_running_loop().create_task(places["fail"]())
        await asyncio.wait([task])

    asyncio.run(begin())
    gc.collect()


def test_asyncio_says_nothing_of_arrays_that_orbax_did_not_write(tmp_path, caplog):
    Checkpoints(tmp_path, Checkpoint())
    with caplog.at_level(logging.ERROR, "asyncio"):
        unwatched_failure("/lib/orbax/checkpoint/serialization.py")
        assert "never retrieved" not in caplog.text
        unwatched_failure("/lib/another/module.py")
    assert "Task exception was never retrieved" in caplog.text
