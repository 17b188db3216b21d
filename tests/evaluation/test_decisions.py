"""Measures of several labels against scikit-learn and torchmetrics: absent classes, empty rows, ties, one class."""

import numpy as np
import pytest
from etils import epath
from sklearn import metrics

from tests import lazily
from tests.repeats import slow_unless
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data.labels.thresholds import read_thresholds, write_thresholds
from vit_jax.evaluation import decisions, measures

torch = lazily.Package("torch")
theirs = lazily.Package("torchmetrics.functional.classification")


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities, targets and thresholds: of 1 to 8 classes, some without examples or with nothing else, of images
    without a class, and with ties.
    """
    random = np.random.default_rng(seed)
    images, classes = random.integers(2, 60), random.choice([1, 2, 3, 8])
    logits = (random.normal(size=(images, classes)) * 3).astype(np.float32)
    if seed % 3 == 1:
        logits = np.round(logits)
    if seed % 7 == 3:
        logits[:] = 0
    targets = random.random((images, classes)) < random.choice([0.1, 0.5, 0.9])
    targets[: images // 4] = False
    targets[images // 2, 0] = True
    if classes > 2:
        targets[:, 1] = seed % 2
        targets[:, 2] = False
    thresholds = random.choice([0.2, 0.5, 0.7], classes)
    return measures.probabilities(logits, "sigmoid"), targets, thresholds


SETS = slow_unless(range(4), range(100))


@pytest.mark.parametrize("seed", SETS)
def test_rates_and_ranks_are_those_of_scikit_learn(seed):
    likely, targets, thresholds = drawn(seed)
    decided = likely >= thresholds
    columns = decisions.by_class(likely, targets, decided)
    found = decisions.means(likely, targets, decided)
    classes = np.arange(targets.shape[1])
    there = targets.any(0)

    for c in classes:
        expected = metrics.precision_recall_fscore_support(
            targets[:, c], decided[:, c], labels=[True], zero_division=0
        )
        for name, (value,) in zip(("precision", "recall", "f1", "examples"), expected, strict=True):
            assert columns[name][c] == pytest.approx(value, abs=1e-6), (name, c)
        assert columns["predicted"][c] == decided[:, c].sum()
        if there[c]:
            precision = metrics.average_precision_score(targets[:, c], likely[:, c])
            assert columns["average_precision"][c] == pytest.approx(precision, abs=1e-6)
        if 0 < targets[:, c].sum() < len(targets):
            auc = metrics.roc_auc_score(targets[:, c], likely[:, c])
            assert columns["auc"][c] == pytest.approx(auc, abs=1e-6)
        else:
            assert np.isnan(columns["auc"][c])

    for average, ending in (("macro", ""), ("micro", "_micro")):
        if targets.shape[1] > 1:
            labels = classes[there] if average == "macro" else None
            rates = metrics.precision_recall_fscore_support(
                targets, decided, labels=labels, average=average, zero_division=0
            )
        else:
            rates = metrics.precision_recall_fscore_support(
                targets[:, 0], decided[:, 0], average="binary", zero_division=0
            )
        for name, value in zip(decisions.DECIDED, rates, strict=False):
            assert found[f"{name}{ending}"] == pytest.approx(value, abs=1e-6), (name, average)
    precision = metrics.average_precision_score(
        targets[:, there], likely[:, there], average="macro"
    )
    assert found["mean_average_precision"] == pytest.approx(precision, abs=1e-6)
    precision = metrics.average_precision_score(targets.ravel(), likely.ravel())
    assert found["average_precision_micro"] == pytest.approx(precision, abs=1e-6)
    auc = metrics.roc_auc_score(targets.ravel(), likely.ravel())
    assert found["auc_micro"] == pytest.approx(auc, abs=1e-6)
    ranked = there & ~targets.all(0)
    if ranked.any():
        auc = metrics.roc_auc_score(targets[:, ranked], likely[:, ranked], average="macro")
        assert found["auc"] == pytest.approx(auc, abs=1e-6)
    else:
        assert np.isnan(found["auc"])


def rare() -> tuple[np.ndarray, np.ndarray]:
    """One image in hundreds has a class, and one class most of the images."""
    random = np.random.default_rng(11)
    logits = random.normal(size=(600, 4)).astype(np.float32)
    targets = random.random((600, 4)) < (0, 0.004, 0.05, 0.97)
    targets[599, 0] = True
    return logits, targets


def saturated() -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that are 0 or 1 in float64, or next to these, on either side of the truth."""
    random = np.random.default_rng(12)
    logits = random.choice([-800, -40, -17, 17, 40, 800], (80, 3)).astype(np.float32)
    return logits, random.random((80, 3)) < 0.5


def reversed_ranks() -> tuple[np.ndarray, np.ndarray]:
    """A class that is ranked perfectly, one that is ranked the wrong way round, and one of equal scores."""
    logits = np.linspace(-4, 4, 90, dtype=np.float32)[:, None] * [1, -1, 0]
    return logits, np.repeat(np.arange(90)[:, None] >= 60, 3, axis=1)


