"""How good a classifier is in detail, and how far its probabilities can be believed."""

import csv
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax import objectives
from vit_jax.base import outputs, places
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data.labels.thresholds import write_thresholds
from vit_jax.evaluation import decisions, measures, mistakes
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
_RANKS = ("mean_average_precision", "average_precision_micro", "auc", "auc_micro")
_DECIDED = (*_SINGLE, "precision_micro", "recall_micro", "f1_micro")  # of sigmoids
# What is in the folder of the option `out`, beside its pictures.
METRICS, CLASSES, CONFUSION, MISTAKES = (
    "metrics.json",
    "classes.csv",
    "confusion.csv",
    "mistakes.csv",
)
CALIBRATION = "calibration.csv"
THRESHOLDS = "thresholds.csv"
_EDGES = np.arange(1, measures.BINS + 1) / measures.BINS
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
    thresholds: str = option(
        "",
        "of several labels, how probable a class has to be to count as predicted; f1: for each class what gives the "
        "highest F1 on these very images; '': as config.eval.thresholds says",
        choices=("", "f1"),
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

    Of examples with several labels `accuracy`, its interval and `top5_accuracy` are as the evaluator `accuracy` has
    them, of the `labelled` examples. `mean_average_precision` and `auc`, the area under the ROC curve, are means over
    the classes that have examples, and `…_micro` takes the answers for all classes together. If probabilities are
    sigmoids, each image and class is a decision, see `decisions`. `precision`, `recall` and `f1` (means over classes,
    and `…_micro`) take a class as predicted if its probability is at or above its threshold. `nll`, `brier` and `ece`
    are means over decisions: `ece` compares the probability of a class with the share of images that have the class, in
    15 bins of this probability.
    """

    Options = ClassificationOptions
    high_is_good = (*_RANKED, *_RANKS, "precision*", "recall*", "f1*")
    low_is_good = ("nll", "brier", "ece", "nll_scaled", "brier_scaled", "ece_scaled")

    def __init__(self, options: ClassificationOptions, context: EvalContext):
        super().__init__(options, context)
        self._counts_unlabelled = counts_unlabelled(options, context.config)
        self._logged_unlabelled = False
        self._kind = objectives.probabilities(context.config.objective)
        self._decides = self.source.multi_label and self._kind == "sigmoid"
        classes = context.model_config.num_classes
        self._thresholds = decisions.class_thresholds(context.config, classes)
        if options.thresholds and not self._decides:
            raise ConfigError(
                "config.eval.evaluators: classification: thresholds are for images with several labels, and for "
                "sigmoids (config.objective.loss='sigmoid')"
            )
        if options.images and not options.out:
            raise ConfigError("config.eval.evaluators: classification: images needs out=FOLDER")
        if options.out:
            places.locate(options.out, _OUT)
        size = len(self.source) * classes
        if size > _LOGITS:
            raise ConfigError(
                f"classification keeps all logits, {len(self.source):,} x "
                f"{classes:,}, and takes at most {_LOGITS:,}: evaluate a slice of the "
                "split, or 'accuracy' alone"
            )

    def metrics(self) -> tuple[str, ...]:
        if not self.source.multi_label:
            return (*_RANKED, *_SINGLE, "examples")
        return (*_RANKED, *_RANKS, *(_DECIDED if self._decides else ()), "labelled", "examples")

    def main_metric(self) -> str:
        return "accuracy"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        examples = self.collect(trained.weights, mesh, watch)
        logits, targets, indices = self._counted(examples)
        if self.options.present:
            logits = np.where(targets.any(0), logits, -np.inf)
        labelled = targets.any(-1)
        metrics = _ranked(logits[labelled], targets[labelled])
        if self.source.multi_label:
            metrics |= self._several(logits, targets) | {"labelled": int(labelled.sum())}
        else:
            metrics |= _single(logits, targets) | _calibration(logits, targets, self._kind)
        metrics["examples"] = len(logits)
        if self.options.out and jax.process_index() == 0:
            self._write(logits, targets, indices, measures.probabilities(logits, self._kind))
            text = places.json_text(metrics, indent=1) + "\n"
            places.write_whole(places.locate(self.options.out, _OUT) / METRICS, text)
        return metrics

    def _several(self, logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """The metrics of several labels beside accuracy."""
        possible = np.isfinite(logits[0])  # of the classes that can be predicted
        if not self._decides:
            return decisions.means(logits[:, possible], targets[:, possible])
        probabilities = measures.probabilities(logits, self._kind)
        if self.options.thresholds:
            self._thresholds = decisions.choose_thresholds(probabilities, targets)
        decided = probabilities >= self._thresholds
        arrays = (array[:, possible] for array in (probabilities, targets, decided))
        return decisions.means(*arrays) | _calibration(logits, targets, self._kind, by_class=True)

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
        if self._decides:
            decided = probabilities >= self._thresholds
            columns = decisions.by_class(probabilities, targets, decided)
            columns["threshold"] = self._thresholds
            _write_decisions(folder, classes, columns, probabilities, targets)
            if self.options.thresholds:
                write_thresholds(folder / THRESHOLDS, classes, self._thresholds)
        elif self.source.multi_label:
            _table_of_columns(
                folder / CLASSES, "class", classes, decisions.by_class(logits, targets)
            )
        else:
            pairs = measures.confusion(targets.argmax(-1), best, len(classes))
            _write_confusion(folder, classes, pairs, measures.bins_of(probabilities, targets))
        if self.options.images:
            names = [self.source[int(place)].name for place in indices]
            sure = np.take_along_axis(probabilities, best[:, None], 1)[:, 0]
            columns = {
                "class": _names(classes, targets),
                "predicted": [classes[c] for c in best],
                "probability": sure,
            }
            wrong = mistakes.surest_mistakes(targets, probabilities)
            if self._decides:
                columns["decided"] = _names(classes, decided)
                wrong = mistakes.surest_mistakes(targets | ~decided, probabilities)
            _table_of_columns(folder / "images.csv", "image", names, columns)
            small = mistakes.write_pictures(folder, self.source, indices[wrong], self.config.data)
            shown = {name: [column[row] for row in wrong] for name, column in columns.items()}
            shown["picture"] = small
            _table_of_columns(folder / MISTAKES, "image", [names[row] for row in wrong], shown)


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


def _calibration(
    logits: np.ndarray, targets: np.ndarray, kind: str, *, by_class: bool = False
) -> dict[str, float]:
    """How far probabilities can be believed, as they are and with a temperature; `by_class`: means over the decisions
    for each image and class, where probabilities are sigmoids.
    """
    possible = np.isfinite(logits[0])  # of the classes that can be predicted
    logits, targets = logits[:, possible], targets[:, possible]
    scaled = logits.astype(np.float64)
    for half in (slice(0, None, 2), slice(1, None, 2)) if len(logits) > 1 else ():
        others = slice(1 - half.start, None, 2)
        scaled[half] /= measures.fit_temperature(logits[others], targets[others], kind)
    metrics = {"temperature": measures.fit_temperature(logits, targets, kind)}
    if by_class:
        logits, scaled, targets = (x.reshape(-1, 1) for x in (logits, scaled, targets))
    for ending, values in (("", logits), ("_scaled", scaled)):
        likely = measures.probabilities(values, kind)
        metrics |= {
            f"nll{ending}": measures.negative_log_likelihood(values, targets, kind),
            f"brier{ending}": measures.brier_score(likely, targets),
            f"ece{ending}": measures.calibration_error(measures.bins_of(likely, targets)),
        }
    return metrics


def _write_confusion(
    folder: epath.Path, classes: tuple[str, ...], pairs: np.ndarray, bins: measures.Bins
) -> None:
    """The tables and pictures of images with one label each."""
    _table_of_columns(folder / CLASSES, "class", classes, measures.by_class(pairs))
    rows = ((classes[t], classes[p], pairs[t, p]) for t, p in np.argwhere(pairs))
    _table(folder / CONFUSION, ("class", "predicted", "examples"), rows)
    columns = dict(zip(("examples", "confidence", "accuracy"), bins, strict=True))
    _table_of_columns(folder / CALIBRATION, "confidence_at_most", _EDGES, columns)
    title = "Accuracy by the probability of the best class"
    _draw_calibration(folder, bins, title, y="accuracy [%]", counted="examples")
    _draw_confusion(folder, pairs, classes)


def _write_decisions(
    folder: epath.Path,
    classes: tuple[str, ...],
    columns: dict[str, np.ndarray],
    probabilities: np.ndarray,
    targets: np.ndarray,
) -> None:
    """The tables and the picture of images with several labels, by sigmoids."""
    _table_of_columns(folder / CLASSES, "class", classes, columns)
    bins = measures.bins_of(probabilities.reshape(-1, 1), targets.reshape(-1, 1))
    columns = dict(zip(("decisions", "probability", "share"), bins, strict=True))
    _table_of_columns(folder / CALIBRATION, "probability_at_most", _EDGES, columns)
    title = "How many images have a class, by its probability"
    _draw_calibration(folder, bins, title, y="images with the class [%]", counted="decisions")


def _draw_calibration(
    folder: epath.Path, bins: measures.Bins, title: str, *, y: str, counted: str
) -> None:
    plot = Plot(title, x="probability [%]", y=y)
    plot.line([0, 100], [0, 100], style.GREY, "as sure as right", width=1)
    filled = bins.count > 0
    confidence, accuracy = 100 * bins.confidence[filled], 100 * bins.accuracy[filled]
    plot.line(confidence, accuracy, style.COLOURS[0])
    plot.dots(confidence, accuracy, style.COLOURS[0], f"{counted} of a bin")
    (folder / "calibration.png").write_bytes(png(plot.image()))


def _draw_confusion(folder: epath.Path, pairs: np.ndarray, classes: tuple[str, ...]) -> None:
    """confusion.png, which names the classes if they are few enough, or else those that are confused most;
    confusion.csv has all.
    """
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
    (folder / "confusion.png").write_bytes(png(confusion))


def _most_confused(pairs: np.ndarray) -> np.ndarray:
    """The numbers, rising, of at most `_NAMED_CLASSES` classes with the most images that are taken for others."""
    wrong = pairs - np.diag(np.diag(pairs))
    return np.sort(np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:_NAMED_CLASSES])


def _names(classes: tuple[str, ...], chosen: np.ndarray) -> list[str]:
    """The chosen classes of each row of (n, classes) bool, in one text."""
    return [" ".join(classes[c] for c in np.flatnonzero(row)) for row in chosen]


def _table_of_columns(path: epath.Path, first: str, keys: Sequence, columns: dict) -> None:
    """A table that begins with the column `first` of `keys`."""
    _table(path, (first, *columns), zip(keys, *columns.values(), strict=True))


def _table(path: epath.Path, header: tuple[str, ...], rows) -> None:
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(map(outputs.as_cell, row) for row in rows)
