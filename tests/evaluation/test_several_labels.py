"""Evaluators of images with several labels or none, against scikit-learn."""

import csv
import dataclasses
import itertools

import jax
import numpy as np
import pytest
from etils import epath
from sklearn import calibration, metrics

from vit_jax import evaluation
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.data import sources
from vit_jax.data.labels.thresholds import read_thresholds
from vit_jax.data.record import DataSet, Record
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel
from vit_jax.models import registry
from vit_jax.objectives.contract import Learner
from vit_jax.objectives.supervised import training_accuracy
from vit_jax.pictures.page import Page
from vit_jax.studies import judged

CLASSES = ("cat", "dog", "emu", "fox")
RANDOM = np.random.default_rng(5)
LOGITS = (RANDOM.normal(size=(50, 4)) * 2).astype(np.float32)
# Every fifth image has no label.
TARGETS = (RANDOM.random((50, 4)) < 0.4) & (np.arange(50) % 5 > 0)[:, None]


@dataclasses.dataclass(frozen=True)
class Several:
    """Black images with the labels of `targets`."""

    targets: np.ndarray
    classes: tuple[str, ...] = CLASSES
    multi_label: bool = True

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        label = tuple(map(int, np.flatnonzero(self.targets[index])))
        return Record(np.zeros((16, 16, 3), np.uint8), label, f"{index}.png")


def judge(monkeypatch, *entries, logits=LOGITS, targets=TARGETS, **fields) -> dict[str, float]:
    """The metrics of an engine that answers with `logits`."""
    data_set = DataSet("several", {"train": 1, "test": len(targets)}, lambda _: Several(targets))
    monkeypatch.setitem(sources.OPENERS, "several", lambda _: data_set)
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": "ViT-mu/8", "data.name": "several", "data.image_size": 16, "data.eval_crop": "resize",
        "batch_size": 8, "objective.loss": "sigmoid", **fields,
    })  # fmt: skip
    model_config = registry.model_config("ViT-mu/8", image_size=16, num_classes=4)
    definition, _ = registry.abstract(model_config)
    context = EvalContext(schema.typed(config_class(), config), model_config, definition, CLASSES)
    mesh, found = meshes.replica_mesh(), {}
    for entry in entries:
        by_engine = dataclasses.replace(context, logits_of=engine_of(logits))
        suite = evaluation.make((entry,), by_engine)
        with jax.set_mesh(mesh):
            new = suite(EvaluatedModel(registry.Weights({}, {})), mesh)
        assert set(new) == set(suite.metrics())
        found |= new
    return found


def engine_of(logits: np.ndarray):
    """An engine that answers with these rows in turn, whatever the images are."""
    rest = iter(logits)

    def logits_of(images):
        rows = list(itertools.islice(rest, len(images)))
        padding = [np.zeros(logits.shape[1], np.float32)] * (len(images) - len(rows))
        return np.stack(rows + padding)

    return logits_of


LABELLED = TARGETS.any(1)
RIGHT = TARGETS[np.arange(50), LOGITS.argmax(1)][LABELLED].mean()


def binary_losses(rows) -> float:
    """The mean over rows of the summed binary cross-entropies, by scikit-learn."""
    likely = 1 / (1 + np.exp(-LOGITS[rows].astype(np.float64)))
    return sum(
        metrics.log_loss(TARGETS[rows, c], likely[:, c], labels=[False, True]) for c in range(4)
    )


@pytest.mark.parametrize(
    ("unlabelled", "rows"), [("", slice(None)), ("none", slice(None)), ("unknown", LABELLED)]
)
def test_images_without_a_label_are_of_no_class_or_unknown(unlabelled, rows, monkeypatch, caplog):
    caplog.set_level("INFO")
    options = {"unlabelled": unlabelled}
    found = judge(monkeypatch, ("accuracy", options), ("classification", options))
    assert found["accuracy"] == pytest.approx(RIGHT) == found["classification/accuracy"]
    assert found["examples"] == len(TARGETS[rows]) == found["classification/examples"]
    assert found["loss"] == pytest.approx(binary_losses(rows), rel=1e-5)
    expected = metrics.average_precision_score(TARGETS[rows], LOGITS[rows], average="macro")
    assert found["classification/mean_average_precision"] == pytest.approx(expected, abs=1e-9)
    said = unlabelled or "none"
    missing = int(np.sum(~LABELLED))
    assert caplog.text.count(f"{missing} of 50 images have no label and") == 2
    assert caplog.text.count(f"unlabelled={said!r}") == 2


