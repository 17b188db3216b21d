"""Cross-entropies against PyTorch and NumPy in float64."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import without_torchvision
from vit_jax import objectives
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.devices import meshes
from vit_jax.objectives.contract import Learner, ObjectiveContext
from vit_jax.objectives.distill import Distill, DistillOptions
from vit_jax.objectives.supervised import (
    Supervised,
    SupervisedOptions,
    cross_entropy,
    is_right,
    training_accuracy,
)

random = np.random.default_rng(0)
LOGITS = random.normal(size=(6, 5)).astype(np.float32) * 3
TARGETS = random.dirichlet(np.ones(5), 6).astype(np.float32)
WEIGHTS = (0.5, 1.0, 2.0, 0.0, 1.5)


@pytest.mark.parametrize("weights", [(), WEIGHTS])
def test_softmax_and_sigmoid_are_those_of_pytorch(weights):
    torch = pytest.importorskip("torch")
    from torch.nn import functional

    logits, targets = torch.from_numpy(LOGITS), torch.from_numpy(TARGETS)
    weight = torch.tensor(weights) if weights else None
    expected = functional.cross_entropy(logits, targets, weight=weight, reduction="none")
    np.testing.assert_allclose(
        cross_entropy(LOGITS, TARGETS, "softmax", weights=weights), expected, rtol=2e-6
    )
    expected = functional.binary_cross_entropy_with_logits(
        logits, targets, weight=weight, reduction="none"
    ).sum(1)
    np.testing.assert_allclose(
        cross_entropy(LOGITS, TARGETS, "sigmoid", weights=weights), expected, rtol=2e-6
    )


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_focal_loss_makes_easy_examples_count_less(kind):
    z, t = LOGITS.astype(np.float64), TARGETS.astype(np.float64)
    if kind == "softmax":
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        expected = -(t * (1 - p) ** 2 * np.log(p)).sum(1)
    else:
        p = 1 / (1 + np.exp(-z))
        expected = -(t * (1 - p) ** 2 * np.log(p) + (1 - t) * p**2 * np.log(1 - p)).sum(1)
    found = cross_entropy(jnp.asarray(LOGITS), jnp.asarray(TARGETS), kind, focal=2.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_every_class_needs_its_weight():
    context = ObjectiveContext(SimpleNamespace(num_classes=4), (0.5,), (0.5,), 1, int)
    with pytest.raises(ConfigError, match="has 5 weights for 4 classes"):
        Supervised(SupervisedOptions(class_weights=WEIGHTS), context)


MIXED = np.float32([[1, 0, 0, 0, 0], [0.3, 0.7, 0, 0, 0], [0, 1e-6, 0, 1, 0], [0, 0, 0, 0, 0]])


def test_the_binary_loss_of_mixed_targets_is_timms_and_its_formula():
    torch = pytest.importorskip("torch")
    theirs = without_torchvision.imported("timm.loss").BinaryCrossEntropy(
        smoothing=0.0, target_threshold=0.0, reduction="none"
    )
    logits = LOGITS[:4]
    found = cross_entropy(jnp.asarray(logits), jnp.asarray(MIXED), "binary")
    expected = theirs(torch.from_numpy(logits), torch.from_numpy(MIXED)).mean(1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    z, t = logits.astype(np.float64), MIXED > 0
    exact = (np.logaddexp(0, -z) * t + np.logaddexp(0, z) * ~t).mean(1)
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    # By its gradient too: every class in a mixed image gets the same share.
    gradient = jax.grad(lambda z: cross_entropy(z, jnp.asarray(MIXED), "binary").sum())(
        jnp.asarray(logits)
    )
    np.testing.assert_allclose(gradient, (1 / (1 + np.exp(-z)) - t) / 5, atol=1e-7)


def test_the_binary_loss_takes_no_smoothing():
    context = ObjectiveContext(SimpleNamespace(num_classes=5), (0.5,), (0.5,), 1, int)
    with pytest.raises(ConfigError, match="label_smoothing = 0.1 .*set label_smoothing=0"):
        Supervised(SupervisedOptions(loss="binary", label_smoothing=0.1), context)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "binary"])
@pytest.mark.parametrize("focal", [0.25, 0.9, 1.5])
def test_the_focal_loss_has_a_gradient_at_sure_examples(kind, focal):
    for gap in (15.0, 20.0, 200.0):
        logits = jnp.array([[gap, -gap, -gap]])
        targets = jnp.array([[1.0, 0.0, 0.0]])
        gradient = jax.grad(lambda z, t=targets: cross_entropy(z, t, kind, focal=focal).sum())(
            logits
        )
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("kind", "function"), [("softmax", "softmax"), ("sigmoid", "sigmoid"), ("binary", "sigmoid")]
)
def test_probabilities_are_those_of_the_loss(kind, function):
    config = default_config().objective
    config.loss = kind
    assert (objectives.loss(config), objectives.probabilities(config)) == (kind, function)
    assert objectives.activation(config) is objectives.ACTIVATIONS[function]


# Images of one class, of several, of none, mixed ones, and one that is half of two classes.
LABELS = np.array(
    [[0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [0.7, 0.3, 0, 0], [0.5, 0, 0.5, 0]], np.float32
)


@pytest.mark.parametrize("best", range(4))
def test_an_image_is_right_with_any_of_its_heaviest_classes(best):
    logits = jnp.broadcast_to(jnp.eye(4)[best], LABELS.shape)
    expected = [row[best] > 0 and row[best] == max(row) for row in LABELS.tolist()]
    assert is_right(logits, LABELS).tolist() == expected


@pytest.mark.parametrize("rows", [range(5), [0, 1], [2], [0, 2, 2]])
def test_the_training_accuracy_is_the_share_of_the_images_that_have_a_class(rows):
    labels = LABELS[list(rows)]
    logits = np.random.default_rng(1).normal(size=labels.shape).astype(np.float32)
    right = [row[z.argmax()] == row.max() for row, z in zip(labels, logits, strict=True)]
    labelled = labels.any(1)
    expected = np.mean(np.array(right)[labelled]) if labelled.any() else 0
    learner = Learner(None, None, None, jnp.int32(0))
    arrays = jnp.asarray(logits), jnp.asarray(labels)
    found = training_accuracy(learner, *arrays, multi_label=True)
    assert found.mean() == pytest.approx(expected, rel=1e-6)
    alone = training_accuracy(learner.replace(held_out=True), *arrays, multi_label=True)
    np.testing.assert_array_equal(alone, np.array(right) & labelled)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_training_accuracy_of_a_batch_over_devices_is_one_minus_the_one_error(share):
    """Of images of any number of labels, as a run has them: sharded over devices that have different images."""
    draws = np.random.default_rng(3)
    labels = (draws.random((64, 7)) < share) & (draws.random((64, 1)) < 0.6)
    labels[:8] = False  # The first device has no image of a class.
    logits = np.round(draws.normal(size=labels.shape)).astype(np.float32)
    ones = [row[z.argmax()] for row, z in zip(labels, logits, strict=True) if row.any()]
    mesh = meshes.make_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    arrays = jax.device_put((logits, labels.astype(np.float32)), meshes.batch_sharding(mesh))
    learner = Learner(None, None, None, jnp.int32(0))

    @jax.jit
    def mean(logits, labels):
        return training_accuracy(learner, logits, labels, multi_label=True).mean()

    assert float(mean(*arrays)) == pytest.approx(np.mean(ones), rel=1e-6)


@pytest.mark.parametrize("multi_label", [True, False])
def test_distillation_logs_the_accuracy_of_supervision(multi_label):
    """By an image's own labels, whatever the teacher says."""
    context = ObjectiveContext(
        SimpleNamespace(num_classes=4, exit_flops=(), two_heads=False),
        (0.5,), (0.5,), 1, int, multi_label=multi_label,
    )  # fmt: skip
    labels = LABELS[:3] if multi_label else np.eye(4, dtype=np.float32)[[0, 1, 1]]
    logits = jnp.asarray([[3, 0, 0, 0], [0, 0, 0, 2], [1, 0, 0, 0]], jnp.float32)
    learner = Learner(
        lambda *_, **__: SimpleNamespace(logits=logits),
        None,
        SimpleNamespace(logits=lambda _: jnp.roll(logits, 1, axis=1)),
        jnp.int32(0),
    )
    distill = Distill(DistillOptions(teacher="teacher"), context)
    _, logged = distill(learner, {"image": None, "label": jnp.asarray(labels)}, None)
    # Of several labels the third image has none; the second is right with its last label.
    expected = 0.5 if multi_label else 1 / 3
    assert float(logged["accuracy"].mean()) == pytest.approx(expected, rel=1e-6)
