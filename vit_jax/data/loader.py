"""Batches on their way to the devices: threads that fill them in place, ahead of time.

What a row holds is decided in `batches.py`. Threads are enough: reading, decoding and resizing run
without Python's lock.
"""

import collections
import concurrent.futures
import functools
import math
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding

from vit_jax.base.errors import ConfigError
from vit_jax.data import crops
from vit_jax.data.batches import (
    EvalBatches,
    TrainBatches,
    check_bad_images,
)
from vit_jax.data.options import Data
from vit_jax.data.order import data_step
from vit_jax.data.record import DataError, Source

if TYPE_CHECKING:
    from vit_jax.config import Config

BLOCK = 16  # rows that a thread fills at once
_INSTEAD = {"training": "another takes its place", "evaluation": "it is left out of evaluation"}
_UNDER_WAY = 2  # batches being filled, so that no thread waits for the last rows of one


def train_batches(
    source: Source,
    config: "Config",
    sharding: NamedSharding,
    *,
    start_step: int,
    stop_step: int,
    left_out: Sequence[tuple[int, int]] = (),
) -> "Batches":
    """The batches of steps `start_step` to `stop_step - 1`, B = `config.batch_size` examples each
    over all processes.

    They depend on (`config.seed`, step) alone: not on the number of devices, processes or threads,
    nor on where a run started.

    Args:
      source: the examples.
      config: the whole config.
      sharding: of the batch dimension, the first one of every array.
      left_out: see `order.data_step`.

    Returns:
      An iterator of {"image": (B, H, W, C) uint8, "label": (B,) int32, or (B, classes) float32 if
      multi-label}.

    Raises:
      ConfigError: the batch cannot be cut evenly, or the crop is larger than the image it is cut
        from.
    """
    crops.check(config.data)
    rows = local_rows(sharding, config.batch_size, "config.batch_size")
    host_batches = TrainBatches(source, config, rows)
    steps = (data_step(step, left_out) for step in range(start_step, stop_step))
    return Batches(host_batches, steps, stop_step - start_step, config.data, sharding)


def eval_batches(
    source: Source, config: "Config", sharding: NamedSharding, batch_size: int | None = None
) -> "Batches":
    """Batches with every example once, in order, the last one padded.

    Args:
      source, config, sharding: as for `train_batches`.
      batch_size: over all processes; by default `config.eval.batch_size`, or `config.batch_size`
        where that is 0.

    Returns:
      An iterator of {"image", "label", "mask": (B,) float32, 0 for padding and for what could not be
      read}.
    """
    crops.check(config.data)
    batch_size = batch_size or config.eval.batch_size or config.batch_size
    rows = local_rows(sharding, batch_size, "the evaluation batch size")
    host_batches = EvalBatches(source, config, rows, batch_size=batch_size)
    return Batches(host_batches, range(len(host_batches)), len(host_batches), config.data, sharding)


class Batches(Iterator[dict[str, jax.Array]]):
    """An iterator of global batches that are prepared ahead; `len` is their total number. Close it,
    or use it in a `with` statement: it has threads.

    At most `config_data.prefetch` batches are on the devices before they are asked for, and two
    more on the host.

    Attributes:
      wait_seconds: how long `next` has waited for the host, in total.
      bad_images: name → reason of the unreadable images that this process has met, and replaced in
        training, or left out of evaluation.
    """

    def __init__(
        self,
        host_batches: TrainBatches | EvalBatches,
        steps: Iterable[int],
        count: int,
        config_data: Data,
        sharding: NamedSharding,
    ):
        """Starts to prepare batches.

        Args:
          host_batches: fills them.
          steps: of the batches, `count` of them.
        """
        self._count = count
        self.wait_seconds = 0.0
        self.bad_images: dict[str, str] = {}
        self._max_bad_images = config_data.max_bad_images
        self._host_batches, self._sharding = host_batches, sharding
        self._threads = config_data.threads or len(os.sched_getaffinity(0))
        self._ready: queue.Queue = queue.Queue()
        self._room = threading.Semaphore(config_data.prefetch)
        self._closed = threading.Event()
        self._filler = threading.Thread(target=self._fill, args=(steps,), daemon=True)
        self._filler.start()  # the first batches are made while the caller compiles

    def __next__(self) -> dict[str, jax.Array]:
        if self._closed.is_set():
            raise StopIteration
        start = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds += time.perf_counter() - start
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._room.release()
        batch, bad = item
        self._note(bad)
        return batch

    def __len__(self) -> int:
        return self._count

    def _fill(self, steps: Iterable[int]) -> None:
        """Puts the batches of `steps` into the queue, and then `StopIteration`, or whatever error
        came.
        """
        try:
            with concurrent.futures.ThreadPoolExecutor(self._threads, "batches") as pool:
                under_way = collections.deque()
                try:
                    for step in steps:
                        under_way.append(self._begin(pool, step))
                        if len(under_way) == _UNDER_WAY:
                            self._deliver(*under_way.popleft())
                        if self._closed.is_set():
                            return
                    while under_way:
                        self._deliver(*under_way.popleft())
                finally:
                    pool.shutdown(cancel_futures=True)
            self._ready.put(StopIteration())
        except BaseException as error:
            self._ready.put(error)

    def _begin(self, pool: concurrent.futures.Executor, step: int) -> tuple[dict, list]:
        batch = self._host_batches.empty()
        parts = [slice(i, i + BLOCK) for i in range(0, len(self._host_batches.rows), BLOCK)]
        return batch, [pool.submit(self._host_batches.fill, batch, step, part) for part in parts]

    def _deliver(self, batch: dict[str, np.ndarray], filled: list) -> None:
        self._room.acquire()
        if self._closed.is_set():
            return
        bad = {}
        for part in filled:
            bad |= part.result()
        # The host's arrays are not used again: on a CPU, the device's are the same memory.
        arrays = {
            name: _global_array(array, self._host_batches, self._sharding)
            for name, array in batch.items()
        }
        self._ready.put((arrays, bad))

    def _note(self, bad: dict[str, str]) -> None:
        kind = self._host_batches.kind
        for name, why in bad.items():
            if name not in self.bad_images:
                self.bad_images[name] = why
                _warn_of_image(name, why, _INSTEAD[kind])
        try:
            check_bad_images(self.bad_images, self._max_bad_images, kind)
        except DataError:
            self.close()
            raise

    def close(self) -> None:
        """Stops the threads. No batch comes after it."""
        self._closed.set()
        self._room.release()
        self._filler.join()

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
    shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if batch_size % shards:
        raise ConfigError(
            f"{what} = {batch_size} is not divisible by {shards}, the number of parts a batch is cut into"
        )
    held = (
        np.arange(batch_size)[rows]
        for (rows,) in sharding.addressable_devices_indices_map((batch_size,)).values()
    )
    return np.unique(np.concatenate(list(held)))


def _global_array(
    local: np.ndarray, host_batches: TrainBatches | EvalBatches, sharding: NamedSharding
) -> jax.Array:
    shape = (host_batches.batch_size, *local.shape[1:])
    places = sharding.addressable_devices_indices_map(shape)
    bounds = [
        np.searchsorted(host_batches.rows, index[0].indices(host_batches.batch_size)[:2])
        for index in places.values()
    ]
    shards = jax.device_put([local[first:last] for first, last in bounds], list(places))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.cache  # An image is met at each evaluation again.
def _warn_of_image(name: str, why: str, instead: str) -> None:
    logging.warning("Image %s cannot be read (%s): %s.", name, why, instead)