@pytest.mark.parametrize("make", [rare, saturated, reversed_ranks])
def test_each_class_is_that_of_scikit_learns_report(make):
    logits, targets = make()
    likely = measures.probabilities(logits, "sigmoid")
    thresholds = decisions.choose_thresholds(likely, targets)
    decided = likely >= thresholds
    columns = decisions.by_class(likely, targets, decided)
    found = decisions.means(likely, targets, decided)
    report = metrics.classification_report(targets, decided, output_dict=True, zero_division=0)
    pairs = metrics.multilabel_confusion_matrix(targets, decided)
    for c in range(targets.shape[1]):
        for ours, name in (("precision",) * 2, ("recall",) * 2, ("f1", "f1-score")):
            assert columns[ours][c] == pytest.approx(report[str(c)][name], abs=1e-6), (c, ours)
        assert columns["examples"][c] == report[str(c)]["support"]
        assert columns["predicted"][c] == pairs[c, :, 1].sum()
        precision, recall, _ = metrics.precision_recall_curve(targets[:, c], likely[:, c])
        with np.errstate(invalid="ignore"):
            best = np.nanmax(2 * precision * recall / (precision + recall))
        assert columns["f1"][c] == pytest.approx(best, abs=1e-9)
    for average, ending in (("macro avg", ""), ("micro avg", "_micro")):
        assert found[f"f1{ending}"] == pytest.approx(report[average]["f1-score"], abs=1e-6)
    for average, name in (
        ("macro", "mean_average_precision"),
        ("micro", "average_precision_micro"),
    ):
        expected = metrics.average_precision_score(targets, likely, average=average)
        assert found[name] == pytest.approx(expected, abs=1e-6)
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(targets, likely), abs=1e-6)


@pytest.mark.parametrize("seed", SETS)
def test_thresholds_have_the_best_f1_of_all_and_are_the_highest_of_these(seed):
    likely, targets, _ = drawn(seed)
    thresholds = decisions.choose_thresholds(likely, targets)
    for c, threshold in enumerate(thresholds):
        p, truth = likely[:, c], targets[:, c]
        if not truth.any():
            assert threshold == 0.5
            continue
        scores = {cut: metrics.f1_score(truth, p >= cut) for cut in np.unique(p)}
        best = max(scores.values())
        assert metrics.f1_score(truth, p >= threshold) == best
        highest = max(cut for cut, score in scores.items() if score == best)
        np.testing.assert_array_equal(p >= threshold, p >= highest)
        assert threshold < highest


def ranked_classes(seed: int) -> np.ndarray:
    """The classes that have examples, and images that are none."""
    _, targets, _ = drawn(seed)
    return np.flatnonzero(targets.any(0) & ~targets.all(0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in range(100) if len(ranked_classes(seed)) > 1])
def test_rates_and_ranks_are_those_of_torchmetrics(seed):
    """Where a class cannot be ranked, they give 0 and warn; of one class they have other functions."""
    likely, targets, _ = drawn(seed)
    there = ranked_classes(seed)
    likely, targets = likely[:, there], targets[:, there]
    decided = likely >= 0.5
    found = decisions.means(likely, targets, decided)
    given = torch.tensor(likely), torch.tensor(targets.astype(int))
    ranks = {
        "average_precision": theirs.multilabel_average_precision,
        "auc": theirs.multilabel_auroc,
    }
    rates = {
        "precision": theirs.multilabel_precision,
        "recall": theirs.multilabel_recall,
        "f1": theirs.multilabel_f1_score,
    }
    for name, function in (ranks | rates).items():
        for average in ("macro", "micro"):
            options = {"num_labels": likely.shape[1], "average": average}
            if name in rates:  # yes is above the threshold there, not at it
                options["threshold"] = 0.5 - 1e-9
            expected = function(*given, **options)
            ours = f"{name}_micro" if average == "micro" else name
            ours = "mean_average_precision" if ours == "average_precision" else ours
            assert found[ours] == pytest.approx(float(expected), abs=1e-6), ours


def test_thresholds_of_the_config_are_one_for_each_class():
    config = default_config()
    assert decisions.class_thresholds(config, 3).tolist() == [0.5, 0.5, 0.5]
    config.eval.thresholds = (0.1, 0.9)
    with pytest.raises(ConfigError, match="config.eval.thresholds are for sigmoids"):
        decisions.class_thresholds(config, 2)
    config.objective.loss = "sigmoid"
    assert decisions.class_thresholds(config, 2).tolist() == [0.1, 0.9]
    with pytest.raises(ConfigError, match="config.eval.thresholds has 2 numbers for 3 classes"):
        decisions.class_thresholds(config, 3)


def test_a_table_of_thresholds_is_read_in_the_order_of_the_classes(tmp_path):
    path, classes = epath.Path(tmp_path / "thresholds.csv"), ("cat", "=dog", "emu")
    write_thresholds(path, classes, np.array([0.1, 1 / 3, 1.0]))
    assert read_thresholds(path, classes[::-1]) == (1.0, 1 / 3, 0.1)
    path.write_text("\ufeffclass,threshold\nemu,0.5\ncat,0\n")
    assert read_thresholds(path, ("cat", "emu")) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("class,threshold\ncat,0.5\n", "0 lines for the class 'dog'"),
        ("class,threshold\ncat,0.5\ndog,0.5\ncat,0.1\n", "2 lines for the class 'cat'"),
        ("class,threshold\ncat,0.5\ndog,0.5\nemu,0.1\n", "1 lines for the class 'emu'"),
        ("class,threshold\ncat,50\ndog,0.5\n", "the threshold of 'cat' is 50.0"),
        ("class,threshold\ncat,nan\ndog,0.5\n", "the threshold of 'cat' is nan"),
        ("class,threshold\ncat,\ndog,0.5\n", "no table of the columns class and threshold"),
        ("name,cut\ncat,0.5\n", "no table of the columns class and threshold"),
    ],
)
def test_a_table_of_other_thresholds_is_refused(content, message, tmp_path):
    path = epath.Path(tmp_path / "thresholds.csv")
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_thresholds(path, ("cat", "dog"))
