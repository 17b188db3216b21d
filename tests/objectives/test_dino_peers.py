"""Losses of self-distillation against the package lightly, where it is installed (`pip install lightly`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import lazily, without_torchvision
from vit_jax.objectives.dino import losses

torch = lazily.Package("torch")
pytestmark = pytest.mark.slow
B, K, TEACHER, STUDENT, MOMENTUM = 6, 24, 0.05, 0.1, 0.9


@pytest.fixture(scope="module")
def theirs():
    """lightly.loss."""
    pytest.importorskip("lightly")
    return without_torchvision.imported("lightly.loss")


def drawn(*shapes):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def with_gradient(loss, *students):
    """A loss of PyTorch, and its gradients by these arrays."""
    tensors = [torch.tensor(x, requires_grad=True) for x in students]
    value = loss(*tensors)
    value.backward()
    return value.item(), [x.grad.numpy() for x in tensors]


def assert_equal(ours, theirs):
    (value, gradients), (expected, exact) = ours, theirs
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for found, gradient in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(found, gradient, atol=1e-5 * np.abs(gradient).max())


def moved_centre(centre, logits, weights=None):
    """The centre after a step of one part."""
    sums = jax.tree.map(lambda x: x[None], losses.sum_of_logits(logits, weights))
    return losses.moved_centre(centre, sums, MOMENTUM)


@pytest.mark.parametrize("local", [0, 3])
def test_dinos_loss_its_gradients_and_the_centre_over_three_steps(theirs, local):
    module = theirs.DINOLoss(
        K, teacher_temp=TEACHER, student_temp=STUDENT, center_momentum=MOMENTUM
    )
    centre = jnp.zeros(K)
    taught, *students = drawn((B, 2, K), (B, 2, K), *[(B, local, K)] * (local > 0))
    for _ in range(3):

        def ours(students, taught=taught, centre=centre):
            probabilities = losses.centred(taught, centre, TEACHER)
            of_global, *of_local = students
            return losses.class_token_loss(probabilities, of_global, of_local, STUDENT).mean()

        def exact(*students, taught=taught):
            views = [view for several in students for view in several.unbind(1)]
            return module(list(torch.tensor(taught).unbind(1)), views)

        assert_equal(jax.value_and_grad(ours)(students), with_gradient(exact, *students))
        centre = moved_centre(centre, taught)
        np.testing.assert_allclose(centre, module.center[0, 0], atol=1e-6)
        taught = np.roll(taught, 1, axis=-1)


def test_ibots_loss_of_patches_its_gradient_and_the_centre(theirs):
    module = theirs.IBOTPatchLoss(K, TEACHER, STUDENT, center_momentum=MOMENTUM)
    masks = np.random.default_rng(1).random((B, 4, 4)) < 0.4
    masks[2] = False  # an image without a masked patch
    taught, student = drawn((B, 16, K), (B, 16, K))
    present, centre = masks.reshape(B, 16), jnp.zeros(K)
    for _ in range(3):

        def ours(student, taught=taught, centre=centre):
            probabilities = losses.centred(taught, centre, TEACHER)
            return losses.patch_loss(probabilities, student, present.astype(float), STUDENT).mean()

        def exact(student, taught=taught):
            rows = torch.tensor(taught)[present]
            return module(rows, student[torch.tensor(present)], torch.tensor(masks))

        value, gradient = jax.value_and_grad(ours)(student)
        assert_equal((value, [gradient]), with_gradient(exact, student))
        centre = moved_centre(centre, taught, present.astype(np.float32))
        np.testing.assert_allclose(centre, module.center.value[0], atol=1e-6)
        taught = np.roll(taught, 1, axis=-1)


def test_koleos_loss_and_its_gradient(theirs):
    (features,) = drawn((12, 16))
    value, gradient = jax.value_and_grad(lambda x: losses.koleo(x).mean())(features)
    assert_equal((value, [gradient]), with_gradient(theirs.KoLeoLoss(), features))


@pytest.mark.parametrize("iterations", [1, 3])
def test_probabilities_by_sinkhorn(theirs, iterations):
    """Those of SwAV's loss, whose temperature is called epsilon."""
    (logits,) = drawn((10, K))
    exact = theirs.swav_loss.sinkhorn(torch.tensor(logits), iterations, TEACHER).numpy()
    found = losses.sinkhorn(logits, TEACHER, iterations=iterations)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-7)
