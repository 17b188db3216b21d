"""Batches on their way to the devices: threads that fill them in place, ahead of time.

What a row holds is decided in `batches.py`; `reading.py` reads the images before they are decoded.
Threads are enough: reading, decoding and resizing run without Python's lock.
"""

import collections
import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding

from vit_jax.base.errors import ConfigError
from vit_jax.data import crops, views
from vit_jax.data.batches import EvalBatches, TrainBatches
from vit_jax.data.options import Data
from vit_jax.data.order import BatchSpec, data_step
from vit_jax.data.reading import BLOCK, MIB, ReadAhead, join
from vit_jax.data.record import DataError, Source, check_bad_images
from vit_jax.devices import local

_INSTEAD = {"training": "another takes its place", "evaluation": "it is excluded from evaluation"}
_UNDER_WAY = 2  # batches being filled, so that no thread waits for the last rows of one


def train_batches(
    source: Source,
    config: BatchSpec,
    sharding: NamedSharding,
    *,
    start_step: int,
    stop_step: int,
    skipped: Sequence[tuple[int, int]] = (),
) -> "Batches":
    """The batches of steps `start_step` to `stop_step - 1`, B = `config.batch_size` examples each
    over all processes.

    They depend on (`config.seed`, step) alone: not on the number of devices, processes or threads,
    nor on where a run started.

    Args:
      source: the examples.
      config: the seed, the batch size, and how images are cut.
      sharding: of the batch dimension, the first one of every array.
      skipped: see `order.data_step`.

    Returns:
      An iterator of {"image": (B, H, W, C) uint8, "label": (B,) int32, or (B, classes) float32 if
      multi-label}.

    Raises:
      ConfigError: the batch cannot be split evenly, or the crop is larger than the image it is cut
        from.
    """
    rows = []
    for variant in views.variants(config):
        crops.check_crops(variant.data)
        rows.append(local_rows(sharding, variant.batch_size, "config.batch_size"))
    if config.data.native_budget:
        from vit_jax.data.budget_batches import BudgetBatches

        host_batches = BudgetBatches(source, config, rows)
    else:
        host_batches = TrainBatches(source, config, rows[0])
    batches = Batches(
        host_batches,
        lambda number: data_step(start_step + number, skipped),
        stop_step - start_step,
        config.data,
        sharding,
    )
    batches.images_before = functools.partial(views.images_before, config, skipped=skipped)
    return batches


