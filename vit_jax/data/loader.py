"""Batches on their way to the devices: who builds which rows, ahead of time, in threads or worker
processes.

What a row holds is decided in `batches.py`.
"""

import math
import time
from collections.abc import Iterator

import grain
import jax
import numpy as np
from absl import flags, logging
from grain.experimental import ThreadPrefetchIterDataset
from jax.sharding import NamedSharding

from vit_jax.data import decode
from vit_jax.data.batches import EvalBatches, TrainBatches, batch_indices, check_bad_images
from vit_jax.data.record import DataError, Source
from vit_jax.schema import ConfigError

__all__ = ["Batches", "batch_indices", "eval_batches", "local_rows", "train_batches"]


def train_batches(
    source: Source, config, sharding: NamedSharding, *, start_step: int, stop_step: int
) -> "Batches":
    """The batches of steps `start_step` to `stop_step - 1`, B = `config.batch_size` examples each
    over all processes.

    They depend on (`config.seed`, step) alone: not on the number of devices, processes or threads,
    nor on where a run started.

    Args:
      source: the examples.
      config: the whole config.
      sharding: of the batch dimension, the first one of every array.

    Returns:
      An iterator of {"image": (B, S, S, 3) uint8, "label": (B,) int32, or (B, classes) float32 if
      multi-label}.

    Raises:
      ConfigError: the batch cannot be cut evenly, or the crop is larger than the image it is cut
        from.
    """
    decode.check_crops(config.data)
    rows = local_rows(sharding, config.batch_size, "config.batch_size")
    blocks = TrainBatches(source, config, rows, stop_step=stop_step)
    return Batches(blocks, range(start_step, stop_step), config.data, sharding)


def eval_batches(
    source: Source, config, sharding: NamedSharding, batch_size: int | None = None
) -> "Batches":
    """Batches with every example once, in order, the last one padded.

    Args:
      source, config, sharding: as for `train_batches`.
      batch_size: over all processes; by default `config.eval.batch_size`, or `config.batch_size`
        where that is 0.

    Returns:
      An iterator of {"image", "label", "mask": (B,) float32, 0 for padding}.
    """
    decode.check_crops(config.data)
    batch_size = batch_size or config.eval.batch_size or config.batch_size
    rows = local_rows(sharding, batch_size, "the evaluation batch size")
    blocks = EvalBatches(source, config, rows, batch_size=batch_size)
    return Batches(blocks, range(len(blocks)), config.data, sharding)


class Batches(Iterator[dict[str, jax.Array]]):
    """An iterator of global batches that are prepared ahead. Close it, or use it in a `with`
    statement: it has threads.

    Attributes:
      wait_seconds: how long `next` has waited for the host, in total.
      bad_images: name → reason of the unreadable training images that this process has met and
        replaced.
    """

    def __init__(
        self, blocks: TrainBatches | EvalBatches, steps: range, config_data, sharding: NamedSharding
    ):
        self.wait_seconds = 0.0
        self.bad_images: dict[str, str] = {}
        self._max_bad_images = config_data.max_bad_images
        self._iterator = iter(())
        if not steps:
            return
        options = grain.ReadOptions(
            num_threads=config_data.threads, prefetch_buffer_size=config_data.threads
        )
        dataset = grain.MapDataset.source(blocks)[steps.start : steps.stop].to_iter_dataset(options)
        if config_data.processes:
            if (
                not flags.FLAGS.is_parsed()
            ):  # Grain hands its flags to its workers, and a library call has parsed none
                flags.FLAGS.mark_as_parsed()
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=config_data.processes)
            )
        dataset = dataset.map(lambda block: _to_devices(block, blocks, sharding))
        self._iterator = iter(
            ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=config_data.prefetch)
        )
        self._iterator.start_prefetch()  # the first batches are made while the caller compiles

    def __next__(self) -> dict[str, jax.Array]:
        start = time.perf_counter()
        try:
            batch, bad = next(self._iterator)
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_seconds += time.perf_counter() - start
        self._count(bad)
        return batch

    def _count(self, bad: tuple[tuple[str, str], ...]) -> None:
        for name, why in bad:
            if name not in self.bad_images:
                self.bad_images[name] = why
                logging.warning("Image %s cannot be read (%s): another takes its place.", name, why)
        try:
            check_bad_images(self.bad_images, self._max_bad_images)
        except DataError:
            self.close()
            raise

    def close(self) -> None:
        """Stops the threads and processes. No batch comes after it."""
        iterator, self._iterator = self._iterator, iter(())
        if hasattr(iterator, "close"):
            iterator.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def local_rows(
    sharding: NamedSharding, batch_size: int, what: str = "the batch size"
) -> np.ndarray:
    """The rows of a global batch that this process's devices hold, (n,) int64, rising.

    Raises:
      ConfigError: `batch_size`, called `what`, is not divisible by the number of parts the batch is
        cut into.
    """
    axes = sharding.spec[0] if len(sharding.spec) else None
    axes = (axes,) if isinstance(axes, str) else axes or ()
    parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if batch_size % parts:
        raise ConfigError(
            f"{what} = {batch_size} is not divisible by {parts}, the number of parts a batch is cut into"
        )
    held = (
        np.arange(batch_size)[rows]
        for (rows,) in sharding.addressable_devices_indices_map((batch_size,)).values()
    )
    return np.unique(np.concatenate(list(held)))


def _to_devices(
    block: dict, blocks: TrainBatches | EvalBatches, sharding: NamedSharding
) -> tuple[dict, tuple]:
    """Global arrays of this process's rows, and the bad images among them."""
    arrays = {name: _global_array(block[name], blocks, sharding) for name in block if name != "bad"}
    return arrays, block["bad"]


def _global_array(
    local: np.ndarray, blocks: TrainBatches | EvalBatches, sharding: NamedSharding
) -> jax.Array:
    shape = (blocks.batch_size, *local.shape[1:])
    places = sharding.addressable_devices_indices_map(shape)
    bounds = [
        np.searchsorted(blocks.rows, index[0].indices(blocks.batch_size)[:2])
        for index in places.values()
    ]
    parts = jax.device_put([local[first:last] for first, last in bounds], list(places))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)
