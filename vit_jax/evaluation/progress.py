"""How far an evaluation is."""

from collections.abc import Iterator

import jax

from vit_jax.base.progress import Progress
from vit_jax.data.loader import Batches


def with_progress(
    batches: Batches, *, every_seconds: float = 10.0
) -> Iterator[dict[str, jax.Array]]:
    """The same batches; for `watch` of an `Evaluator`."""
    first = jax.process_index() == 0
    with Progress(
        len(batches), "batches", "evaluated", every_seconds=every_seconds, bar=first
    ) as progress:
        for batch in batches:
            yield batch
            progress.update(1)
