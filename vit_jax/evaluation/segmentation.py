"""How well the classes of pixels are predicted: intersection over union, by exact counts of all pixels of all
images at their own size.
"""

import concurrent.futures
import dataclasses
import json
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from vit_jax.base.errors import ConfigError
from vit_jax.data import loader, sources
from vit_jax.data.batches import check_bad_images, pass_over
from vit_jax.data.decoding import decode
from vit_jax.data.labels.masks import IGNORED, mask_table
from vit_jax.data.labels.segments import PanopticTable, classes_of
from vit_jax.data.record import BadImage, Source
from vit_jax.devices import meshes, processes
from vit_jax.evaluation import maps, panoptic
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Evaluator, Watch

METRICS = ("mean_iou", "pixel_accuracy", "mean_accuracy", "images")


class Segmentation(Evaluator):
    """`mean_iou` and `mean_accuracy` over the classes, `pixel_accuracy`, the number of `images`, and of every
    class that occurs `iou/CLASS`. Of a model that finds single things also what `panoptic.measures` says.

    A class that is neither in a mask nor predicted has no IoU, and pixels that are ignored count nowhere.
    """

    Options = maps.MaskOptions

    def __init__(self, options: maps.MaskOptions, context: EvalContext):
        super().__init__(options, context)
        if context.networks is None or not context.networks.objective.predicts_with_modules:
            raise ConfigError(
                "config.eval.evaluators: 'segmentation' judges models that were trained with "
                f"config.objective.name='segmentation', and this is {context.config.objective.name!r}"
            )
        self.config = dataclasses.replace(context.config, data=self.data())
        self.source = sources.open_eval(self.config.data)
        _check(self.source, context.classes)
        self.classes, self._compiled = context.classes, None
        objective = context.networks.objective
        self.things = objective.table.things if objective.panoptic else ()
        maps.check_windows(options.windows, self.things)
        if self.things and mask_table(self.source).dtype != PanopticTable.dtype:
            raise ConfigError(
                "config.eval.evaluators: 'segmentation' judges single things by panoptic masks, and the data to "
                "evaluate on has masks of classes alone"
            )

    high_is_good = (
        "mean_iou", "pixel_accuracy", "mean_accuracy", "iou/*", "pq", "pq_*", "pq/*", "sq", "sq_*", "rq", "rq_*",
    )  # fmt: skip

    def metrics(self) -> tuple[str, ...]:
        classes = self.classes
        names = [*METRICS, *(f"iou/{name}" for name in classes)]
        if self.things:
            none = np.zeros((len(classes), 4), np.int64)
            names += [*panoptic.measures(none, classes, self.things)]
            names += [f"pq/{name}" for name in classes]
        return tuple(names)

    def main_metric(self) -> str:
        return "mean_iou"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        sharding = meshes.batch_sharding(mesh)
        batch = self.config.eval.batch_size or self.config.batch_size
        rows = loader.local_rows(sharding, batch, "the evaluation batch size")
        counted = _counted(sharding, batch, rows)
        answers_of = self.answers_of(trained, mesh)
        classes = len(self.classes)
        confusion, segments = (np.zeros((classes, n), np.int64) for n in (classes, 4))
        bad, images = {}, 0
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for number in watch(range(-(-len(self.source) // batch))):
                ids = number * batch + rows
                read = list(pool.map(self._read, ids[ids < len(self.source)].tolist()))
                seen = self._predict(answers_of, trained, read, sharding, batch, rows)
                for (windows, labels), answers, count in zip(read, seen, counted, strict=False):
                    if isinstance(labels, BadImage):
                        pass_over(labels, self.config.data)
                        bad[labels.name] = labels.why
                        check_bad_images(bad, self.config.data.max_bad_images, "evaluation")
                    elif count:
                        predicted = windows.labels([scores for scores, *_ in answers])
                        confusion += confusion_of(predicted, classes_of(labels), classes)
                        if self.things:
                            predicted = panoptic.segments_of(
                                answers[0], labels.shape, self.things, self.options
                            )
                            segments += panoptic.counts_of(predicted, labels, classes)
                        images += 1
        return self._measures(confusion, segments, images, sharding)

    def _read(self, index: int) -> tuple[maps.Windows | None, np.ndarray | BadImage]:
        """What the model sees of an example, and its label map; or why it cannot be read."""
        data, record = self.config.data, None
        try:
            record = self.source[index]
            limits = dict(name=record.name, max_pixels=data.max_pixels)
            pixels = decode.decode(
                record.image, channels=data.channels, max_value=data.max_value, **limits
            )
            orientation = decode.orientation(record.image, channels=data.channels, **limits)
            labels = mask_table(self.source).decode(
                record.label, size=pixels.shape[:2], orientation=orientation, **limits
            )
            grain = maps.grain(self.context.model_config)
            seen = maps.cut(pixels, data, self.options.windows, grain, name=record.name)
        except BadImage as error:
            return None, error
        return seen, labels

    def answers_of(self, trained: EvaluatedModel, mesh: Mesh) -> Callable:
        """What `maps.make_answers` makes, compiled once."""
        if self._compiled is None:
            answers = maps.make_answers(self.context.networks, self.config.data)
            self._compiled = jax.jit(answers, out_shardings=meshes.batch_sharding(mesh))
        return self._compiled

    def _predict(
        self,
        answers_of: Callable,
        trained: EvaluatedModel,
        read: list,
        sharding: NamedSharding,
        batch: int,
        rows: np.ndarray,
    ) -> list[list[tuple[np.ndarray, ...]]]:
        """The answers to the windows of images; all processes take part, however many windows each has."""
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
        answers_of_windows = []
        for step in range(steps):
            part = pixels[step * len(rows) : (step + 1) * len(rows)]
            images = loader.global_array(part, rows, batch, sharding)
            answers = answers_of(trained.weights, trained.module_weights, images)
            answers_of_windows += zip(*(_local(x, rows) for x in answers), strict=True)
        ends = np.cumsum([0, *counts]).tolist()
        return [
            answers_of_windows[first:stop] for first, stop in zip(ends[:-1], ends[1:], strict=True)
        ]

    def _measures(
        self, confusion: np.ndarray, segments: np.ndarray, images: int, sharding: NamedSharding
    ) -> dict[str, float]:
        if not sharding.is_fully_addressable:
            text = json.dumps([confusion.tolist(), segments.tolist(), images])
            gathered = map(json.loads, processes.gather("segmentation/counts", text))
            *counts, numbers = zip(*gathered, strict=True)
            confusion, segments = (np.sum(np.asarray(n, np.int64), axis=0) for n in counts)
            images = sum(numbers)
        classes = self.classes
        of_things = panoptic.measures(segments, classes, self.things) if self.things else {}
        return measures(confusion, classes) | of_things | {"images": images}


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
    named = [name for name, present in zip(classes, occurs, strict=True) if present]
    return {
        "mean_iou": float(iou.mean()) if occurs.any() else 0.0,
        "pixel_accuracy": float(right.sum() / max(labelled.sum(), 1)),
        "mean_accuracy": float((right[is_labelled] / labelled[is_labelled]).mean())
        if is_labelled.any()
        else 0.0,
        **{f"iou/{name}": float(value) for name, value in zip(named, iou, strict=True)},
    }


def _check(source: Source, classes: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless a source has masks of the classes that the model knows."""
    table = mask_table(source)
    if table is None:
        raise ConfigError(
            "config.eval.evaluators: 'segmentation' needs masks, and the data has none: set config.data.name=masks, "
            "or of a TFDS data set config.data.mask_feature=auto"
        )
    if table.classes != tuple(classes):
        raise ConfigError(
            f"the data has the {len(table.classes)} classes {_named(table.classes)}, and the model knows "
            f"{len(classes)}, {_named(classes)}: list the same names in the same order in classes.csv, or as "
            "categories of panoptic masks"
        )


def _named(classes: Sequence[str], most: int = 5) -> str:
    """The first classes."""
    return ", ".join(classes[:most]) + (" …" if len(classes) > most else "")


def _counted(sharding: NamedSharding, batch: int, rows: np.ndarray) -> list[bool]:
    """Of each of this process's rows whether it counts here: several processes may hold a row."""
    owner = np.full(batch, processes.count())
    for device, (held, *_) in sharding.devices_indices_map((batch,)).items():
        owner[held] = np.minimum(owner[held], device.process_index)
    return (owner[rows] == jax.process_index()).tolist()


def _local(array: jax.Array, rows: np.ndarray) -> list[np.ndarray]:
    """The rows of a batch that this process has, in order."""
    by_row = {}
    for shard in array.addressable_shards:
        held = range(*shard.index[0].indices(len(array)))
        if held.start not in by_row:
            by_row |= dict(zip(held, np.asarray(shard.data), strict=True))
    return [by_row[row] for row in rows.tolist()]
