"""What is in a batch, as NumPy arrays on the host: a pure function of (seed, step), in whatever
process and however often it is called.

Which example stands where is decided in `order.py`; who builds which rows, and how they reach the
devices, in `loader.py`.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from vit_jax.data import crops, views
from vit_jax.data.decoding import decode
from vit_jax.data.labels.masks import ClassTable, LabelMap, mask_table
from vit_jax.data.options import Data
from vit_jax.data.order import BatchSpec, crop_draws, example_ids, repeated_places
from vit_jax.data.record import BadImage, DataError, Record, Source, check_bad_images, soft_labels
from vit_jax.models.contract import GRID

if TYPE_CHECKING:
    from vit_jax.data.texts import TextRows

# (index of an example, its place in the part that is filled, or None if it is not in there) -> the
# record. Raises as the source does.
Read = Callable[[int, int | None], Record]


def spec(
    config: BatchSpec,
    *,
    num_classes: int,
    multi_label: bool = False,
    masks: ClassTable | bool = False,
) -> dict[str, jax.ShapeDtypeStruct]:
    """The largest of `specs`."""
    candidates = specs(config, num_classes, multi_label, masks)
    return max(candidates, key=lambda spec: sum(x.size for x in spec.values()))


def specs(
    config: BatchSpec, num_classes: int, multi_label: bool = False, masks: ClassTable | bool = False
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """A training batch of all processes together, as arrays without memory: what the loader fills,
    what a step is compiled for; several where images have several sizes (`views.variants`), each once.

    Args:
      config: the run's.
      num_classes: of the data; 0 where it has no labels.
      multi_label: whether an example may have several labels.
      masks: whether labels are masks, or what their values mean.

    Returns:
      `image` (B, H, W, C) uint8, or where `config.data.views` says so `image_0` and so on, see
      `several_views.Views`; and, where there are labels, `label`: (B,) int32, or (B, classes) float32 of zeros
      and ones if there may be several, of probabilities if a teacher gives them; of masks (B, H, W)
      uint8, the class of every pixel or `masks.IGNORED`, uint16 of panoptic masks, with one view of an image alone.
      Images at sizes of their own have patches in `image`, and `grid`, see `contract.PatchBatch`. Where captions are
      learned from, `tokens` (B, L) int32.
    """
    batches = []
    for variant in views.variants(config):
        rows = variant.batch_size
        shapes = {name: ((rows, *shape), np.uint8) for name, shape in variant.shapes}
        if variant.data.native_tokens:
            shapes[GRID] = (rows, 2), np.int32
        if masks and not config.data.views:
            dtype = ClassTable.dtype if isinstance(masks, bool) else masks.dtype
            shapes["label"] = (rows, *crops.shape(variant.data)[:2]), dtype
        elif num_classes and not masks:
            soft = multi_label or (config.pseudo.teacher and config.pseudo.soft)
            shapes["label"] = ((rows, num_classes), np.float32) if soft else ((rows,), np.int32)
        if texts := _text_rows(config):
            shapes["tokens"] = (rows, texts.length), np.int32
        batch = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
        if batch not in batches:
            batches.append(batch)
    return batches


class TrainBatches:
    """The rows `rows` of the training batches, by step.

    Attributes:
      kind: what the examples are for, in messages.
      source: the examples.

    A batch is a dict of `image` (n, H, W, C) uint8, or an array for each of `views.of(config)`, and,
    where the source has labels, `label` ((n,) int32, or (n, classes) float32: of zeros and ones for a
    multi-label source, of probabilities for one of soft labels, (n, H, W) uint8 for one of masks). Where
    `config.data.on_bad_image` is 'skip', the place of an unreadable example is taken by the next
    readable one in the order of its epoch, cut as the first would have been.
    """

    kind = "training"

    def __init__(self, source: Source, config: BatchSpec, rows: Sequence[int] | np.ndarray):
        self.source = source
        self._seed = config.seed
        self._data = config.data
        self._variants = views.variants(config)
        self._variant = views.make_choice(config, len(source))
        self._texts = _text_rows(config)
        self.rows = np.asarray(rows, np.int64)
        self.batch_size = config.batch_size
        self._order = order_of(source, config.seed, config.data.sampling)
        self._places = repeated_places(config.batch_size, config.data.repeats)[self.rows]
        # Threads fill parts of the same two steps: the first makes the plan while the others wait.
        self._plan = functools.lru_cache(2)(self._plan)
        self._planning = threading.Lock()
        self._ids = functools.lru_cache(2)(self._ids)  # of a later step, for all its parts

    def empty(self, step: int = 0) -> dict[str, np.ndarray]:
        """A batch to fill, of a step."""
        variant = self._variants[self._variant(step)]
        rows = len(self.layout(step)[0])
        batch = _empty(self.source, rows, variant.data, variant.shapes)
        return batch | self._texts.empty(rows) if self._texts else batch

    def layout(self, step: int) -> tuple[np.ndarray, int]:
        """The rows that this process fills of a step's batch, and how many that has."""
        return self.rows, self.batch_size

    def examples(self, step: int, part: slice) -> list[int]:
        """The examples in the rows `part` of a batch."""
        return self._ids(step)[part]

    def fill(
        self, batch: dict[str, np.ndarray], step: int, part: slice, read: Read | None = None
    ) -> dict[str, str]:
        """Fills the rows `part` of a batch, and of no other; threads may fill others meanwhile.

        Args:
          read: gives the records; by default the source does.

        Returns:
          name → reason of the unreadable images that were replaced.
        """
        with self._planning:
            examples, ids, draws = self._plan(step)
        variant = self._variants[self._variant(step)]
        read = read or _reader_of(self.source)
        bad = {}
        for place, row in enumerate(range(*part.indices(len(ids)))):
            cut = functools.partial(
                self.cut,
                variant=variant,
                draws=[of_view[row] for of_view in draws],
                outs={name: array[row] for name, array in batch.items()},
            )
            example = self._cut_readable(read, examples[row], ids[row], place, cut, bad)
            _set_label(batch, row, example, self.source)
        return bad

    def cut(
        self, example: Record, *, variant: views.Variant, draws: list, outs: dict[str, np.ndarray]
    ) -> None:
        """Cuts an image and its mask, or all of its views from pixels that are decoded once; makes tokens of a
        caption.
        """
        image = example.image
        name = example.name
        if self._texts:
            self._texts.fill(outs["tokens"], example, draws[-1][0])
        if variant.data.native_tokens:
            from vit_jax.data import native_sizes

            native_sizes.fill_row(outs, image, variant.data, name=name, draws=draws[0])
            return
        if not variant.views:
            labels = _label_map(self.source, example, outs)
            out = outs["image"].reshape(crops.shape(variant.data))  # the same memory
            decode.train_crop(image, variant.data, draws[0], name=name, out=out, label_map=labels)
            return
        pixels = decode.decode(
            image,
            name=name,
            channels=self._data.channels,
            max_pixels=self._data.max_pixels,
            max_value=self._data.max_value,
        )
        for view in variant.views:
            for number, out in zip(view.numbers, outs[view.name], strict=True):
                decode.train_crop(pixels, view.data, draws[number], name=name, out=out)

    def _plan(self, step: int) -> tuple[list, list, list]:
        """For the rows of a step: where their examples stand in the order, which these are, and the
        random numbers of their crops, of each view, and of captions after these.
        """
        positions = self._start(step) + self.layout(step)[0]
        count = max((view.numbers.stop for view in self._variants[0].views), default=1)
        count += self._texts is not None
        draws = [crop_draws(self._seed, positions, view).tolist() for view in range(count)]
        return self._examples(step).tolist(), self._ids(step), draws

    def _examples(self, step: int) -> np.ndarray:
        """Where the examples of the rows of a step stand in the order."""
        return (self._start(step) + self._places_of(step)) // self._data.repeats

    def _start(self, step: int) -> int:
        """The place of a step's first example in the line of all steps."""
        return step * self.batch_size

    def _places_of(self, step: int) -> np.ndarray:
        """Where the rows of a step are in the line, from there on."""
        return self._places

    def _ids(self, step: int) -> list[int]:
        return self._order(self._examples(step)).tolist()

    def _cut_readable(
        self, read: Read, position: int, index: int, place: int | None, cut: Callable, bad: dict
    ) -> Record:
        """Cuts example `index`, which stands at `position`, or else the next readable one, and
        returns the one it cut. Adds the unreadable ones to `bad`.
        """
        size = len(self.source)
        epoch, offset = divmod(position, size)
        for ahead in range(1, size + 1):
            try:
                example = read(index, place)
                cut(example)
                return example
            except BadImage as error:
                pass_over(error, self._data)
                bad[error.name] = error.why
                check_bad_images(bad, self._data.max_bad_images, self.kind)
            following = np.asarray([epoch * size + (offset + ahead) % size])
            (index,) = self._order(following).tolist()
            place = None  # nobody foresaw this example, so it is not read ahead
        raise DataError(
            f"none of the {size} training images can be read; the first: {next(iter(bad.items()))}"
        )


