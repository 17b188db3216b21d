"""Schedule-free AdamW, against its formula in float64 NumPy and against optax."""

import jax
import numpy as np
import optax
import pytest

from vit_jax import optim
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError

FIELDS = {"name": "schedule_free", "lr": 0.05, "weight_decay": 0.1, "b2": 0.99}


def in_float64(config, start, gradients, rates):
    """(y, x) after each update."""
    x = y = z = start
    v, total = 0.0, 0.0
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        v = config.b2 * v + (1 - config.b2) * g**2
        direction = g / (np.sqrt(v / (1 - config.b2**t)) + config.eps)
        z = z - rate * (direction + config.weight_decay * y)
        total += rate**2
        if total:
            x = x + rate**2 / total * (z - x)
        y = (1 - config.b1) * z + config.b1 * x
        yield y, x


@pytest.mark.parametrize("warmup", [0, 4])
def test_ten_steps_are_those_of_the_formula_in_float64(kit, warmup):
    config = kit.config(**FIELDS, warmup=f"{warmup} steps")
    params, gradients = kit.vit(), [kit.vit(seed) for seed in range(1, 11)]
    trajectory, state = kit.train(config, params, gradients)
    means = optim.update_average(config, params, trajectory[-1], state, 10)
    rates = [config.lr * (min(1, t / warmup) if warmup else 1) for t in range(10)]
    name = "head/kernel"
    grads = [np.float64(patterns.named(g)[name]) for g in gradients]
    expected = list(in_float64(config, np.float64(patterns.named(params)[name]), grads, rates))
    for (y, _), ours in zip(expected, trajectory, strict=True):
        np.testing.assert_allclose(patterns.named(ours)[name], y, rtol=0, atol=1e-5)
    y, x = expected[-1]
    np.testing.assert_allclose(patterns.named(means)[name], x, rtol=0, atol=1e-5)
    assert np.abs(x - y).max() > 1e-3


def test_ten_steps_are_those_of_optax(kit):
    config = kit.config(**FIELDS, weight_decay_rules=((".*", 1.0),))
    params, gradients = kit.vit(), [kit.vit(seed) for seed in range(1, 11)]
    trajectory, state = kit.train(config, params, gradients)
    optimizer = optax.contrib.schedule_free_adamw(0.05, b1=0.9, b2=0.99, weight_decay=0.1)
    theirs, their_state = params, optimizer.init(params)
    for gradient in gradients:
        updates, their_state = jax.jit(optimizer.update)(gradient, their_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    means = optim.update_average(config, params, trajectory[-1], state, 10)
    expected = optax.contrib.schedule_free_eval_params(their_state, theirs)
    for ours, other in ((trajectory[-1], theirs), (means, expected)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, other)


def test_frozen_parameters_are_their_own_mean(kit):
    config = kit.config(**FIELDS, freeze=("embedding/.*",))
    params = kit.vit()
    trajectory, state = kit.train(config, params, [kit.vit(1), kit.vit(2)])
    means = optim.update_average(config, params, trajectory[-1], state, 2)
    np.testing.assert_array_equal(means["embedding"]["kernel"], params["embedding"]["kernel"])
    assert np.abs(means["head"]["kernel"] - params["head"]["kernel"]).max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"schedule": "cosine"}, "config.optim.schedule = 'cosine'.*schedule=constant"),
        ({"cooldown": "3 steps"}, "cooldown = '3 steps'"),
        ({"weight_decay_end": 0.2}, "config.optim.weight_decay_end = 0.2"),
        ({"ema": 0.9}, "config.optim.ema = 0.9"),
        ({"b1": 0.0}, "config.optim.b1 = 0.0"),
    ],
)
def test_what_contradicts_it_is_refused(kit, fields, match):
    with pytest.raises(ConfigError, match=match):
        kit.make(kit.config(**FIELDS | fields), kit.vit())
