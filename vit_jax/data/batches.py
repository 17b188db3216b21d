"""What is in a batch, as NumPy arrays on the host: a pure function of (seed, step), whoever asks
and however often.

Training covers an endless line of positions, `batch_size` of them a step; every run through the
data set is another permutation. A position alone decides its example and its crop. With repeated
augmentation, a batch has several crops of an example, and a run through the data set takes as many
times more steps. Who builds which rows, and how they reach the devices, is in `loader.py`.
"""

import functools
import types
from collections.abc import Callable, Sequence

import numpy as np
from grain.experimental import index_shuffle

from vit_jax.data import decode
from vit_jax.data.record import BadImage, DataError, Record, Source


def batch_indices(
    seed: int, step: int, batch_size: int, num_examples: int, repeats: int = 1
) -> np.ndarray:
    """The examples of a training step, (batch_size,) int64. Needs no state, and no memory of the
    data set's size.
    """
    places = step * batch_size + repeated_places(batch_size, repeats)
    return example_ids(seed, places // repeats, num_examples)


def repeated_places(batch_size: int, repeats: int) -> np.ndarray:
    """Where the rows of a batch are in a line that has every example `repeats` times running:
    (batch_size,) int64, a permutation.

    Repeated augmentation (arXiv:1902.05509) as DeiT does it deals the copies of an example to
    different devices. Here they are a share 1 / `repeats` of the batch apart, and each share is
    rotated by two more than the one before: so that copies are not mixed with each other by mixup,
    and are in different groups of RandAugment. Where `repeats` does not divide the batch, the last
    example goes on in the next. DeiT begins another permutation when as many images were seen as
    the set has, which leaves out most examples of the last; here every example comes as often.
    """
    shares = [np.roll(np.arange(copy, batch_size, repeats), -2 * copy) for copy in range(repeats)]
    return np.concatenate(shares)


def data_step(step: int, left_out: Sequence[tuple[int, int]]) -> int:
    """Which step's data a step trains on when some data are left out.

    Args:
      left_out: (first, count) of steps whose data are not used, none of them twice.
    """
    for first, count in sorted(left_out):
        if step >= first:
            step += count
    return step


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


def crop_draws(seed: int, positions: np.ndarray) -> np.ndarray:
    """The random numbers in [0, 1) that decide the crops at rising `positions`, (n, decode.DRAWS).

    Philox is a function of (key, counter); a position has a stretch of the counter to itself.
    """
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    draws = [
        np.random.Philox(key=seed, counter=int(run[0]) * (decode.DRAWS // 4)).random_raw(
            len(run) * decode.DRAWS
        )
        for run in runs
    ]
    return ((np.concatenate(draws) >> np.uint64(11)) * 2.0**-53).reshape(-1, decode.DRAWS)


class TrainBatches:
    """The rows `rows` of the training batches, by step.

    A batch is a dict of `image` (n, S, S, 3) uint8 and `label` ((n,) int32, or (n, classes) float32
    of zeros and ones for a multi-label source). Where `config.data.on_bad_image` is 'skip', the
    place of an unreadable example is taken by the next readable one in the order of its epoch, cut
    as the first would have been.
    """

    def __init__(self, source: Source, config, rows: Sequence[int] | np.ndarray):
        self._source, self._seed = source, config.seed
        self._data = types.SimpleNamespace(**config.data)  # a ConfigDict is slow to look into
        self.rows, self.batch_size = np.asarray(rows, np.int64), config.batch_size
        self._places = repeated_places(config.batch_size, config.data.repeats)[self.rows]

    def empty(self) -> dict[str, np.ndarray]:
        """A batch to fill."""
        return _empty(self._source, len(self.rows), self._data.image_size)

    def fill(self, batch: dict[str, np.ndarray], step: int, part: slice) -> dict[str, str]:
        """Fills the rows `part` of a batch, and of no other; threads may fill others meanwhile.

        Returns:
          name → reason of the unreadable images that were replaced.
        """
        start = step * self.batch_size
        examples = (start + self._places[part]) // self._data.repeats
        records = reader(self._source)(example_ids(self._seed, examples, len(self._source)))
        images, labels, bad = batch["image"][part], batch["label"][part], {}
        draws = crop_draws(self._seed, start + self.rows[part]).tolist()
        for row, position in enumerate(examples.tolist()):
            cut = functools.partial(
                decode.train_crop, config_data=self._data, draws=draws[row], out=images[row]
            )
            fetch = functools.partial(records.__getitem__, row)
            example = self._cut_readable(position, fetch, cut, bad)
            _set_label(labels, row, example, self._source)
        return bad

    def _cut_readable(
        self, position: int, fetch: Callable[[], Record], cut: Callable, bad: dict[str, str]
    ) -> Record:
        """Cuts the example at `position`, which `fetch` reads, or the next readable one, which is
        given back. Adds to `bad`.
        """
        size = len(self._source)
        epoch, offset = divmod(position, size)
        for ahead in range(size):
            try:
                example = fetch()
                cut(example.image, name=example.name)
                return example
            except BadImage as error:
                if self._data.on_bad_image == "error":
                    raise
                bad[error.name] = error.why
                check_bad_images(bad, self._data.max_bad_images)
            following = np.asarray([epoch * size + (offset + ahead + 1) % size])
            (other,) = example_ids(self._seed, following, size).tolist()
            fetch = functools.partial(self._source.__getitem__, other)
        raise DataError(
            f"none of the {size} training images can be read; the first: {next(iter(bad.items()))}"
        )


class EvalBatches:
    """The rows `rows` of the evaluation batches, by step: every example once, in order.

    A batch is as in `TrainBatches`, with `mask` (n,) float32: 1 for an example, 0 for padding after
    the last one, which is black and has the label 0, or none.
    """

    def __init__(
        self, source: Source, config, rows: Sequence[int] | np.ndarray, *, batch_size: int
    ):
        self._source, self._data = source, types.SimpleNamespace(**config.data)
        self.rows, self.batch_size = np.asarray(rows, np.int64), batch_size

    def __len__(self) -> int:
        return -(-len(self._source) // self.batch_size)

    def empty(self) -> dict[str, np.ndarray]:
        """A batch to fill."""
        mask = np.empty(len(self.rows), np.float32)
        return _empty(self._source, len(self.rows), self._data.image_size) | {"mask": mask}

    def fill(self, batch: dict[str, np.ndarray], step: int, part: slice) -> dict[str, str]:
        """Fills the rows `part` of a batch, and of no other. Images must be readable: gives {}."""
        ids = step * self.batch_size + self.rows[part]
        images, labels, mask = (batch[name][part] for name in ("image", "label", "mask"))
        mask[:] = ids < len(self._source)
        there = int(mask.sum())  # rows rise, so padding comes last
        images[there:], labels[there:] = 0, 0
        records = reader(self._source)(ids[:there])
        for row in range(there):
            example = records[row]
            decode.eval_crop(example.image, self._data, name=example.name, out=images[row])
            _set_label(labels, row, example, self._source)
        return {}


def reader(source: Source) -> Callable[[np.ndarray], Sequence[Record]]:
    """A function from ids to their records: in one block where the source can read so, else each
    is read when it is looked at, so that an unreadable one harms no other.
    """
    return getattr(source, "read", None) or functools.partial(_OneByOne, source)


class _OneByOne(Sequence):
    def __init__(self, source: Source, ids: np.ndarray):
        self._source, self._ids = source, ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, row: int) -> Record:
        return self._source[int(self._ids[row])]


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


def _empty(source: Source, rows: int, size: int) -> dict[str, np.ndarray]:
    labels = ((rows, len(source.classes)), np.float32) if source.multi_label else (rows, np.int32)
    return {"image": np.empty((rows, size, size, 3), np.uint8), "label": np.empty(*labels)}


def _set_label(labels: np.ndarray, row: int, example: Record, source: Source) -> None:
    ones, classes = example.label if source.multi_label else (example.label,), len(source.classes)
    for label in ones:
        if not 0 <= label < classes:
            raise DataError(
                f"the label {label} of {example.name} is out of range: there are {classes} classes"
            )
    if source.multi_label:
        labels[row] = 0
        labels[row, list(ones)] = 1
    else:
        labels[row] = example.label