class EvalBatches:
    """The rows `rows` of the evaluation batches, by step: every example once, in order.

    A batch is as in `TrainBatches`, with `mask` (n,) float32: 1 for an example, 0 for padding after
    the last one, and for an unreadable example where `config.data.on_bad_image` is 'skip'; both are
    black and have the label 0, or none.
    """

    kind = "evaluation"

    def __init__(
        self,
        source: Source,
        config: BatchSpec,
        rows: Sequence[int] | np.ndarray,
        *,
        batch_size: int,
    ):
        self.source = source
        self._data = config.data
        self.rows = np.asarray(rows, np.int64)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.source) // self.batch_size)

    def empty(self, step: int = 0) -> dict[str, np.ndarray]:
        """A batch to fill; those of all steps are alike."""
        mask = np.empty(len(self.rows), np.float32)
        images = [("image", crops.batch_shape(self._data))]
        return _empty(self.source, len(self.rows), self._data, images) | {"mask": mask}

    def layout(self, step: int) -> tuple[np.ndarray, int]:
        """As of `TrainBatches`."""
        return self.rows, self.batch_size

    def examples(self, step: int, part: slice) -> list[int]:
        """The examples in the rows `part` of a batch, without padding."""
        ids = step * self.batch_size + self.rows[part]
        return ids[ids < len(self.source)].tolist()

    def fill(
        self, batch: dict[str, np.ndarray], step: int, part: slice, read: Read | None = None
    ) -> dict[str, str]:
        """Fills the rows `part` of a batch, and of no other; `read` as in `TrainBatches`.

        Returns:
          name → reason of the unreadable images that were skipped.
        """
        read = read or _reader_of(self.source)
        ids = step * self.batch_size + self.rows[part]
        batch = {name: array[part] for name, array in batch.items()}
        bad = {}
        batch["mask"][:] = ids < len(self.source)
        count = int(batch["mask"].sum())  # rows rise, so padding comes last
        _clear(batch, slice(count, None))
        for row, index in enumerate(ids[:count].tolist()):
            try:
                example = read(index, row)
                self._cut(example, {name: array[row] for name, array in batch.items()})
            except BadImage as error:
                pass_over(error, self._data)
                bad[error.name] = error.why
                _clear(batch, row)
            else:
                _set_label(batch, row, example, self.source)
        return bad

    def _cut(self, example: Record, outs: dict[str, np.ndarray]) -> None:
        """Cuts an image and its mask."""
        image = example.image
        name = example.name
        if self._data.native_tokens:
            from vit_jax.data import native_sizes

            native_sizes.fill_row(outs, image, self._data, name=name)
            return
        labels = _label_map(self.source, example, outs)
        decode.eval_crop(image, self._data, name=name, out=outs["image"], label_map=labels)


