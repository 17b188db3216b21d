"""Distillation against PyTorch's losses, and its teacher at a size and normalisation of its own."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax.base.errors import ConfigError
from vit_jax.models.contract import ModelOutput
from vit_jax.objectives.contract import Learner, ObjectiveContext, Teacher
from vit_jax.objectives.distill import Distill, DistillOptions


def context(**options):
    model = SimpleNamespace(**dict(num_classes=7, two_heads=False, exit_flops=()) | options)
    return ObjectiveContext(model, (0.5,) * 3, (0.5,) * 3, 10, int)


def losses(options, logits, exits, taught, labels, **of_model):
    model = lambda images, **_: ModelOutput(logits, None, None, {}, exits)  # noqa: E731
    teacher = SimpleNamespace(logits=lambda images: taught)
    objective = Distill(options, context(**of_model))
    return objective(Learner(model, None, teacher, 0), {"image": None, "label": labels}, None)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("two_heads", [False, True])
def test_the_losses_are_those_of_deit(kind, two_heads):
    """Exits that are no head for a teacher are not learned from one by one."""
    torch = pytest.importorskip("torch")
    from torch.nn import functional

    random = np.random.default_rng(0)
    exits = random.normal(size=(2, 5, 7)).astype(np.float32)
    taught = random.normal(size=(5, 7)).astype(np.float32)
    labels = random.dirichlet(np.ones(7), 5).astype(np.float32)
    options = DistillOptions("T", kind, alpha=0.3, temperature=3.0, label_smoothing=0.1)
    logits = exits.mean(0)
    loss, metrics = losses(
        options, *map(jnp.asarray, (logits, exits, taught, labels)), two_heads=two_heads
    )
    by_label, by_teacher = map(torch.from_numpy, exits if two_heads else (logits,) * 2)
    smooth = torch.from_numpy(labels * 0.9 + 0.1 / 7)
    base = functional.cross_entropy(by_label, smooth, reduction="none")
    teacher = torch.from_numpy(taught)
    if kind == "hard":
        other = functional.cross_entropy(by_teacher, teacher.argmax(1), reduction="none")
    else:
        other = 9 * functional.kl_div(
            functional.log_softmax(by_teacher / 3, 1), functional.log_softmax(teacher / 3, 1),
            reduction="none", log_target=True,
        ).sum(1)  # fmt: skip
    np.testing.assert_allclose(loss, 0.7 * base + 0.3 * other, rtol=1e-5)
    np.testing.assert_array_equal(metrics["agreement"], logits.argmax(1) == taught.argmax(1))


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_every_early_exit_learns_from_labels_and_teacher(kind):
    random = np.random.default_rng(0)
    exits = jnp.asarray(random.normal(size=(3, 5, 7)), jnp.float32)
    taught, labels = map(jnp.float32, (random.normal(size=(5, 7)), random.dirichlet(np.ones(7), 5)))
    options = DistillOptions("T", kind, alpha=0.3, temperature=3.0, label_smoothing=0.1)
    found, _ = losses(options, exits[-1], exits, taught, labels, exit_flops=(1, 2, 3))
    apart = [losses(options, logits, None, taught, labels)[0] for logits in exits]
    np.testing.assert_allclose(found, sum(apart), rtol=1e-6)


def test_a_teacher_sees_the_students_images_at_its_own_size_and_normalisation():
    pixels = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), np.uint8)
    seen = []

    def model(images):
        seen.append(np.asarray(images))
        return SimpleNamespace(logits=images.mean((1, 2)))

    model.config = SimpleNamespace(dtype="float32")
    own, students = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)), ((0.5,) * 3, (0.25,) * 3)
    teacher = Teacher(model, (16, 24), *own, *students)
    given = (pixels / 255 - 0.5) / 0.25
    teacher.logits(jnp.asarray(given, jnp.float32))
    for image, found in zip(pixels, seen[0], strict=True):
        planes = [Image.fromarray(image[..., c].astype(np.float32)) for c in range(3)]
        resized = [np.asarray(p.resize((24, 16), Image.Resampling.BILINEAR)) for p in planes]
        expected = (np.stack(resized, -1) / 255 - own[0]) / own[1]
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_patience_is_the_divergence_from_the_teacher_alone():
    random = np.random.default_rng(0)
    logits, taught = (random.normal(size=(5, 7)) for _ in range(2))
    labels = random.dirichlet(np.ones(7), 5)
    options = DistillOptions("T", "soft", alpha=1.0)
    found, _ = losses(options, jnp.asarray(logits), None, *map(jnp.float32, (taught, labels)))
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (taught, logits))
    np.testing.assert_allclose(found, (p * np.log(p / q)).sum(1), rtol=1e-5)
    with pytest.raises(ConfigError, match="nothing to learn for the class token's head"):
        Distill(options, context(two_heads=True))


def test_a_teacher_must_be_named():
    with pytest.raises(ConfigError, match="set --config.objective.teacher=CHECKPOINT"):
        Distill(DistillOptions(), context())
