"""Orbax's handlers of arrays, as checkpoints are read with them: they leave nothing under way.

Orbax reads all arrays at once, each in a task of its own, and closes its event loop when the first of them
fails. What the others then find or fail with would be printed by asyncio and TensorStore, in hundreds of lines.
"""

import asyncio
from collections.abc import Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp


class _EndsItsTasks:
    async def deserialize(self, infos: Sequence, args: Sequence | None = None) -> Sequence:
        before = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        except Exception:
            # Not cancelled: TensorStore would call the loop back after it is closed.
            await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)
            raise


class _Arrays(_EndsItsTasks, ocp.type_handlers.ArrayHandler):
    """Of `jax.Array`."""


class _NumpyArrays(_EndsItsTasks, ocp.type_handlers.NumpyHandler):
    """Of `np.ndarray`."""


READING = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, _Arrays()), (np.ndarray, _NumpyArrays())
)
