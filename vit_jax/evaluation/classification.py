"""How good a classifier is in detail, and how far its probabilities can be believed."""

import csv
import dataclasses
import json

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax import objectives
from vit_jax.base import outputs, places
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.evaluation import measures, mistakes
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Watch
from vit_jax.evaluation.logits import (
    LabelOptions,
    Logits,
    LogitsEvaluator,
    counts_unlabelled,
    log_unlabelled,
)
from vit_jax.pictures import style, tiles
from vit_jax.pictures.page import png
from vit_jax.pictures.plot import Plot

_RANKED = ("accuracy", "accuracy_low", "accuracy_high", "top5_accuracy")
_SINGLE = (
    "precision", "recall", "f1", "nll", "brier", "ece", "nll_scaled", "brier_scaled", "ece_scaled", "temperature",
)  # fmt: skip
# What is in the folder of the option `out`, beside its pictures.
METRICS, CLASSES, CONFUSION, MISTAKES = (
    "metrics.json",
    "classes.csv",
    "confusion.csv",
    "mistakes.csv",
)
_LOGITS = 2**30  # kept at most, on each host
_NAMED_CLASSES = 24  # in the picture of confusion


_OUT = "config.eval.evaluators: classification: out"


@dataclasses.dataclass(frozen=True)
class ClassificationOptions(LabelOptions):
    """What `classification` takes."""

    present: bool = option(
        False, "only the classes that the data has can be predicted (ImageNet-R and -A)"
    )
    out: str = option(
        "", "a folder for tables and pictures: classes.csv, confusion.csv, calibration.csv, …"
    )
    images: bool = option(
        False,
        "with out: also images.csv, what is predicted for each image, and the surest mistakes as pictures",
    )


class Classification(LogitsEvaluator):
    """Measures of single-label examples, each once:

    `accuracy` with the bounds of its 95 % interval, `accuracy_low` and `accuracy_high`; `top5_accuracy`;
    `precision`, `recall` and `f1`, means over the classes that have examples; `nll`, `brier` and `ece`
    (15 bins) of the probabilities; the `temperature` that suits these examples best, and `nll_scaled` and
    `ece_scaled`, with the temperature fitted on the other half of the examples.

    Of examples with several labels: `accuracy` as the evaluator of that name has it, its interval,
    `top5_accuracy`, and `mean_average_precision` over the classes that have examples.
    """

    Options = ClassificationOptions
    high_is_good = (*_RANKED, "precision", "recall", "f1", "mean_average_precision")
    low_is_good = ("nll", "brier", "ece", "nll_scaled", "brier_scaled", "ece_scaled")

    def __init__(self, options: ClassificationOptions, context: EvalContext):
        super().__init__(options, context)
        self._counts_unlabelled = counts_unlabelled(options, context.config)
        self._logged_unlabelled = False
        if options.images and not options.out:
            raise ConfigError("config.eval.evaluators: classification: images needs out=FOLDER")
        if options.out:
            places.locate(options.out, _OUT)
        size = len(self.source) * context.model_config.num_classes
        if size > _LOGITS:
            raise ConfigError(
                f"classification keeps all logits, {len(self.source):,} x "
                f"{context.model_config.num_classes:,}, and takes at most {_LOGITS:,}: evaluate a slice of the "
                "split, or 'accuracy' alone"
            )

    def metrics(self) -> tuple[str, ...]:
        multi_label = self.source.multi_label
        return (*_RANKED, *(("mean_average_precision",) if multi_label else _SINGLE), "examples")

    def main_metric(self) -> str:
        return "accuracy"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        examples = self.collect(trained.weights, mesh, watch)
        logits, targets, indices = self._counted(examples)
        if self.options.present:
            logits = np.where(targets.any(0), logits, -np.inf)
        kind = objectives.probabilities(self.context.config.objective)
        labelled = targets.any(-1)
        metrics = _ranked(logits[labelled], targets[labelled])
        if self.source.multi_label:
            precisions = measures.average_precision(logits, targets)
            metrics["mean_average_precision"] = float(np.nanmean(precisions))
        else:
            metrics |= _single(logits, targets) | _calibration(logits, targets, kind)
        metrics["examples"] = len(logits)
        if self.options.out and jax.process_index() == 0:
            self._write(logits, targets, indices, measures.probabilities(logits, kind))
            text = json.dumps(metrics, indent=1) + "\n"
            places.write_whole(places.locate(self.options.out, _OUT) / METRICS, text)
        return metrics

    def _counted(self, examples: Logits) -> Logits:
        """The examples that count, see `unlabelled`. Raises `ConfigError` if none has a label."""
        labelled = examples.targets.any(-1)
        if not labelled.any():
            raise ConfigError("classification: no example has a label")
        if not self._logged_unlabelled:
            self._logged_unlabelled = True
            log_unlabelled(int(np.sum(~labelled)), len(labelled), self._counts_unlabelled)
        if self._counts_unlabelled:
            return examples
        return Logits(*(array[labelled] for array in examples))

    def _write(
        self,
        logits: np.ndarray,
        targets: np.ndarray,
        indices: np.ndarray,
        probabilities: np.ndarray,
    ) -> None:
        """The tables and pictures of `options.out`."""
        folder, classes = outputs.make_folder(self.options.out, _OUT), self.context.classes
        best = logits.argmax(-1)
        if not self.source.multi_label:
            pairs = measures.confusion(targets.argmax(-1), best, len(classes))
            columns = measures.by_class(pairs)
            rows = zip(classes, *columns.values(), strict=True)
            _table(folder / CLASSES, ("class", *columns), rows)
            rows = ((classes[t], classes[p], pairs[t, p]) for t, p in np.argwhere(pairs))
            _table(folder / CONFUSION, ("class", "predicted", "examples"), rows)
            bins = measures.bins_of(probabilities, targets)
            edges = np.arange(1, measures.BINS + 1) / measures.BINS
            rows = zip(edges, *bins, strict=True)
            header = ("confidence_at_most", "examples", "confidence", "accuracy")
            _table(folder / "calibration.csv", header, rows)
            _draw(folder, pairs, bins, classes)
        if self.options.images:
            names = [self.source[int(place)].name for place in indices]
            labels = [" ".join(classes[c] for c in np.flatnonzero(row)) for row in targets]
            sure = np.take_along_axis(probabilities, best[:, None], 1)[:, 0]
            rows = list(zip(names, labels, (classes[c] for c in best), sure, strict=True))
            header = ("image", "class", "predicted", "probability")
            _table(folder / "images.csv", header, rows)
            wrong = mistakes.surest_mistakes(targets, probabilities)
            small = mistakes.write_pictures(folder, self.source, indices[wrong], self.config.data)
            shown = ((*rows[row], picture) for row, picture in zip(wrong, small, strict=True))
            _table(folder / MISTAKES, (*header, "picture"), shown)


