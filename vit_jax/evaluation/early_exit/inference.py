"""Inference with early exit: images that are confident leave, the others are gathered into full
batches for the next exit and carry along what it takes over from the exits before.

A network of E exits is compiled as E programs for full batches, and as two for each waiting room: to make it, and
to put rows into it. What remains at the end runs in smaller programs, of a half, a quarter or an eighth of the
rows; those that are met are compiled. Which image goes where is decided on the host;
on the devices nothing depends on values. Each device has waiting rooms of its own, so that nothing is
sent between devices.

    Two devices, batches of two rows on each; a to h are images, a dot is a row or slot without one:

        exit 1, batch 0          [a b | c d]          a and d are confident: they leave
        exit 1, batch 1          [e f | g h]          e leaves
        waiting for exit 2       [b f . . | c g h .]  slots, of which there are more than shown
        both devices have two:
        exit 2                   [b f | c g]          those that wait longest; h stays
        no more batches:
        exit 2                   [. | h]              a smaller program
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.devices import meshes, processes
from vit_jax.evaluation.forward import make_exit
from vit_jax.models import classifier
from vit_jax.models.registry import Weights

_EMPTY = -1  # The number of a row without an image.
# What remains runs in batches of a half, a quarter or an eighth: three more programs at most.
_HALVINGS = 3
# Batches that may be unanswered before images that wait continue in part-filled ones.
_PATIENCE = 32


class Answers(NamedTuple):
    """What became of a batch of n images, in their order.

    Attributes:
      logits: (n, classes) float32, of the exit that the image left at.
      exits: (n,) int32, which that is, from 0.
    """

    logits: np.ndarray
    exits: np.ndarray


class Running(NamedTuple):
    """An exit's batch whose results have not been read yet.

    Attributes:
      exit: which one, from 0.
      numbers: (B,) of its images, in the order that they came in.
      logits, confidence: (B, classes), (B,) float32.
      rows: what the next exit needs of each image; `None` after the last exit.
    """

    exit: int
    numbers: np.ndarray
    logits: jax.Array
    confidence: jax.Array
    rows: Any


class Inference:
    """A network with exits, compiled for batches of one size.

    Attributes:
      batch_size: B.
      shape: (B, classes), of logits.
      sharding: of a batch.
      rows: how many rows each exit has computed, with and without an image, since `answers` was last called.
      left: how many images have left at each exit.
    """

    def __init__(
        self,
        definition: nnx.GraphDef,
        model_config: classifier.ClassifierConfig,
        data: Data,
        *,
        activation: Callable[[jax.Array], jax.Array],
        batch_size: int,
        mesh: Mesh,
    ):
        """Compiles nothing yet.

        Args:
          definition, model_config, data: see `forward.make_forward`.
          activation: from logits to probabilities, the largest of which is the confidence.
          batch_size: B, of every exit.
          mesh: the batch is sharded over its devices, or whole on each where they do not divide it.

        Raises:
          ConfigError: the model has no exits, or there are several processes.
        """
        exits = check_exits(model_config)
        if processes.count() > 1:
            raise ConfigError("images leave early in one process only: start it without the others")
        self._exit = make_exit(definition, model_config, data)
        self._last, self._activation = exits - 1, activation
        self.batch_size, self._mesh = batch_size, mesh
        divides = batch_size % mesh.size == 0
        self.sharding = meshes.batch_sharding(mesh) if divides else meshes.replicated(mesh)
        self._lanes = mesh.size if divides else 1
        self.shape = (batch_size, model_config.num_classes)
        self._costs = np.array(model_config.exit_flops) / 2e9
        self._first = jax.jit(self._run_first, out_shardings=self.sharding)
        self._later = jax.jit(self._run_later, static_argnums=0, out_shardings=self.sharding)
        self._put = jax.jit(self._put_rows, donate_argnums=0, out_shardings=self.sharding)
        self._room = jax.jit(_zeros, static_argnums=1, out_shardings=self.sharding)
        self.rows, self.left = np.zeros(exits, np.int64), np.zeros(exits, np.int64)

    def answers(
        self,
        weights: Weights,
        thresholds: Sequence[float],
        batches: Iterable[tuple[jax.Array | np.ndarray, np.ndarray]],
    ) -> Iterator[Answers]:
        """The answers to batches of images, one for each, in their order; later than they come in.

        Args:
          weights: on the mesh.
          thresholds: how confident an image has to be to leave at each exit but the last.
          batches: of images (B, H, W, C) uint8, and which of their rows are images, (B,) bool; the
            others are not looked at, and their answers are zeros.
        """
        self.rows, self.left = np.zeros_like(self.rows), np.zeros_like(self.left)
        going = _Pass(self, weights, thresholds)
        for images, real in batches:
            going.start(images, real)
            yield from going.answered()
        going.flush()
        yield from going.answered()

    def gflops(self) -> float:
        """Mean cost of the images that have left, in 10⁹ multiply-adds."""
        return float(self.left @ self._costs / max(self.left.sum(), 1))

    @property
    def runs(self) -> list[float]:
        """How many full batches each exit has computed, a smaller one as its share."""
        return (self.rows / self.batch_size).tolist()

    def padding(self) -> float:
        """The share of all operations that went into rows without an image."""
        own = np.diff(self._costs, prepend=0)
        images = np.cumsum(self.left[::-1])[::-1]  # that each exit has computed
        return float(1 - (own @ images) / max(own @ self.rows, 1e-30))

    def text(self) -> str:
        """Where images left, for a log."""
        shares = ", ".join(f"{n / max(self.left.sum(), 1):.0%}" for n in self.left)
        return (
            f"{shares} of the images left at the exits; {self.gflops():.3g} GFLOPs (multiply-adds) an "
            f"image instead of {self._costs[-1]:.3g}; {self.padding():.0%} of the operations were padding"
        )

    def start(
        self, weights: Weights, images: jax.Array | np.ndarray, numbers: np.ndarray
    ) -> Running:
        """Starts the first exit on new images; of a batch that is not full, on as few rows as hold them."""
        last = int(np.max(np.flatnonzero(numbers != _EMPTY), initial=0))
        size = self.batch_size if self._lanes > 1 else _smallest_size(last + 1, self.batch_size)
        images, numbers = images[:size], numbers[:size]
        with jax.set_mesh(self._mesh):
            images = jax.device_put(images, self.sharding)
            logits, confidence, carried = self._first(weights, images)
        self.rows[0] += size
        return Running(0, numbers, logits, confidence, (images, carried))

    def go_on(self, exit: int, weights: Weights, room: "_WaitingRoom") -> Running:
        """Starts a later exit on images that wait for it."""
        slots, numbers = room.take()
        slots = jax.device_put(slots, self.sharding)
        with jax.set_mesh(self._mesh):
            logits, confidence, rows = self._later(exit, weights, room.rows, slots)
        self.rows[exit] += slots.size
        return Running(exit, numbers, logits, confidence, rows)

    def waiting_rooms(self) -> list["_WaitingRoom"]:
        """Empty ones, for each exit but the first."""
        lanes, each = self._lanes, self.batch_size // self._lanes
        return [_WaitingRoom(lanes, each, self._room, self._put) for _ in range(self._last)]

    def _run_first(self, weights: Weights, images: jax.Array):
        logits, carried = self._exit(0, weights, images, None)
        return logits, self._confidence(logits), carried

    def _run_later(self, exit: int, weights: Weights, waiting: Any, slots: jax.Array):
        images, carried = self._reshaped(jax.vmap(_take)(waiting, slots), (slots.size,), 2)
        logits, carried = self._exit(exit, weights, images, carried)
        return logits, self._confidence(logits), None if exit == self._last else (images, carried)

    def _put_rows(self, waiting: Any, rows: Any, slots: jax.Array):
        rows = self._reshaped(rows, slots.shape, 1)
        return jax.vmap(_put)(waiting, rows, slots)

    def _confidence(self, logits: jax.Array) -> jax.Array:
        return self._activation(logits).max(axis=-1)

    @staticmethod
    def _reshaped(rows: Any, leading: tuple[int, ...], axes: int):
        """`rows` with other `leading` axes in place of the first `axes`."""
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[axes:]), rows)


class _Pass:
    """One pass over batches of images: who is where, and what is computed meanwhile."""

    def __init__(self, inference: Inference, weights: Weights, thresholds: Sequence[float]):
        self._inference, self._weights, self._thresholds = inference, weights, tuple(thresholds)
        self._rooms = inference.waiting_rooms()
        self._running: collections.deque[Running] = collections.deque()
        self._open: collections.deque[_Open] = collections.deque()
        self._count = 0

    def start(self, images: jax.Array | np.ndarray, real: np.ndarray) -> None:
        """Takes in a batch."""
        inference, size = self._inference, self._inference.batch_size
        numbers = np.where(real, self._count * size + np.arange(size), _EMPTY)
        self._open.append(_Open(self._count, int(np.sum(real)), inference.shape))
        self._count += 1
        self._running.append(inference.start(self._weights, images, numbers))
        # The devices compute while the results before are looked at; but with one image at a time an
        # answer is wanted at once.
        self._settle(unread=1)
        if size == 1 or len(self._open) > _PATIENCE:
            self.flush()

    def answered(self) -> Iterator[Answers]:
        """The answers to the batches that are complete, up to the first that is not."""
        while self._open and not self._open[0].missing:
            yield self._open.popleft().answers

    def flush(self) -> None:
        """Lets all images that wait continue, in batches that are not full."""
        self._settle(unread=0)
        for exit, room in enumerate(self._rooms, start=1):
            while room.waiting():
                self._running.append(self._inference.go_on(exit, self._weights, room))
                self._settle(unread=0)

    def _settle(self, unread: int) -> None:
        """Reads results until those of at most `unread` batches are left."""
        while len(self._running) > unread:
            self._leave_or_wait(self._running.popleft())

    def _leave_or_wait(self, done: Running) -> None:
        """Images leave, or wait for the next exit, which starts if it can."""
        confidence, logits = jax.device_get((done.confidence, done.logits))
        leaves = np.full(len(confidence), True)
        if done.exit < len(self._thresholds):
            leaves = confidence >= self._thresholds[done.exit]
        leaving = np.flatnonzero((done.numbers != _EMPTY) & leaves)
        self._inference.left[done.exit] += len(leaving)
        for row in leaving:
            batch, place = divmod(int(done.numbers[row]), self._inference.batch_size)
            self._open[batch - self._open[0].number].answer(place, logits[row], done.exit)
        staying = np.where(leaves, _EMPTY, done.numbers)
        if (staying == _EMPTY).all():
            return
        room = self._rooms[done.exit]
        room.add(done.rows, staying)
        if room.full():
            self._running.append(self._inference.go_on(done.exit + 1, self._weights, room))


class _Open:
    """A batch that has not all its answers."""

    def __init__(self, number: int, images: int, shape: tuple[int, int]):
        self.number, self.missing = number, images
        self.answers = Answers(np.zeros(shape, np.float32), np.zeros(shape[0], np.int32))

    def answer(self, place: int, logits: np.ndarray, exit: int) -> None:
        self.answers.logits[place], self.answers.exits[place] = logits, exit
        self.missing -= 1


class _WaitingRoom:
    """Images that wait for an exit: on every device slots for their rows, on the host the numbers of
    the images in them.
    """

    def __init__(self, lanes: int, batch: int, make: Callable, put: Callable):
        """For batches of `batch` rows on each of `lanes` devices; `make` and `put` are compiled."""
        self._batch, self._make, self._put = batch, make, put
        # What fills a batch, and what one more brings. Where several devices have to start together,
        # one may have to wait longer than the others.
        self._capacity = 2 * batch if lanes == 1 else 4 * batch
        self._numbers = np.full((lanes, self._capacity), _EMPTY)
        self.rows: Any = None

    def waiting(self) -> bool:
        """Whether any image waits."""
        return bool((self._numbers != _EMPTY).any())

    def full(self) -> bool:
        """Whether the exit should start: all devices have a full batch, or one has no more room."""
        waiting = (self._numbers != _EMPTY).sum(axis=1)
        return waiting.min() >= self._batch or waiting.max() > self._capacity - self._batch

    def add(self, rows: Any, numbers: np.ndarray) -> None:
        """Keeps the rows (B, …) of the images that `numbers` (B,) has."""
        numbers = numbers.reshape(len(self._numbers), -1)
        # Rows that nobody needs get a slot that is not there, each another.
        slots = np.broadcast_to(self._capacity + np.arange(numbers.shape[1]), numbers.shape).copy()
        for lane, taken in enumerate(self._numbers):
            stays = np.flatnonzero(numbers[lane] != _EMPTY)
            free = np.flatnonzero(taken == _EMPTY)[: len(stays)]
            slots[lane, stays], taken[free] = free, numbers[lane, stays]
        sharding = jax.tree.leaves(rows)[0].sharding
        if self.rows is None:
            self.rows = self._make(rows, self._numbers.shape)
        self.rows = self._put(self.rows, rows, jax.device_put(slots, sharding))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """The slots (lanes, batch or a part of it, see `_smallest_size`) of those that wait longest, which become
        free, and the numbers of the images in them; the rows stay readable until `add`.
        """
        most = int((self._numbers != _EMPTY).sum(axis=1).max())
        size = _smallest_size(most, self._batch)
        age = np.where(self._numbers == _EMPTY, np.iinfo(self._numbers.dtype).max, self._numbers)
        slots = np.argsort(age, axis=1, kind="stable")[:, :size]
        numbers = np.take_along_axis(self._numbers, slots, axis=1)
        np.put_along_axis(self._numbers, slots, _EMPTY, axis=1)
        return slots, numbers.ravel()


def _smallest_size(rows: int, batch: int) -> int:
    """The rows of the smallest program that holds that many."""
    for _ in range(_HALVINGS):
        if batch % 2 or batch // 2 < rows:
            break
        batch //= 2
    return batch


def check_thresholds(
    model_config: classifier.ClassifierConfig, thresholds: Sequence[float]
) -> None:
    """Raises `ConfigError` unless there is a threshold for each exit but the last."""
    exits = check_exits(model_config)
    if len(thresholds) != exits - 1:
        raise ConfigError(
            f"{len(thresholds)} thresholds for a model with {exits} exits: it takes {exits - 1}, one for "
            "each exit but the last"
        )


def check_exits(model_config: classifier.ClassifierConfig) -> int:
    """How many exits a model has. Raises `ConfigError` if images cannot leave it early."""
    if len(model_config.exit_flops) < 2:
        raise ConfigError(
            "images cannot leave this model early: it has no exits, as Dynamic ViTs (DVT-…) have"
        )
    return len(model_config.exit_flops)


def _zeros(rows: Any, leading: tuple[int, ...]):
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape[1:]), x.dtype), rows)


def _take(waiting: Any, slots: jax.Array):
    return jax.tree.map(lambda x: x[slots], waiting)


def _put(waiting: Any, rows: Any, slots: jax.Array):
    def put(x, new):
        return x.at[slots].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put, waiting, rows)
