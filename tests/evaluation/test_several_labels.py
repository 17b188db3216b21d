"""Evaluators of images with several labels or none, against scikit-learn."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from sklearn import metrics

from vit_jax import evaluation
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.data import sources
from vit_jax.data.record import DataSet, Record
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel
from vit_jax.models import registry

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


def test_a_softmax_has_no_images_of_no_class(monkeypatch):
    found = judge(monkeypatch, "accuracy", **{"objective.loss": "softmax"})
    assert found["examples"] == LABELLED.sum()
    with pytest.raises(ConfigError, match="unlabelled='none' is for sigmoids"):
        judge(monkeypatch, ("accuracy", {"unlabelled": "none"}), **{"objective.loss": "softmax"})