def order_of(source: Source, seed: int, sampling: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function that gives the examples at positions of the line, both (n,) int64.

    Args:
      source: the examples; for 'balanced' its labels must be known, one for each example.
      seed: of the order.
      sampling: as in `config.data.sampling`.
    """
    if sampling == "balanced":
        from vit_jax.data.balanced import Balanced

        return Balanced(seed, source.labels)
    return functools.partial(example_ids, seed, num_examples=len(source))


def _text_rows(config: BatchSpec) -> "TextRows | None":
    """What makes tokens of captions, where an objective learns from these."""
    options = getattr(config, "objective", None)
    if not getattr(options, "tokenizer", ""):
        return None
    from vit_jax.data.texts import TextRows

    return TextRows(options)


def _reader_of(source: Source) -> Read:
    return lambda index, place: source[index]


def pass_over(error: BadImage, config_data: Data) -> None:
    """Raises `BadImage`, with what to do about it, unless such images are to be skipped."""
    if config_data.on_bad_image == "error":
        advice = (
            "repair or remove it, or pass over such images with config.data.on_bad_image='skip'"
        )
        raise BadImage(error.name, f"{error.why}; {advice}") from error


def _clear(batch: dict[str, np.ndarray], rows: slice | int) -> None:
    """Makes the images in these rows black, or of one black patch, and their labels 0 or none."""
    for name, array in batch.items():
        array[rows] = name == GRID


def _empty(source: Source, rows: int, data: Data, images: list) -> dict[str, np.ndarray]:
    """A batch of `rows` with `images`, (name, shape of an example) each."""
    batch = {name: np.empty((rows, *shape), np.uint8) for name, shape in images}
    if data.native_tokens:
        batch[GRID] = np.empty((rows, 2), np.int32)
    if mask_table(source):
        if "image" in batch:
            batch["label"] = np.empty(batch["image"].shape[:3], mask_table(source).dtype)
    elif source.multi_label or soft_labels(source):
        batch["label"] = np.empty((rows, len(source.classes)), np.float32)
    elif source.classes:
        batch["label"] = np.empty(rows, np.int32)
    return batch


def _label_map(source: Source, example: Record, outs: dict[str, np.ndarray]) -> LabelMap | None:
    """The mask of an example, to be cropped into `outs`; `None` where labels are no masks."""
    table = mask_table(source)
    return LabelMap(example.label, table, outs["label"]) if table else None


def _set_label(batch: dict[str, np.ndarray], row: int, example: Record, source: Source) -> None:
    classes = len(source.classes)
    if not classes or mask_table(source):  # a mask is cut with its image
        return
    if soft_labels(source):
        batch["label"][row] = example.label
        return
    ones = example.label if source.multi_label else (example.label,)
    for label in ones:
        if not 0 <= label < classes:
            raise DataError(
                f"the label {label} of {example.name} is out of range: there are {classes} classes"
            )
    if source.multi_label:
        batch["label"][row] = 0
        batch["label"][row, list(ones)] = 1
    else:
        batch["label"][row] = example.label
