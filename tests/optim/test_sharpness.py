"""The gradient of SAM and GSAM: that of big_vision, and of the paper's formulas in float64."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.config import Optim
from vit_jax.optim import sharpness


def gradient_of(params, images, labels):
    """Of a network of two layers, as the oracle has it."""

    def loss(p):
        hidden = jnp.tanh(images @ p["a"]["w"] + p["a"]["b"])
        log_p = jax.nn.log_softmax(hidden @ p["c"]["w"])
        value = -jnp.mean(jnp.sum(labels * log_p, axis=1))
        return value, value

    return jax.grad(loss, has_aux=True)(params)


def by_formulas(params, images, labels, rho, alpha):
    """Algorithm 1 of the paper, with all parameters as one vector."""
    vector, unravel = jax.flatten_util.ravel_pytree(params)

    def gradient(vector):
        grads, _ = gradient_of(unravel(vector), images, labels)
        return np.asarray(jax.flatten_util.ravel_pytree(grads)[0])

    g = gradient(vector)
    h = gradient(vector + rho * g / np.linalg.norm(g))
    unit = h / np.linalg.norm(h)
    return unravel(h - alpha * (g - (g @ unit) * unit))


def options(case):
    return Optim(
        lr=case["lr_max"], lr_end=case["lr_min"], sam_rho=(case["rho_min"], case["rho_max"]),
        sam_alpha=case["alpha"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def oracle(shared_data):
    with np.load(shared_data / "oracle" / "relatives" / "gsam.io.npz") as file:
        return dict(file)


@pytest.mark.parametrize("number", range(3))
def test_loss_and_gradient_are_those_of_big_vision_and_of_the_paper(oracle, number):
    case = json.loads(str(oracle["cases"]))[number]
    with jax.enable_x64():
        params = {
            "a": {"w": oracle["params/a/w"], "b": oracle["params/a/b"]},
            "c": {"w": oracle["params/c/w"]},
        }
        params = jax.tree.map(jnp.asarray, params)
        rho = sharpness.radius(options(case), case["lr"])
        aware = sharpness.aware(gradient_of, options(case), rho)
        grads, loss = aware(params, oracle["images"], oracle["labels"])
        expected = by_formulas(
            params, oracle["images"], oracle["labels"], float(rho), case["alpha"]
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), grads, expected)
    assert abs(float(loss) - oracle[f"{number}/loss"]) < 1e-12
    for layer, name in (("a", "w"), ("a", "b"), ("c", "w")):
        theirs = oracle[f"{number}/grad/{layer}/{name}"]
        np.testing.assert_allclose(grads[layer][name], theirs, atol=1e-12)


def test_the_radius_follows_the_learning_rate_and_is_never_negative():
    config = Optim(lr=3e-3, lr_end=3e-5, sam_rho=(0.1, 0.6))
    rates = [3e-3, 3e-5, (3e-3 + 3e-5) / 2]
    np.testing.assert_allclose(
        [sharpness.radius(config, rate) for rate in rates], [0.6, 0.1, 0.35], rtol=1e-6
    )
    assert sharpness.radius(Optim(lr=1.0, lr_end=0.5, sam_rho=(0.0, 0.6)), 0.1) == 0
    assert sharpness.radius(Optim(lr=1.0, lr_end=1.0, sam_rho=(0.1, 0.6)), 1.0) == 0.6


def test_with_a_radius_of_zero_it_is_the_plain_gradient_to_the_bit():
    random = np.random.default_rng(0)
    params = {
        "a": {"w": random.normal(size=(5, 7)), "b": random.normal(size=7)},
        "c": {"w": random.normal(size=(7, 3))},
    }
    params = jax.tree.map(jnp.float32, params)
    batch = random.normal(size=(6, 5)), np.eye(3)[[0, 1, 2, 0, 1, 2]]
    plain, _ = gradient_of(params, *batch)
    grads, _ = sharpness.aware(gradient_of, Optim(sam_rho=(0.0, 0.1)), 0.0)(params, *batch)
    jax.tree.map(np.testing.assert_array_equal, grads, plain)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_where_the_gradient_is_zero_it_stays_zero(alpha):
    params = jnp.zeros(3)
    config = Optim(sam_rho=(0.1, 0.1), sam_alpha=alpha)
    grads, _ = sharpness.aware(lambda p: (2 * p, None), config, 0.1)(params)
    np.testing.assert_array_equal(grads, np.zeros(3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(sam_rho=(0.6, 0.1)), "first the radius at lr_end"),
        (dict(sam_alpha=0.6), "sam_alpha = 0.6 has no use without config.optim.sam_rho"),
    ],
)
def test_options_that_do_not_go_together_are_refused(kit, fields, message):
    with pytest.raises(ConfigError, match=message):
        kit.make(kit.config(**fields), kit.vit())
