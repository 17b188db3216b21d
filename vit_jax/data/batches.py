"""What is in a batch, as NumPy arrays on the host: a pure function of (seed, step), whoever asks
and however often.

Training covers an endless line of positions, `batch_size` of them a step; every run through the
data set is another permutation. A position alone decides its example and its crop. Who builds which
rows, and how they reach the devices, is in `loader.py`.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from grain.experimental import index_shuffle

from vit_jax.data import decode
from vit_jax.data.record import BadImage, DataError, Record, Source


def batch_indices(seed: int, step: int, batch_size: int, num_examples: int) -> np.ndarray:
    """The examples of a training step, (batch_size,) int64. Needs no state, and no memory of the
    data set's size.
    """
    return example_ids(seed, step * batch_size + np.arange(batch_size), num_examples)


def example_ids(seed: int, positions: np.ndarray, num_examples: int) -> np.ndarray:
    """The examples at `positions` of the line, (n,) int64: every `num_examples` of them are a
    permutation of all.
    """
    epochs, offsets = np.divmod(positions, num_examples)
    seeds = {epoch: _epoch_seed(seed, epoch) for epoch in np.unique(epochs).tolist()}
    ids = [
        index_shuffle(offset, max_index=num_examples - 1, seed=seeds[epoch], rounds=4)
        for epoch, offset in zip(epochs.tolist(), offsets.tolist(), strict=True)
    ]
    return np.asarray(ids, np.int64)


class TrainBatches:
    """The rows `rows` of the training batches, by step; a random-access source for Grain, and small
    enough to pickle.

    An element is a dict of `image` (n, S, S, 3) uint8, `label` ((n,) int32, or (n, classes) float32
    of zeros and ones for a multi-label source), and `bad`, the (name, reason) of unreadable images
    that were replaced: where `config.data.on_bad_image` is 'skip', an example's place is taken by
    the next readable one in the order of its epoch, cut as the first would have been.
    """

    def __init__(self, source: Source, config, rows: Sequence[int] | np.ndarray, *, stop_step: int):
        self._source = source
        self._seed, self._data = config.seed, config.data
        self.rows, self.batch_size, self._stop_step = (
            np.asarray(rows, np.int64),
            config.batch_size,
            stop_step,
        )

    def __len__(self) -> int:
        return self._stop_step

    def __getitem__(self, step: int) -> dict:
        positions = step * self.batch_size + self.rows
        read = _reader(self._source, example_ids(self._seed, positions, len(self._source)))
        batch, bad = _empty(self._source, len(positions), self._data.image_size), {}
        for row, position in enumerate(positions.tolist()):
            example, image = self._readable(position, functools.partial(read, row), bad)
            random = np.random.Generator(
                np.random.Philox(key=np.asarray([self._seed, position], np.uint64))
            )
            batch["image"][row] = decode.train_crop(image, self._data, random)
            _set_label(batch["label"], row, example, self._source)
        return batch | {"bad": tuple(bad.items())}

    def _readable(
        self, position: int, fetch: Callable[[], Record], bad: dict[str, str]
    ) -> tuple[Record, np.ndarray]:
        """The example at `position`, which `fetch` reads, or the next readable one; with pixels.
        Adds to `bad`.
        """
        size = len(self._source)
        epoch, offset = divmod(position, size)
        for ahead in range(size):
            try:
                example = fetch()
                return example, decode.decode(example.image, name=example.name)
            except BadImage as error:
                if self._data.on_bad_image == "error":
                    raise
                bad[error.name] = error.why
                check_bad_images(bad, self._data.max_bad_images)
            following = np.asarray([epoch * size + (offset + ahead + 1) % size])
            fetch = functools.partial(
                _reader(self._source, example_ids(self._seed, following, size)), 0
            )
        raise DataError(
            f"none of the {size} training images can be read; the first: {next(iter(bad.items()))}"
        )


class EvalBatches:
    """The rows `rows` of the evaluation batches, by step: every example once, in order.

    An element is as in `TrainBatches`, with `mask` (n,) float32: 1 for an example, 0 for padding
    after the last one.
    """

    def __init__(
        self, source: Source, config, rows: Sequence[int] | np.ndarray, *, batch_size: int
    ):
        self._source, self._data = source, config.data
        self.rows, self.batch_size = np.asarray(rows, np.int64), batch_size

    def __len__(self) -> int:
        return -(-len(self._source) // self.batch_size)

    def __getitem__(self, step: int) -> dict:
        ids = step * self.batch_size + self.rows
        mask = ids < len(self._source)
        batch = _empty(self._source, len(ids), self._data.image_size)
        read = _reader(self._source, ids[mask])
        for row in range(mask.sum()):  # rows rise, so padding comes last
            example = read(row)
            pixels = decode.decode(example.image, name=example.name)
            batch["image"][row] = decode.eval_crop(pixels, self._data)
            _set_label(batch["label"], row, example, self._source)
        return batch | {"mask": mask.astype(np.float32), "bad": ()}


def check_bad_images(bad: dict[str, str], most: int) -> None:
    """Raises `DataError` if more than `most` images could not be read; `bad` has their names and
    the reasons.
    """
    if len(bad) > most:
        some = "; ".join(f"{name}: {why}" for name, why in list(bad.items())[:5])
        raise DataError(
            f"{len(bad)} training images cannot be read, more than config.data.max_bad_images = {most} ({some}). "
            "Repair or remove them, or allow more."
        )


def _epoch_seed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def _reader(source: Source, ids: np.ndarray) -> Callable[[int], Record]:
    """A function row → record of `ids[row]`: read now, in one block, where the source can; else
    when asked.
    """
    if hasattr(source, "read"):
        return source.read(ids).__getitem__
    return lambda row: source[int(ids[row])]


def _empty(source: Source, rows: int, size: int) -> dict[str, np.ndarray]:
    label = (
        np.zeros((rows, len(source.classes)), np.float32)
        if source.multi_label
        else np.zeros(rows, np.int32)
    )
    return {"image": np.zeros((rows, size, size, 3), np.uint8), "label": label}


def _set_label(labels: np.ndarray, row: int, example: Record, source: Source) -> None:
    ones, classes = example.label if source.multi_label else (example.label,), len(source.classes)
    for label in ones:
        if not 0 <= label < classes:
            raise DataError(
                f"the label {label} of {example.name} is out of range: there are {classes} classes"
            )
    if source.multi_label:
        labels[row, list(ones)] = 1
    else:
        labels[row] = example.label
