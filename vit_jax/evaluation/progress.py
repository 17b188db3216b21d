"""How far an evaluation is: a bar in a terminal, else a line now and then."""

import sys
import time
from collections.abc import Iterator

import jax
import tqdm
from absl import logging

from vit_jax.base import durations
from vit_jax.data.loader import Batches


def with_progress(
    batches: Batches, *, every_seconds: float = 10.0
) -> Iterator[dict[str, jax.Array]]:
    """The same batches; for `watch` of an `Evaluator`."""
    if jax.process_index() == 0 and sys.stderr.isatty():
        yield from tqdm.tqdm(batches, unit="batch", dynamic_ncols=True, leave=False)
        return
    total, began = len(batches), time.monotonic()
    reported = began
    for done, batch in enumerate(batches, start=1):
        yield batch
        now = time.monotonic()
        if now - reported >= every_seconds and done < total:
            reported = now
            left = durations.duration_text((now - began) / done * (total - done))
            logging.info("%d of %d batches evaluated, %s left", done, total, left)