def false_alarms() -> tuple[np.ndarray, np.ndarray]:
    """Images of no class, whose logits are above those of all others."""
    return LOGITS + np.where(LABELLED, 0, 20)[:, None].astype(np.float32), TARGETS


def one_labelled_image() -> tuple[np.ndarray, np.ndarray]:
    targets = np.zeros_like(TARGETS)
    targets[7, 2] = True
    return LOGITS, targets


def ties() -> tuple[np.ndarray, np.ndarray]:
    """Two values of logits, over images most of which have no label."""
    return np.sign(LOGITS), TARGETS & (np.arange(50) % 5 > 2)[:, None]


@pytest.mark.parametrize("kind", ["sigmoid", "binary"])
@pytest.mark.parametrize("make", [false_alarms, one_labelled_image, ties])
def test_images_of_no_class_cost_what_scikit_learn_says(make, kind, monkeypatch):
    logits, targets = make()
    fields = {"objective.loss": kind}
    found = judge(
        monkeypatch, "accuracy", "classification", logits=logits, targets=targets, **fields
    )
    likely = 1 / (1 + np.exp(-logits.astype(np.float64)))
    losses = [metrics.log_loss(targets[:, c], likely[:, c], labels=[0, 1]) for c in range(4)]
    expected = np.sum(losses) if kind == "sigmoid" else np.mean(losses)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    there = targets.any(0)
    precision = metrics.average_precision_score(targets[:, there], likely[:, there])
    assert found["classification/mean_average_precision"] == pytest.approx(precision, abs=1e-6)
    labelled = targets.any(1)
    of_labelled = metrics.average_precision_score(
        targets[labelled][:, there], likely[labelled][:, there]
    )
    assert precision < of_labelled
    rates = metrics.precision_recall_fscore_support(
        targets, likely >= 0.5, labels=np.flatnonzero(there), average="macro", zero_division=0
    )
    assert found["classification/precision"] == pytest.approx(rates[0], abs=1e-6)


def test_a_false_alarm_on_an_image_of_no_class_is_the_surest_mistake(monkeypatch, tmp_path):
    logits, targets = false_alarms()
    options = {"out": str(tmp_path), "images": True}
    judge(monkeypatch, ("classification", options), logits=logits, targets=targets)
    rows = list(csv.DictReader((tmp_path / "mistakes.csv").open()))
    first = rows[: np.sum(~LABELLED)]
    assert {row["class"] for row in first} == {""}
    assert {row["image"] for row in first} == {f"{i}.png" for i in np.flatnonzero(~LABELLED)}


def test_the_accuracy_that_training_logs_is_that_of_the_evaluation(monkeypatch):
    found = judge(monkeypatch, "accuracy")
    learner = Learner(None, None, None, jax.numpy.int32(0))
    targets = TARGETS.astype(np.float32)
    logged = training_accuracy(learner, jax.numpy.asarray(LOGITS), targets, multi_label=True)
    assert float(logged.mean()) == pytest.approx(found["accuracy"], rel=1e-6)


def test_a_softmax_has_no_images_of_no_class(monkeypatch):
    found = judge(monkeypatch, "accuracy", **{"objective.loss": "softmax"})
    assert found["examples"] == LABELLED.sum()
    with pytest.raises(ConfigError, match="unlabelled='none' is for sigmoids"):
        judge(monkeypatch, ("accuracy", {"unlabelled": "none"}), **{"objective.loss": "softmax"})