def eval_batches(
    source: Source, config: BatchSpec, sharding: NamedSharding, batch_size: int | None = None
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
    crops.check_crops(config.data)
    batch_size = batch_size or config.eval.batch_size or config.batch_size
    rows = local_rows(sharding, batch_size, "the evaluation batch size")
    host_batches = EvalBatches(source, config, rows, batch_size=batch_size)
    return Batches(host_batches, lambda step: step, len(host_batches), config.data, sharding)


class Batches(Iterator[dict[str, jax.Array]]):
    """An iterator of global batches that are prepared ahead; `len` is their total number. Close it,
    or use it in a `with` statement: it has threads.

    At most `config_data.prefetch` batches are on the devices before they are asked for, and two
    more on the host; before these, encoded images as `config_data.read_ahead` says.

    Attributes:
      wait_seconds: how long `next` has waited for the host, in total.
      bad_images: name → reason of the unreadable images that this process has met, and replaced in
        training, or skipped in evaluation.
      reading: reads the images.
      images_before: of training, step -> how many images all steps before it have.
    """

    images_before: Callable[[int], int]

    def __init__(
        self,
        host_batches: TrainBatches | EvalBatches,
        step_of: Callable[[int], int],
        count: int,
        config_data: Data,
        sharding: NamedSharding,
    ):
        """Starts to prepare batches.

        Args:
          host_batches: fills them.
          step_of: number of a batch -> its step.
          count: of batches.
        """
        self._count = count
        self._step_of = step_of
        self.wait_seconds = 0.0
        self.bad_images: dict[str, str] = {}
        self._max_bad_images = config_data.max_bad_images
        self._host_batches = host_batches
        self._sharding = sharding
        rows = len(host_batches.rows)
        self._parts = [slice(first, first + BLOCK) for first in range(0, rows, BLOCK)]
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Semaphore(config_data.prefetch)
        self._closed = threading.Event()
        self._under_way: dict[int, _Filling] = {}
        self._decode_seconds = 0.0
        self._timing = threading.Lock()
        self._seconds_before = (0.0, 0.0)
        threads = config_data.threads or local.own_cores()
        # A negative memory means: choose it automatically.
        read_ahead = config_data.read_ahead
        read_ahead_bytes = read_ahead * MIB if read_ahead > 0 else read_ahead
        self.reading = ReadAhead(
            host_batches.source,
            lambda block: host_batches.examples(*self._place(block)),
            count * len(self._parts),
            memory=read_ahead_bytes,
            decoders=threads,
        )
        self._decoders = [
            threading.Thread(target=self._decode, name=f"decoding-{number}", daemon=True)
            for number in range(threads)
        ]
        self._filler = threading.Thread(target=self._fill, name="batches", daemon=True)
        for thread in (*self._decoders, self._filler):
            thread.start()  # the first batches are made while the caller compiles

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

    def read_wait(self) -> float:
        """Of the time that threads were busy with images since the last call, the share in which they
        waited for reads.
        """
        seconds = self.reading.wait_seconds, self._decode_seconds
        waited, decoded = np.subtract(seconds, self._seconds_before).tolist()
        self._seconds_before = seconds
        return waited / (waited + decoded) if waited + decoded else 0.0

    def end(self) -> None:
        """Lets there be no batch after those that are ready. A signal handler may call it."""
        self._ready.put(StopIteration())

    def _fill(self) -> None:
        """Puts the batches into the queue, and then `StopIteration`, or whatever error came."""
        try:
            waiting = collections.deque()
            for number in range(self._count):
                waiting.append(self._begin(number))
                if len(waiting) == _UNDER_WAY:
                    self._deliver(waiting.popleft())
                if self._closed.is_set():
                    return
            while waiting:
                self._deliver(waiting.popleft())
            self._ready.put(StopIteration())
        except BaseException as error:
            self._ready.put(error)

    def _begin(self, number: int) -> "_Filling":
        filling = _Filling(number, self._host_batches.empty(self._step_of(number)))
        self._under_way[number] = filling
        self.reading.allow(len(self._parts))
        return filling

    def _decode(self) -> None:
        """What a thread does: fills parts of the batches under way."""
        reading = self.reading
        while block := reading.take():
            filling = self._under_way[block.number // len(self._parts)]
            step, part = self._place(block.number)
            start = time.perf_counter()
            try:
                read = functools.partial(reading.record, block)
                filling.parts.put(self._host_batches.fill(filling.batch, step, part, read))
            except BaseException as error:
                filling.parts.put(error)
            reading.release(block)
            with self._timing:
                self._decode_seconds += time.perf_counter() - start - block.wait_seconds

    def _place(self, block: int) -> tuple[int, slice]:
        """The step of a block of rows, and which rows these are."""
        number, part = divmod(block, len(self._parts))
        return self._step_of(number), self._parts[part]

    def _deliver(self, filling: "_Filling") -> None:
        if self._closed.is_set():
            return
        bad = {}
        for _ in self._parts:
            part = filling.parts.get()
            if isinstance(part, BaseException):
                raise part
            bad |= part
        self._room.acquire()
        if self._closed.is_set():
            return
        del self._under_way[filling.number]
        # The host's arrays are not used again: on a CPU, the device's are the same memory.
        rows, size = self._host_batches.layout(self._step_of(filling.number))
        arrays = {
            name: global_array(array, rows, size, self._sharding)
            for name, array in filling.batch.items()
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
        self.reading.close()
        for filling in list(self._under_way.values()):
            filling.parts.put(StopIteration())
        join([self._filler, *self._decoders])

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class _Filling:
    """A batch that threads fill.

    Attributes:
      parts: what filling each part gave: bad images, or an error.
    """

    number: int
    batch: dict[str, np.ndarray]
    parts: queue.SimpleQueue = dataclasses.field(default_factory=queue.SimpleQueue)


def local_rows(
    sharding: NamedSharding, batch_size: int, what: str = "the batch size"
) -> np.ndarray:
    """The rows of a global batch that this process's devices hold, (n,) int64, rising.

    Raises:
      ConfigError: `batch_size`, called `what`, is not divisible by the number of shards of the
        batch.
    """
    axes = sharding.spec[0] if len(sharding.spec) else None
    axes = (axes,) if isinstance(axes, str) else axes or ()
    shards = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if batch_size % shards:
        raise ConfigError(
            f"{what} = {batch_size} is not divisible by {shards}, the number of shards of a batch"
        )
    held = (
        np.arange(batch_size)[rows]
        for (rows,) in sharding.addressable_devices_indices_map((batch_size,)).values()
    )
    return np.unique(np.concatenate(list(held)))


def global_array(
    own: np.ndarray, rows: np.ndarray, batch_size: int, sharding: NamedSharding
) -> jax.Array:
    """The batch of which this process has the `rows`, from `local_rows`, as `own`."""
    shape = (batch_size, *own.shape[1:])
    places = sharding.addressable_devices_indices_map(shape)
    bounds = [np.searchsorted(rows, index[0].indices(batch_size)[:2]) for index in places.values()]
    pieces = [own[first:last] for first, last in bounds]
    shards = jax.device_put(pieces, list(places))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.cache  # An image is met at each evaluation again.
def _warn_of_image(name: str, why: str, instead: str) -> None:
    logging.warning("Image %s cannot be read (%s): %s.", name, why, instead)
