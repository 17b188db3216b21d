"""The losses of images and texts against their full matrices in float64, on one, two and eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.special import log_softmax

from vit_jax.devices import meshes
from vit_jax.objectives.image_text import ring, sigmoid, softmax
from vit_jax.planning import target

PAIRS, WIDTH = 32, 16
AXES = {1: {}, 2: {"fsdp": 2}, 8: {"data": 2, "fsdp": 2, "tensor": 2}}
_random = np.random.default_rng(0)
IMAGES, TEXTS = (
    x / np.linalg.norm(x, axis=1, keepdims=True) for x in _random.normal(size=(2, PAIRS, WIDTH))
)
WEIGHTS = _random.uniform(0.5, 1.5, PAIRS)  # of the losses of images, in what is differentiated


def full_sigmoid(images, texts, temperature, bias):
    """Loss (B,) and the gradients of its weighted sum, in float64."""
    cosines = images @ texts.T
    logits, signs = np.exp(temperature) * cosines + bias, 2 * np.eye(len(images)) - 1
    loss = np.logaddexp(0, -signs * logits).sum(1)
    dlogits = WEIGHTS[:, None] * -signs / (1 + np.exp(signs * logits))
    return loss, (*_of_cosines(images, texts, temperature, cosines, dlogits), dlogits.sum())


def full_softmax(images, texts, temperature):
    cosines = images @ texts.T
    logits = np.exp(temperature) * cosines
    rows, columns = log_softmax(logits, axis=1), log_softmax(logits, axis=0)
    loss = -(np.diag(rows) + np.diag(columns)) / 2
    dlogits = (WEIGHTS[:, None] * np.exp(rows) + WEIGHTS * np.exp(columns)) / 2 - np.diag(WEIGHTS)
    return loss, _of_cosines(images, texts, temperature, cosines, dlogits)


def _of_cosines(images, texts, temperature, cosines, dlogits):
    scale = np.exp(temperature)
    return scale * dlogits @ texts, scale * dlogits.T @ images, scale * np.sum(dlogits * cosines)


LOSSES = {
    "sigmoid": (sigmoid.sigmoid_loss, full_sigmoid, (sigmoid.TEMPERATURE, sigmoid.BIAS + 8)),
    "softmax": (softmax.softmax_loss, full_softmax, (softmax.TEMPERATURE,)),
}


def compiled(name, devices):
    """Loss and gradients, compiled for a mesh of so many devices, and their arguments."""
    loss, _, parameters = LOSSES[name]
    mesh = meshes.make_mesh(
        {"data": 1, "fsdp": 1, "tensor": 1} | AXES[devices], jax.devices()[:devices]
    )
    by_rows = NamedSharding(mesh, P(meshes.BATCH))
    arrays = [jax.device_put(jnp.float32(x), by_rows) for x in (IMAGES, TEXTS)]
    arrays += [jax.device_put(jnp.float32(x), NamedSharding(mesh, P())) for x in parameters]

    def weighted(*arrays):
        each = loss(*arrays)
        return jnp.sum(each * jnp.float32(WEIGHTS)), each

    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(weighted, range(len(arrays)), has_aux=True))
        return step.lower(*arrays).compile(), arrays


@pytest.mark.parametrize("devices", AXES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_full_matrix(name, devices, monkeypatch):
    monkeypatch.setattr(ring, "CHUNK", 4)
    _, full, parameters = LOSSES[name]
    step, arrays = compiled(name, devices)
    ((_, loss), gradients), hlo = step(*arrays), step.as_text()
    expected_loss, expected = full(IMAGES, TEXTS, *parameters)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()
    assert "all-gather" not in hlo
    assert ("collective-permute" in hlo) == (devices > 1)


def plain_sigmoid(images, texts, temperature, bias):
    """As one would write it, for XLA to shard."""
    logits = jnp.exp(temperature) * ring.exact_product(images, texts.T) + bias
    return jax.nn.softplus(logits).sum(1) - jnp.diag(logits)


@pytest.mark.slow
def test_on_a_pod_no_chip_gathers_the_texts_that_xla_alone_would_gather():
    mesh = meshes.make_mesh(
        {"data": 16, "fsdp": 16, "tensor": 1}, list(target.find("v5e:16x16").devices)
    )
    by_rows, whole = (NamedSharding(mesh, spec) for spec in (P(meshes.BATCH), P()))
    vectors = jax.ShapeDtypeStruct((32_768, 768), jnp.float32, sharding=by_rows)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    gathers, temporaries = {}, {}
    for name, loss in (("ring", sigmoid.sigmoid_loss), ("plain", plain_sigmoid)):
        gradient = jax.value_and_grad(lambda *x, loss=loss: loss(*x).mean(), range(4))
        step = jax.jit(gradient, out_shardings=(whole, (by_rows, by_rows, whole, whole)))
        with jax.set_mesh(mesh):
            compiled = step.lower(vectors, vectors, scalar, scalar).compile()
        gathers[name] = "all-gather" in compiled.as_text()
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
    assert gathers == {"ring": False, "plain": True}
    assert temporaries["ring"] <= 0.01 * temporaries["plain"]  # 0.25 and 96 MiB


def test_equal_captions_share_the_target_of_softmax():
    captions = np.arange(PAIRS) % 4
    texts, equal = TEXTS[captions], captions[:, None] == captions
    logits = np.exp(softmax.TEMPERATURE) * IMAGES @ texts.T
    of_each = log_softmax(logits, axis=1) + log_softmax(logits, axis=0)
    expected = -np.mean(of_each[equal]) / 2  # all pairs of equal captions count alike
    arrays = [jnp.float32(x) for x in (IMAGES, texts, softmax.TEMPERATURE)]
    np.testing.assert_allclose(softmax.softmax_loss(*arrays).mean(), expected, rtol=1e-6)