def test_classification_measures_each_class_and_writes_its_tables(monkeypatch, tmp_path):
    thresholds = (0.3, 0.5, 0.6, 0.5)
    folder = tmp_path / judged.FOLDER
    options = {"out": str(folder), "images": True}
    found = judge(monkeypatch, ("classification", options), **{"eval.thresholds": thresholds})
    own = {name.partition("/")[2]: value for name, value in found.items()}
    likely = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
    decided = likely >= thresholds
    for average, ending in (("macro", ""), ("micro", "_micro")):
        rates = metrics.precision_recall_fscore_support(TARGETS, decided, average=average)
        for name, value in zip(("precision", "recall", "f1"), rates, strict=False):
            assert own[f"{name}{ending}"] == pytest.approx(value, abs=1e-6)
        auc = metrics.roc_auc_score(TARGETS, LOGITS, average=average)
        assert own[f"auc{ending}"] == pytest.approx(auc, abs=1e-6)
    assert own["nll"] == pytest.approx(metrics.log_loss(TARGETS.ravel(), likely.ravel()), abs=1e-6)
    brier = metrics.brier_score_loss(TARGETS.ravel(), likely.ravel())
    assert own["brier"] == pytest.approx(brier, abs=1e-6)
    share, mean = calibration.calibration_curve(TARGETS.ravel(), likely.ravel(), n_bins=15)
    counts = np.histogram(likely, bins=15, range=(0, 1))[0]
    error = np.sum(counts[counts > 0] * np.abs(share - mean)) / likely.size
    assert own["ece"] == pytest.approx(error, abs=1e-6)
    assert own["nll_scaled"] > 0 and own["labelled"] == LABELLED.sum() and own["examples"] == 50

    tables = {path.stem: list(csv.DictReader(path.open())) for path in folder.glob("*.csv")}
    assert set(tables) == {"classes", "calibration", "images", "mistakes"}
    assert (folder / "calibration.png").exists()
    rows = {row["class"]: row for row in tables["classes"]}
    for c, name in enumerate(CLASSES):
        f1 = metrics.f1_score(TARGETS[:, c], decided[:, c])
        assert float(rows[name]["f1"]) == pytest.approx(f1, abs=1e-6)
        assert int(rows[name]["predicted"]) == decided[:, c].sum()
        assert float(rows[name]["threshold"]) == thresholds[c]
    assert sum(int(row["decisions"]) for row in tables["calibration"]) == 200
    for row, labels, answers in zip(tables["images"], TARGETS, decided, strict=True):
        assert row["class"].split() == [CLASSES[c] for c in np.flatnonzero(labels)]
        assert row["decided"].split() == [CLASSES[c] for c in np.flatnonzero(answers)]
    wrong = [row for row in tables["images"] if row["predicted"] in row["decided"].split()]
    wrong = [row for row in wrong if row["predicted"] not in row["class"].split()]
    assert {row["image"] for row in tables["mistakes"]} == {row["image"] for row in wrong} != set()

    page = Page("several labels")
    judged.add_to_page(page, tmp_path)
    right = round(RIGHT * LABELLED.sum())
    assert f"of {LABELLED.sum()} held-out images are classified correctly ({right})" in page.html()
    assert all(f"<td>{name}</td>" in page.html() for name in CLASSES)


def test_thresholds_are_chosen_for_each_class(monkeypatch, tmp_path):
    options = {"out": str(tmp_path), "thresholds": "f1"}
    found = judge(monkeypatch, ("classification", options))
    thresholds = read_thresholds(epath.Path(tmp_path / "thresholds.csv"), CLASSES)
    kept = judge(monkeypatch, "classification", **{"eval.thresholds": thresholds})
    assert kept == found
    plain = judge(monkeypatch, "classification")
    assert kept["classification/f1"] > plain["classification/f1"]
    with pytest.raises(ConfigError, match="thresholds are for images with several labels"):
        judge(monkeypatch, ("classification", options), **{"objective.loss": "softmax"})
    with pytest.raises(ConfigError, match="has 1 numbers for 4 classes"):
        judge(monkeypatch, "classification", **{"eval.thresholds": (0.5,)})


def test_several_labels_by_a_softmax_are_ranked_alone(monkeypatch):
    found = judge(monkeypatch, "classification", **{"objective.loss": "softmax"})
    assert "classification/f1" not in found and "classification/ece" not in found
    auc = metrics.roc_auc_score(TARGETS[LABELLED], LOGITS[LABELLED], average="macro")
    assert found["classification/auc"] == pytest.approx(auc, abs=1e-6)


def test_classes_that_the_data_lacks_are_in_no_mean_if_asked(monkeypatch):
    targets = TARGETS & [True, False, True, True]
    options = {"present": True}
    found = judge(monkeypatch, ("classification", options), targets=targets)
    there = [0, 2, 3]
    likely = 1 / (1 + np.exp(-LOGITS[:, there].astype(np.float64)))
    micro = metrics.roc_auc_score(targets[:, there].ravel(), likely.ravel())
    assert found["classification/auc_micro"] == pytest.approx(micro, abs=1e-6)
    f1 = metrics.f1_score(targets[:, there], likely >= 0.5, average="macro")
    assert found["classification/f1"] == pytest.approx(f1, abs=1e-6)
    loss = metrics.log_loss(targets[:, there].ravel(), likely.ravel())
    assert found["classification/nll"] == pytest.approx(loss, abs=1e-6)
