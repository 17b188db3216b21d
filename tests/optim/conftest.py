"""What the tests of the optimizers share: configs, small parameters, and a few updates of them."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from vit_jax import optim
from vit_jax.base import durations, schema
from vit_jax.config import Optim

TOTAL = 10


def to_steps(duration):
    return durations.steps(duration, batch_size=32, examples_per_epoch=320, total_steps=TOTAL)


def config(**fields):
    """The default `config.optim`, but with a constant learning rate, no clipping, and what `fields`
    say.
    """
    result = schema.to_config(Optim)
    result.update({"schedule": "constant", "clip": 0.0} | fields)
    return result


def make(config, params):
    return optim.make(config, params, total_steps=TOTAL, to_steps=to_steps)


def train(config, params, gradients):
    """Parameters after each update, and the last state of the optimizer."""
    optimizer, _ = make(config, params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    trajectory = []
    for gradient in gradients:
        params, state = step(params, state, gradient)
        trajectory.append(params)
    return trajectory, state


def vit(seed=0, depth=3, width=4):
    """The parameters of a tiny ViT, without what makes it one."""
    shapes = {
        "embedding": {"kernel": (2, 2, 3, width), "bias": (width,)},
        "class_token": (1, 1, width),
        "position": (1, 5, width),
        "encoder": {
            "layers": {
                "attention": {"qkv": {"kernel": (depth, width, 3, 2, 2)}},
                "mlp": {"up": {"kernel": (depth, width, 6), "bias": (depth, 6)}},
            },
            "norm": {"scale": (width,)},
        },
        "pool": {"probe": (1, 1, width)},
        "head": {"kernel": (width, 7), "bias": (7,)},
    }
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal(shape).astype(np.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


@pytest.fixture(scope="session")
def kit():
    """`kit.config(**fields)`, `kit.make(config, params)`, `kit.train(config, params, gradients)`,
    `kit.vit(seed)`, …
    """
    return SimpleNamespace(
        config=config, make=make, train=train, vit=vit, to_steps=to_steps, total=TOTAL
    )
