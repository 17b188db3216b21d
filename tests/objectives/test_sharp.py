"""Sharpness-aware steps of objectives with a decoder, a teacher that follows the student, and centres."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.objectives.test_dino import leaves, tiny
from vit_jax.config import default_config
from vit_jax.data import batches
from vit_jax.training.assembly import assemble, resolve

# ρ is linear in the rate, and 0 at 5e-4 and below: in warm-up.
SHARP = {"optim.sam_rho": (0.0, 0.5), "optim.sam_alpha": 0.3}
RATES = {"optim.lr": 1e-3, "optim.lr_end": 5e-4, "optim.warmup": "4 steps"}
SMALL = {"batch_size": 4, "augment.flip": False}


def mae(**changes):
    config = default_config()
    config.data.image_size, config.model.name, config.objective.name = 32, "ViT-mu/8", "mae"
    config.objective.width, config.objective.depth, config.objective.heads = 16, 1, 2
    config.duration = "8 steps"
    config.update_from_flattened_dict(changes)
    return config


def dino(**changes):
    views = {"data.views": ({}, {}), "model.depth": 1, "objective.frozen_prototypes": "0 steps"}
    return tiny(**views | changes)


def stepped(make, at, **changes):
    """(state before, state after, metrics) of a step after so many, with SAM and without, of one batch."""
    first, found = None, []
    for sharp in (SHARP, {}):
        config = resolve(make(**SMALL | RATES | sharp | changes))
        assembly = assemble(config, num_classes=0, examples_per_epoch=64)
        random, spec = np.random.default_rng(0), batches.spec(config, num_classes=0)
        batch = {n: random.integers(0, 256, x.shape, np.uint8) for n, x in spec.items()}
        first = first or jax.jit(assembly.init)(jax.random.key(0))
        step = jax.jit(assembly.train_step)
        states = [counted(first, i) for i in at]
        found.append([(state, *step(state, batch)) for state in states])
    return zip(*found, strict=True)


def counted(state, steps):
    """A state that takes so many steps for done; its optimizer too."""
    count = lambda x: jnp.int32(steps) if x.shape == () and x.dtype == jnp.int32 else x  # noqa: E731
    return state.replace(step=jnp.int32(steps), opt_state=jax.tree.map(count, state.opt_state))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (dino, {"objective.patch_weight": 0.0}),
        pytest.param(dino, {}, marks=pytest.mark.slow),
        pytest.param(dino, {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(mae, {}, marks=pytest.mark.slow),
    ],
)
def test_a_sharp_step_takes_teacher_and_centre_from_where_the_student_is(make, changes):
    at_zero, later = stepped(make, (1, 4), **changes)
    # With a radius of 0 it is the step without, to the bit.
    (_, sharp, metrics), (_, plain, expected) = at_zero
    jax.tree.map(np.testing.assert_array_equal, leaves(sharp), leaves(plain))
    jax.tree.map(np.testing.assert_array_equal, metrics, expected)
    # With another the student goes elsewhere; loss, centres and counters are those of one plain step.
    (before, sharp, metrics), (_, plain, expected) = later
    assert metrics["loss"] == expected["loss"]
    student, other = leaves(sharp.params), leaves(plain.params)
    assert sum((student[name] != other[name]).any() for name in student) > len(student) / 2
    jax.tree.map(np.testing.assert_array_equal, leaves(sharp.variables), leaves(plain.variables))
    if make is dino:
        assert leaves(sharp.variables)["objective/centre"].any()
        momentum = 1 - 0.25 * (1 + np.cos(np.pi * 4 / 8)) / 2
        first, follows = leaves(before.teacher), leaves(sharp.teacher)
        for name in student:
            exact = momentum * first[name] + (1 - momentum) * student[name]
            np.testing.assert_allclose(follows[name], exact, atol=1e-6, err_msg=name)
