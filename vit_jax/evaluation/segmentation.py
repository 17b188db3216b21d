"""How well the classes of pixels are predicted: intersection over union, by exact counts of all pixels of all
images at their own size.
"""

import concurrent.futures
import dataclasses
import json
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data import decode, loader, sources
from vit_jax.data.batches import check_bad_images, pass_over
from vit_jax.data.masks import IGNORED, mask_table
from vit_jax.data.record import BadImage, Source
from vit_jax.devices import meshes, processes
from vit_jax.evaluation import contract, maps
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Evaluator, Watch
from vit_jax.models import classifier, layout

METRICS = ("mean_iou", "pixel_accuracy", "mean_accuracy", "images")


@dataclasses.dataclass(frozen=True)
class MaskOptions(contract.EvaluatorOptions):
    """What `segmentation` takes."""

    windows: str = option(
        "whole",
        "what the model sees: the whole image squeezed to its size, or windows that cover it",
        choices=maps.WINDOWS,
    )


class Segmentation(Evaluator):
    """`mean_iou` and `mean_accuracy` over the classes, `pixel_accuracy`, the number of `images`, and of every
    class that occurs `iou/CLASS`.

    A class that is neither in a mask nor predicted has no IoU, and pixels that are ignored count nowhere.
    """

    Options = MaskOptions

    def __init__(self, options: MaskOptions, subject: EvalContext):
        super().__init__(options, subject)
        if subject.networks is None or not subject.networks.objective.own_answers:
            raise ConfigError(
                "config.eval.evaluators: 'segmentation' judges models that were trained with "
                f"config.objective.name='segmentation', and this is {subject.config.objective.name!r}"
            )
        self.config = dataclasses.replace(subject.config, data=self.data())
        self.source = sources.open_eval(self.config.data)
        _check(self.source, subject.classes)
        self._scores = None

    def metrics(self) -> tuple[str, ...]:
        """See `Evaluator`."""
        return *METRICS, *(f"iou/{name}" for name in self.subject.classes)

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        """See `Evaluator`."""
        sharding = meshes.batch_sharding(mesh)
        batch = self.config.eval.batch_size or self.config.batch_size
        rows = loader.local_rows(sharding, batch, "the evaluation batch size")
        counted = _counted(sharding, batch, rows)
        if self._scores is None:
            scores = maps.make_scores(self.subject.networks, self.config.data)
            self._scores = jax.jit(scores, out_shardings=sharding)
        classes = len(self.subject.classes)
        confusion, bad, images = np.zeros((classes, classes), np.int64), {}, 0
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for number in watch(range(-(-len(self.source) // batch))):
                ids = number * batch + rows
                read = list(pool.map(self._read, ids[ids < len(self.source)].tolist()))
                seen = self._predict(trained, read, sharding, batch, rows)
                for (windows, labels), scores, count in zip(read, seen, counted, strict=False):
                    if isinstance(labels, BadImage):
                        pass_over(labels, self.config.data)
                        bad[labels.name] = labels.why
                        check_bad_images(bad, self.config.data.max_bad_images, "evaluation")
                    elif count:
                        confusion += confusion_of(windows.labels(scores), labels, classes)
                        images += 1
        return self._measures(confusion, images, sharding)

    def _read(self, index: int) -> tuple[maps.Windows | None, np.ndarray | BadImage]:
        """What the model sees of an example, and its label map; or why it cannot be read."""
        data, record = self.config.data, None
        try:
            record = self.source[index]
            limits = dict(name=record.name, max_pixels=data.max_pixels)
            pixels = decode.decode(record.image, channels=data.channels, **limits)
            labels = mask_table(self.source).decode(record.label, size=pixels.shape[:2], **limits)
        except BadImage as error:
            return None, error
        return maps.cut(
            pixels, data, self.options.windows, grain(self.subject.model_config)
        ), labels

    def _predict(
        self,
        trained: EvaluatedModel,
        read: list,
        sharding: NamedSharding,
        batch: int,
        rows: np.ndarray,
    ) -> list[list[np.ndarray]]:
        """The scores of the windows of images; all processes take part, however many windows each has."""
        shape = loader.crops.shape(self.config.data)
        counts = [0 if windows is None else len(windows.pixels) for windows, _ in read]
        total = sum(counts)
        if not sharding.is_fully_addressable:
            total = max(map(int, processes.gather("segmentation/windows", str(total))))
        steps = -(-total // len(rows))
        pixels = np.zeros((steps * len(rows), *shape), np.uint8)
        if any(counts):
            seen = np.concatenate([windows.pixels for windows, _ in read if windows is not None])
            pixels[: len(seen)] = seen
        found = []
        for step in range(steps):
            part = pixels[step * len(rows) : (step + 1) * len(rows)]
            images = loader.global_array(part, rows, batch, sharding)
            found += _local(self._scores(trained.weights, trained.own, images), rows)
        ends = np.cumsum([0, *counts]).tolist()
        return [found[first:stop] for first, stop in zip(ends[:-1], ends[1:], strict=True)]

    def _measures(
        self, confusion: np.ndarray, images: int, sharding: NamedSharding
    ) -> dict[str, float]:
        if not sharding.is_fully_addressable:
            text = json.dumps([confusion.tolist(), images])
            found = map(json.loads, processes.gather("segmentation/counts", text))
            counts, numbers = zip(*found, strict=True)
            confusion, images = np.sum(np.asarray(counts, np.int64), axis=0), sum(numbers)
        return measures(confusion, self.subject.classes) | {"images": images}


def confusion_of(predicted: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """How many pixels of each class (rows) are predicted as which (columns), (K, K) int64.

    Args:
      predicted, labels: (H, W) of classes; labels may be `IGNORED`.
    """
    counts = labels != IGNORED
    pairs = labels[counts].astype(np.int64) * classes + predicted[counts]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def measures(confusion: np.ndarray, classes: tuple[str, ...]) -> dict[str, float]:
    """The metrics of counts that `confusion_of` gave, summed over all images."""
    right, labelled, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    union = labelled + predicted - right
    occurs, is_labelled = union > 0, labelled > 0
    iou = right[occurs] / union[occurs]
    named = [name for name, one in zip(classes, occurs, strict=True) if one]
    return {
        "mean_iou": float(iou.mean()) if occurs.any() else 0.0,
        "pixel_accuracy": float(right.sum() / max(labelled.sum(), 1)),
        "mean_accuracy": float((right[is_labelled] / labelled[is_labelled]).mean())
        if is_labelled.any()
        else 0.0,
        **{f"iou/{name}": float(one) for name, one in zip(named, iou, strict=True)},
    }


def windows_of(evaluators: Sequence) -> str:
    """What the model sees of an image by `config.eval.evaluators`."""
    options = (entry[1] for entry in evaluators if not isinstance(entry, str))
    return next((one["windows"] for one in options if "windows" in one), MaskOptions().windows)


def grain(model_config: classifier.ClassifierConfig) -> int:
    """Where windows may begin: at multiples of a patch's side."""
    return model_config.height_width[0] // layout.grid(model_config)[0]


def _check(source: Source, classes: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless a source has masks of the classes that the model knows."""
    table = mask_table(source)
    if table is None:
        raise ConfigError(
            "config.eval.evaluators: 'segmentation' needs masks, and the data has none: set config.data.name=masks"
        )
    if table.classes != tuple(classes):
        raise ConfigError(
            f"the data has the {len(table.classes)} classes {', '.join(table.classes[:5])} …, and the model knows "
            f"{len(classes)}, {', '.join(classes[:5])} …: list the same names in the same order in classes.csv"
        )


def _counted(sharding: NamedSharding, batch: int, rows: np.ndarray) -> list[bool]:
    """Of each of this process's rows whether it counts here: several processes may hold a row."""
    owner = np.full(batch, processes.count())
    for device, (held, *_) in sharding.devices_indices_map((batch,)).items():
        owner[held] = np.minimum(owner[held], device.process_index)
    return (owner[rows] == jax.process_index()).tolist()


def _local(array: jax.Array, rows: np.ndarray) -> list[np.ndarray]:
    """The rows of a batch that this process has, in order."""
    found = {}
    for shard in array.addressable_shards:
        held = range(*shard.index[0].indices(len(array)))
        if held.start not in found:
            found |= dict(zip(held, np.asarray(shard.data), strict=True))
    return [found[row] for row in rows.tolist()]
