"""State of an objective moves once a step, by all parts of an accumulated batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.conftest import parameters
from tests.objectives import test_dino
from vit_jax.base import patterns
from vit_jax.config import default_config
from vit_jax.data import batches
from vit_jax.interchange import formats
from vit_jax.interchange.file_header import preprocessing_of
from vit_jax.models import registry
from vit_jax.training.assembly import assemble, outline, resolve

OWN = "objective"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The file of a ViT, its config and its weights."""
    path = str(tmp_path_factory.mktemp("teacher") / "vit.npz")
    config = registry.model_config("ViT-mu/8", width=16, depth=1, num_classes=0, image_size=16)
    seen = preprocessing_of({"image_size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3})
    checkpoint = formats.LoadedCheckpoint(config, parameters(config), preprocessing=seen)
    formats.write_checkpoint(checkpoint, path, "official")
    return path, registry.Weights(checkpoint.params, {})


def of_features(path: str, standardize: str):
    config = default_config()
    config.data.image_size, config.batch_size = 16, 8
    config.model.update(dict(name="ViT-mu/8", width=16, depth=1))
    config.objective.update(dict(name="features", teachers=(path,), hidden=8, last_hidden=8))
    config.objective.standardize, config.objective.sample = (
        standardize,
        9,
    )  # PHI-S collects covariances here
    config.objective.momentum = (0.5, 0.5)
    config.duration = "8 steps"
    return config


def states_after(config, accumulate: int, steps: int, frozen_teachers=(), constant=False):
    """The objective's state after each step of parameters that stay, and each step's metrics."""
    config.accumulate, config.optim.lr, config.optim.warmup = accumulate, 0.0, "0 steps"
    assembly = assemble(resolve(config), num_classes=0, examples_per_epoch=64)
    state = jax.jit(assembly.init)(jax.random.key(0)).replace(frozen_teachers=frozen_teachers)
    random, step = np.random.default_rng(0), jax.jit(assembly.train_step)
    spec = batches.spec(assembly.config, num_classes=0)
    states, metrics = [], []
    for _ in range(steps):
        batch = {
            name: np.full(x.shape, 128, np.uint8)
            if constant
            else random.integers(0, 256, x.shape, np.uint8)
            for name, x in spec.items()
        }
        state, of_step = step(state, batch)
        states.append(patterns.named(jax.device_get(state.variables[OWN])))
        metrics.append(jax.device_get(of_step))
    return states, metrics


def assert_equal(whole, parts):
    for expected, found in zip(whole, parts, strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            largest = np.abs(value).max()
            np.testing.assert_allclose(found[name], value, atol=2e-5 * largest, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("standardize", ["moments", "phi_s"])
def test_moments_of_a_teachers_features_are_those_of_the_whole_batch(teacher, standardize):
    path, weights = teacher
    whole, parts = (
        states_after(of_features(path, standardize), n, 4, (weights,))[0] for n in (1, 4)
    )
    assert_equal(whole, parts)


@pytest.mark.slow
def test_centre_and_watch_of_dino_are_those_of_the_whole_batch():
    # Patches that are masked are drawn for each part; their centre is tested with the losses.
    changes = {"objective.patch_weight": 0.0, "objective.koleo": 0.0}
    whole, parts = (states_after(test_dino.tiny(**changes), accumulate, 3) for accumulate in (1, 4))
    assert_equal(whole[0], parts[0])
    for expected, found in zip(whole[1], parts[1], strict=True):
        for name in ("teacher_information", "teacher_entropy", "collapsed_steps", "loss"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, err_msg=name)


@pytest.mark.slow
def test_steps_of_a_collapsed_teacher_are_counted_once():
    _, metrics = states_after(test_dino.tiny(), 4, 3, constant=True)
    assert [m["collapsed_steps"] for m in metrics] == [1, 2, 3]


def test_dinos_state_moves_once_by_what_all_parts_say():
    config = test_dino.tiny(**{"objective.patch_weight": 0.0, "accumulate": 4})
    objective = outline(resolve(config), num_classes=0, examples_per_epoch=64).networks.objective
    own = objective.make_modules(nnx.Rngs(0))
    equal = jnp.full((4, 12), 1 / 12)
    said = {
        "centre": {"sum": 6.0 * jnp.ones((4, 12)), "count": jnp.full(4, 2.0)},
        "teacher": {"mean": equal, "entropy": jnp.full(4, jnp.log(12.0))},
    }
    for steps in (1, 2):
        metrics = objective.update_state(own, said, jnp.int32(0))
        momentum = objective.options.centre_momentum
        np.testing.assert_allclose(own.centre[...], 3 * (1 - momentum**steps), rtol=1e-5)
        assert metrics["collapsed_steps"] == own.equal_steps[...] == steps
    # Each part gives one answer for all of its images, and the parts give different ones.
    said["teacher"] = {"mean": jnp.eye(4, 12), "entropy": jnp.zeros(4)}
    assert objective.update_state(own, said, jnp.int32(0))["collapsed_steps"] == 0


def test_a_late_term_of_a_sum_keeps_its_state_until_it_begins():
    config = test_dino.tiny()
    dino = {"prototypes": 12, "bottleneck": 8, "head_hidden": 16, "patch_weight": 0.0}
    config.objective = default_config().objective
    config.objective.name = "sum"
    config.objective.terms = (("dino", dino | {"start": "2 steps", "koleo": 0.0}), "masked_patches")
    config.data.views = (*config.data.views[:1], *config.data.views)
    states, metrics = states_after(config, 2, 4)
    centres = [jnp.abs(state["terms/dino/centre"]).max() for state in states]
    assert centres[0] == centres[1] == 0 and centres[3] != centres[2] != 0
    assert [m["dino_teacher_information"] > 0 for m in metrics] == [False, False, True, True]