def _ranked(logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Accuracy with its interval, and top-5 accuracy."""
    top = np.argsort(-logits, axis=-1, kind="stable")[:, :5]
    right = np.take_along_axis(targets, top, 1)
    low, high = measures.interval(right[:, 0].sum(), len(logits))
    return {
        "accuracy": float(right[:, 0].mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "top5_accuracy": float(right.any(-1).mean()),
    }


def _single(logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Means over the classes that have examples."""
    pairs = measures.confusion(targets.argmax(-1), logits.argmax(-1), logits.shape[-1])
    columns = measures.by_class(pairs)
    has_examples = columns.pop("examples") > 0
    return {name: float(values[has_examples].mean()) for name, values in columns.items()}


def _calibration(logits: np.ndarray, targets: np.ndarray, kind: str) -> dict[str, float]:
    """How far probabilities can be believed, as they are and with a temperature."""
    possible = np.isfinite(logits[0])  # of the classes that can be predicted
    logits, targets = logits[:, possible], targets[:, possible]
    scaled = logits.astype(np.float64)
    for half in (slice(0, None, 2), slice(1, None, 2)) if len(logits) > 1 else ():
        others = slice(1 - half.start, None, 2)
        scaled[half] /= measures.fit_temperature(logits[others], targets[others], kind)
    metrics = {}
    for ending, values in (("", logits), ("_scaled", scaled)):
        likely = measures.probabilities(values, kind)
        metrics |= {
            f"nll{ending}": measures.negative_log_likelihood(values, targets, kind),
            f"brier{ending}": measures.brier_score(likely, targets),
            f"ece{ending}": measures.calibration_error(measures.bins_of(likely, targets)),
        }
    return metrics | {"temperature": measures.fit_temperature(logits, targets, kind)}


def _draw(
    folder: epath.Path, pairs: np.ndarray, bins: measures.Bins, classes: tuple[str, ...]
) -> None:
    """calibration.png and confusion.png, which names the classes if they are few enough, or else those that are
    confused most; confusion.csv has all.
    """
    plot = Plot(
        "Accuracy by the probability of the best class", x="probability [%]", y="accuracy [%]"
    )
    plot.line([0, 100], [0, 100], style.GREY, "as sure as right", width=1)
    filled = bins.count > 0
    confidence, accuracy = 100 * bins.confidence[filled], 100 * bins.accuracy[filled]
    plot.line(confidence, accuracy, style.COLOURS[0])
    plot.dots(confidence, accuracy, style.COLOURS[0], "examples of a bin")
    shown = _most_confused(pairs)
    some = pairs[np.ix_(shown, shown)]
    shares = some / np.maximum(pairs.sum(1)[shown, None], 1)
    of = "" if len(shown) == len(classes) else f": the {len(shown)} most confused of {len(classes)}"
    confusion = tiles.matrix(
        f"Which classes are taken for which, with the number of images{of}",
        100 * shares,
        tiles.Bar(0, 100, "share of the images of a class [%]"),
        x="predicted class",
        y="class",
        side=max(320, 26 * len(shown)),
        names=[classes[number] for number in shown],
        counts=some,
    )
    for name, image in (("calibration", plot.image()), ("confusion", confusion)):
        (folder / f"{name}.png").write_bytes(png(image))


def _most_confused(pairs: np.ndarray) -> np.ndarray:
    """The numbers, rising, of at most `_NAMED_CLASSES` classes with the most images that are taken for others."""
    wrong = pairs - np.diag(np.diag(pairs))
    return np.sort(np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:_NAMED_CLASSES])


def _table(path: epath.Path, header: tuple[str, ...], rows) -> None:
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(map(outputs.as_cell, row) for row in rows)
