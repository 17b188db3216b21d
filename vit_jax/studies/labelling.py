"""Photos with one label each, and photos with several: how they are held out and trained on, the metric that compares
classifiers, and the sentences and tables of a page.
"""

import abc
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.data.record import Source
from vit_jax.evaluation import decisions

Row = Mapping[str, str]  # of a table of the evaluator classification
NO_CLASS = "none of the classes"


class Labelling(abc.ABC):
    """How many labels a photo has.

    Attributes:
      metric: the name of the metric that compares classifiers, one of the evaluator `classification`.
      words: the same in plain words.
      figures: further metrics that `classify` returns.
      settings: fields of the config of a run, and their values as text.
      probabilities: the function from logits to them.
      evaluator: that gives the metric while a run trains.
      thresholds: the option of the evaluator `classification`.
    """

    metric: str
    words: str
    figures: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    probabilities: str
    evaluator: str
    thresholds: str

    @abc.abstractmethod
    def targets(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """The labels of a batch as (n, classes) bool."""

    @abc.abstractmethod
    def score(self, logits: np.ndarray, targets: np.ndarray) -> float:
        """The metric of logits and targets (n, classes)."""

    @abc.abstractmethod
    def sentence(self, result: Mapping) -> str:
        """The result of `classify`, without how long it took."""

    @abc.abstractmethod
    def lines(self, metrics: Mapping[str, float], rows: Sequence[Row]) -> list[str]:
        """The metrics in sentences, the first of them short.

        Args:
          metrics: of the evaluator `classification`.
          rows: of its table of classes.
        """

    @abc.abstractmethod
    def class_table(self, rows: Sequence[Row]) -> list[list[str]]:
        """A row of cells for each class, the worst first, below a row of headings."""

    @abc.abstractmethod
    def class_note(self) -> str:
        """How to read the table of classes."""

    @abc.abstractmethod
    def mistake(self, row: Row) -> str:
        """A row of the table of mistakes in words."""


class OneLabel(Labelling):
    """Photos with one label each."""

    metric = "accuracy"
    words = "accuracy"
    figures = ("accuracy_low", "accuracy_high")
    settings = (("data.holdout_by", "class"),)
    probabilities = "softmax"
    evaluator = "accuracy"
    thresholds = ""

    def targets(self, labels: np.ndarray, classes: int) -> np.ndarray:
        return labels[:, None] == np.arange(classes)

    def score(self, logits: np.ndarray, targets: np.ndarray) -> float:
        is_right = logits.argmax(-1) == targets.argmax(-1)
        return float(np.mean(is_right))

    def sentence(self, result: Mapping) -> str:
        low = 100 * result["accuracy_low"]
        high = 100 * result["accuracy_high"]
        return (
            f"accuracy {result['accuracy']:.1%} on {result['held_out']:,} photos that were held out "
            f"({low:.1f} … {high:.1f} %)"
        )

    def lines(self, metrics: Mapping[str, float], rows: Sequence[Row]) -> list[str]:
        count = int(metrics["examples"])
        low = 100 * metrics["accuracy_low"]
        high = 100 * metrics["accuracy_high"]
        right = round(metrics["accuracy"] * count)
        lines = [
            f"{metrics['accuracy']:.1%} of {count:,} held-out images are classified correctly ({right:,})",
            f"95 % confidence interval: {low:.1f} % to {high:.1f} %; more images make it narrower.",
        ]
        if rows:
            most = max(rows, key=lambda row: int(row["examples"]))
            share = int(most["examples"]) / count
            lines.append(f"Whoever always answers {most['class']!r} is right in {share:.1%}.")
        return lines

    def class_table(self, rows: Sequence[Row]) -> list[list[str]]:
        table = [["class", "held out", "recall", "precision"]]
        for row in sorted(rows, key=_worst_recall_first):
            recall = share_text(row["recall"]) if _has_examples(row) else "-"
            precision = share_text(row["precision"])
            table.append([row["class"], row["examples"], recall, precision])
        return table

    def class_note(self) -> str:
        return (
            "Recall is the share of a class's images that are recognised, precision the share of the answers with this "
            "class that are right."
        )

    def mistake(self, row: Row) -> str:
        probability = share_text(row["probability"])
        return f"{row['class']}, taken for {row['predicted']} ({probability})"


class SeveralLabels(Labelling):
    """Photos that may have several labels each, or none. The probability of each class is a sigmoid."""

    metric = "mean_average_precision"
    words = "mean average precision"
    figures = (
        "average_precision_micro", "auc", "f1", "f1_micro", "accuracy", "accuracy_low", "accuracy_high",
    )  # fmt: skip
    settings = (
        ("data.holdout_by", "file"),
        ("objective.loss", "sigmoid"),
        ("eval.evaluators", "('classification',)"),
        ("eval.best", "classification/mean_average_precision"),
    )
    probabilities = "sigmoid"
    evaluator = "classification"
    thresholds = "f1"

    def targets(self, labels: np.ndarray, classes: int) -> np.ndarray:
        return labels > 0

    def score(self, logits: np.ndarray, targets: np.ndarray) -> float:
        return decisions.means(logits, targets)[self.metric]

    def sentence(self, result: Mapping) -> str:
        return (
            f"mean average precision {result[self.metric]:.1%} on {result['held_out']:,} photos that were held out; "
            f"with thresholds by class that were chosen on them F1 is {result['f1']:.1%}"
        )

    def lines(self, metrics: Mapping[str, float], rows: Sequence[Row]) -> list[str]:
        count = int(metrics["examples"])
        labelled = int(metrics["labelled"])
        right = round(metrics["accuracy"] * labelled)
        low = 100 * metrics["accuracy_low"]
        high = 100 * metrics["accuracy_high"]
        mean = metrics[self.metric]
        lines = [f"Mean average precision {mean:.1%} on {count:,} held-out images"]
        examples = [int(row["examples"]) for row in rows if _has_examples(row)]
        if examples:
            chance = np.mean(examples) / count
            lines.append(
                f"It is the mean over the classes with held-out images, {len(examples):,}; answers at random have "
                f"about {chance:.1%}."
            )
        lines.append(
            f"{metrics['accuracy']:.1%} of {labelled:,} held-out images are classified correctly ({right:,}), if that "
            f"means that the most probable class is one of their labels. 95 % confidence interval: {low:.1f} % to "
            f"{high:.1f} %."
        )
        if "f1" in metrics:
            lines.append(
                f"Decided by the thresholds of the classes: F1 {metrics['f1']:.1%} in the mean over classes, "
                f"{metrics['f1_micro']:.1%} over all decisions."
            )
        return lines

    def class_table(self, rows: Sequence[Row]) -> list[list[str]]:
        table = [["class", "held out", "average precision", "recall", "precision", "threshold"]]
        for row in sorted(rows, key=_worst_ranks_first):
            average = share_text(row["average_precision"]) if _has_examples(row) else "-"
            recall = share_text(row["recall"]) if _has_examples(row) else "-"
            threshold = f"{float(row['threshold']):.2f}"
            precision = share_text(row["precision"])
            table.append([row["class"], row["examples"], average, recall, precision, threshold])
        return table

    def class_note(self) -> str:
        return (
            "Average precision says how well the probability of a class ranks its images before all others; it needs "
            "no threshold. The answer for an image has a class if the probability is at or above the threshold of the "
            "class. Recall is the share of a class's images that are recognised, precision the share of the answers "
            "with this class that are right."
        )

    def mistake(self, row: Row) -> str:
        labels = row["class"] or NO_CLASS
        probability = share_text(row["probability"])
        return f"{labels}; answered {row['predicted']} ({probability})"


ONE_LABEL = OneLabel()
SEVERAL_LABELS = SeveralLabels()
LABELLINGS = {labelling.metric: labelling for labelling in (ONE_LABEL, SEVERAL_LABELS)}


def labelling_of(source: Source) -> Labelling:
    """How many labels the images of a source have."""
    return SEVERAL_LABELS if source.multi_label else ONE_LABEL


def labelling_of_metrics(metrics: Mapping[str, float]) -> Labelling:
    """How many labels the images had that the evaluator `classification` has judged."""
    return SEVERAL_LABELS if SEVERAL_LABELS.metric in metrics else ONE_LABEL


def share_text(text: str) -> str:
    """A share of a table in percent."""
    return f"{float(text):.0%}"


def _has_examples(row: Row) -> bool:
    """Whether a class has held-out images."""
    return int(row["examples"]) > 0


def _worst_recall_first(row: Row) -> tuple[bool, float]:
    """The order of a class in a table: a class without held-out images comes last."""
    return not _has_examples(row), float(row["recall"])


def _worst_ranks_first(row: Row) -> tuple[bool, float]:
    """The order of a class in a table: a class without held-out images, which has no average precision, comes last."""
    return not _has_examples(row), float(row["average_precision"])
