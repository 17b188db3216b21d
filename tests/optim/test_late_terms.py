"""Parameters of a late term have the updates of an optimizer that begins with the term."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import optim
from vit_jax.optim.options import Optim

START, STEPS = 30, 36
PREFIX = "objective/terms/late/"
MATRIX = {"kernel": (8, 8), "bias": (8,)}
SHAPES = {"encoder": MATRIX, "objective": {"terms": {"late": MATRIX, "early": MATRIX}}}
OPTIMIZERS = ("adamw", "lamb", "muon")
SLOW = (
    "nadamw", "adafactor", "sgd", "soap", "lars", "lion", "rmsprop", "adamuon", "normuon", "shampoo"
)  # fmt: skip


def drawn(seed: int) -> dict:
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(1 + 0.1 * random.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def of_late(tree: dict) -> dict:
    return {"objective": {"terms": {"late": tree["objective"]["terms"]["late"]}}}


def of_others(tree: dict) -> dict:
    early = {"terms": {"early": tree["objective"]["terms"]["early"]}}
    return {"encoder": tree["encoder"], "objective": early}


def config_of(name: str) -> Optim:
    matrices = {"matrix_every": 1, "basis_every": 1}
    options = {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.1, "clip": 0.0}
    return Optim(name=name, matrices=(".*kernel",), **options, **matrices)


def trained(config: Optim, params: dict, gradients: list[dict], starts=None) -> list[dict]:
    """The parameters before and after each step."""
    how = {"total_steps": 100, "to_steps": lambda _: 0}
    optimizer, _ = optim.make(config, params, **how, starts=starts)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    states, state = [params], optimizer.init(params)
    for grads in gradients:
        params, state = step(params, state, grads)
        states.append(params)
    return states


@pytest.mark.parametrize(
    "name", [*OPTIMIZERS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_late_terms_parameters_are_trained_as_by_an_optimizer_that_begins_with_it(name):
    config, params = config_of(name), drawn(0)
    gradients = [drawn(1 + number) for number in range(STEPS)]
    states = trained(config, params, gradients, {PREFIX: START})
    for state in states[: START + 1]:
        jax.tree.map(np.testing.assert_array_equal, of_late(state), of_late(params))
    alone = trained(config, of_late(params), [of_late(grads) for grads in gradients[START:]])
    for found, expected in zip(states[START:], alone, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), of_late(found), expected
        )
    others = trained(config, of_others(params), [of_others(grads) for grads in gradients])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), of_others(states[-1]), others[-1]
    )


def test_first_updates_of_a_late_term_are_no_longer_than_the_rate():
    params, gradients = drawn(0), [drawn(1 + number) for number in range(STEPS)]
    states = trained(config_of("adamw"), params, gradients, {PREFIX: START})
    first = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max(), *map(of_late, states[START : START + 2])
    )
    decay = 1e-3 * 0.1 * 1.5
    assert max(jax.tree.leaves(first)) < 1e-3 + decay


def test_state_of_runs_without_late_terms_is_as_before():
    config, params = config_of("adamw"), drawn(0)
    how = {"total_steps": 100, "to_steps": lambda _: 0}
    with_none, without = (
        optim.make(config, params, **how, **starts)[0].init(params)
        for starts in ({"starts": {}}, {})
    )
    assert jax.tree.structure(with_none) == jax.tree.structure(without)
