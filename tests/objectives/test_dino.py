"""Self-distillation: a whole step, its teacher, masks, and views of other sizes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import batches
from vit_jax.devices import meshes
from vit_jax.models import registry
from vit_jax.models.resized import config_at, resized
from vit_jax.objectives.contract import ObjectiveContext
from vit_jax.objectives.dino import block_masks
from vit_jax.objectives.dino.dino import Dino, DinoOptions
from vit_jax.training.assembly import assemble, resolve

LOCAL = {"count": 2, "image_size": 16}


def tiny(**changes):
    config = default_config()
    config.data.image_size, config.batch_size = 32, 8
    config.data.views = ({"crop_area": (0.5, 1.0)}, {"blur": 0.0}, LOCAL)
    config.model.name = "ViT-mu/8"
    config.objective.name = "dino"
    config.objective.prototypes, config.objective.bottleneck = 12, 8
    config.objective.head_hidden = 16
    config.objective.temperature_warmup = config.objective.frozen_prototypes = "2 steps"
    config.objective.momentum = (0.75, 1.0)
    config.duration, config.nonfinite = "8 steps", "skip"
    config.optim.weight_decay, config.optim.weight_decay_end = 0.1, 0.4
    config.augment.flip = False
    config.update_from_flattened_dict(changes)
    return config


def assembled(config):
    return assemble(resolve(config), num_classes=0, examples_per_epoch=64)


@pytest.fixture(scope="module")
def run():
    """(assembly, its compiled step, the states before and after four steps, their metrics, a batch)."""
    assembly = assembled(tiny())
    state, step = jax.jit(assembly.init)(jax.random.key(0)), jax.jit(assembly.train_step)
    random, spec = np.random.default_rng(0), batches.spec(assembly.config, num_classes=0)
    batch = {n: random.integers(0, 256, x.shape, np.uint8) for n, x in spec.items()}
    states, metrics = [state], []
    for _ in range(4):
        state, found = step(state, batch)
        states.append(state)
        metrics.append(jax.device_get(found))
    return assembly, step, states, metrics, batch


def leaves(tree):
    return patterns.named(jax.device_get(tree))


def test_the_teacher_follows_by_a_scheduled_momentum_and_is_what_is_evaluated(run):
    assembly, _, states, _, _ = run
    momentum = assembly.networks.moving_average().momentum
    assert [float(momentum(jnp.int32(i))) for i in (0, 4, 8)] == pytest.approx([0.75, 0.875, 1.0])
    for i in range(4):
        m = float(momentum(jnp.int32(i)))
        before, after, student = map(
            leaves, (states[i].teacher, states[i + 1].teacher, states[i + 1].params)
        )
        for name in after:
            expected = m * before[name] + (1 - m) * student[name]
            np.testing.assert_allclose(after[name], expected, atol=1e-6, err_msg=name)
    assert states[-1].weights().params["position"] is states[-1].teacher["position"]


def test_every_parameter_learns_prototypes_after_a_while(run):
    _, _, states, metrics, _ = run
    first, third, last = (leaves(states[i].params) for i in (0, 2, 4))
    for name, value in last.items():
        assert (value != third[name]).any(), name
    frozen = "objective/head/prototypes/scale"
    np.testing.assert_array_equal(third[frozen], first[frozen])
    for m in metrics:
        parts = m["dino_loss"] + m["ibot_loss"] + 0.1 * m["koleo_loss"]
        np.testing.assert_allclose(m["loss"], parts, rtol=1e-5)


def test_a_skipped_step_leaves_teacher_and_centre_alone(run):
    _, step, states, _, batch = run
    assert leaves(states[1].variables["objective"])["centre"].any()
    poisoned = states[1].replace(params=jax.tree.map(lambda p: p * jnp.nan, states[1].params))
    skipped, _ = step(poisoned, batch)
    assert int(skipped.health.skipped) == 1
    for tree in ("teacher", "variables"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(skipped, tree), getattr(states[1], tree)
        )


def test_a_teacher_that_says_the_same_of_all_images_is_counted_and_warned_of(run):
    assembly, step, states, metrics, batch = run
    assert metrics[-1]["collapsed_steps"] == 0 and metrics[-1]["teacher_information"] > 1e-3
    state, same = states[0], {name: np.full_like(x, 128) for name, x in batch.items()}
    for count in (1, 2):
        state, found = step(state, same)
        assert found["collapsed_steps"] == count and found["teacher_information"] < 1e-5
    warning = assembly.networks.objective.warning
    assert not warning({"collapsed_steps": 99.0})
    assert "The teacher has given the same output for every image" in warning(
        {"collapsed_steps": 100.0}
    )


def test_its_state_is_cut_as_that_of_its_parameters(run):
    assembly = run[0]
    config = dataclasses.replace(assembly.config.mesh, fsdp_min_size=16)
    assembly = dataclasses.replace(
        assembly, config=dataclasses.replace(assembly.config, mesh=config)
    )
    mesh = meshes.make_mesh({"data": 1, "fsdp": 2, "tensor": 1}, jax.devices()[:2])
    state = assembly.abstract_state(mesh)
    jax.tree.map(
        lambda a, b: a.sharding == b.sharding or pytest.fail(), state.teacher, state.params
    )
    assert "fsdp" in state.teacher["objective"]["head"]["prototypes"]["kernel"].sharding.spec


def test_masks_have_the_sizes_that_are_wanted_and_are_made_of_rectangles():
    counts = jnp.array([0, 1, 19, 40, 58, 98] * 8)
    masks = jax.jit(block_masks.draw, static_argnums=2)(jax.random.key(0), counts, (14, 14))
    found = np.asarray(masks.sum(1))
    assert (found <= counts).all() and not found[::6].any()
    assert (found[3::6] >= 30).all()  # ten attempts in a row may fail just before the end
    assert found[5::6].mean() > 90
    # Neighbours of masked patches are masked far more often than a share of 40 / 196.
    grids = np.asarray(masks[3::6]).reshape(-1, 14, 14)
    assert (grids[:, 1:] & grids[:, :-1]).sum() / grids[:, :-1].sum() > 0.6


def test_devices_draw_the_masks_of_their_own_images_and_ask_no_other():
    counts, key = jnp.array([0, 4, 7, 12] * 2), jax.random.key(0)
    mesh = meshes.make_mesh({"data": 2, "fsdp": 1, "tensor": 1}, jax.devices()[:2])
    draw = functools.partial(block_masks.draw, grid=(6, 6))
    with jax.set_mesh(mesh):
        by_image = meshes.batch_sharding(mesh)
        sharded = jax.jit(draw, in_shardings=(None, by_image), out_shardings=by_image)
        compiled = sharded.lower(key, counts).compile()
        masks = compiled(key, jax.device_put(counts, by_image))
    assert not re.search("all-reduce|all-gather", compiled.as_text())
    np.testing.assert_array_equal(masks, jax.jit(draw)(key, counts))


def test_one_global_view_of_each_image_is_masked_by_shares_that_are_spread_evenly():
    objective = assembled(tiny()).networks.objective
    model = dataclasses.replace(objective.context.model, image_size=112)
    context = dataclasses.replace(
        objective.context, model=model, views={"image_0": (2, 112, 112, 3)}
    )
    large = Dino(objective.options, context)
    masks = np.asarray(
        jax.jit(lambda key: large._masks(key, 64, large.views[0]))(jax.random.key(0))
    )
    assert masks.shape == (64, 2, 196)
    assert (masks.any(2).sum(1) == 1).all()
    assert 20 <= masks.any(2)[:, 0].sum() <= 44
    assert 0.26 < masks.any(1).mean() < 0.31


@pytest.mark.parametrize("position", ["learned", "sincos2d", "learned2d"])
def test_a_model_at_another_size_is_that_which_a_checkpoint_would_be_fitted_to(position):
    config = registry.model_config("ViT-mu/8", image_size=32, num_classes=0, position=position)
    model = registry.build(config, rngs=nnx.Rngs(0))
    target = config_at(config, (16, 16))
    fitted = jax.tree.map(lambda x: x, registry.split(model)[1].params)

    def fit(name, x):
        step = config.fit_parameter(name, target, resize="dinov2")
        return jnp.asarray(step[1](np.asarray(x))) if step else x

    found = resized(model, config, target, "dinov2")
    assert found.config == target
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        registry.split(found)[1].params,
        patterns.map_named(fit, fitted),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.views": ()}, "'dino' needs several views of each image"),
        ({"data.views": ({},)}, "needs two global views, .* has 1"),
        ({"data.views": ({}, {}, {"image_size": 20})}, "view 2: image size 20x20 cannot be split into patches of 8"),
        ({"model.position": "relative"}, "config.data.views: .*position .* cannot be interpolated"),
        ({"batch_size": 1}, "KoLeo compares images with each other: .* = 1 "),
        ({"objective.koleo_images": 3}, "KoLeo compares images with each other: .* = 8 "),
        ({"objective.mask_shares": (0.5, 0.1)}, "must rise"),
        ({"augment.mixup": 0.2}, "cannot learn from mixed images"),
        ({"optim.weight_decay": 0.0}, "weight_decay_end = 0.4 is where"),
        ({"objective.name": "masked_patches"}, "has no option"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_so_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        assembled(tiny(**changes))


def test_an_objective_of_one_view_refuses_several():
    config = tiny()
    config.objective = default_config().objective
    config.objective.name = "masked_patches"
    with pytest.raises(ConfigError, match="'masked_patches' takes one view of an image"):
        assembled(config)


def test_operations_are_those_of_all_views():
    config = registry.model_config("ViT-L/16", num_classes=0)
    views = {"image_0": (2, 224, 224, 3), "image_1": (8, 96, 96, 3)}
    context = ObjectiveContext(config, (0.5,) * 3, (0.5,) * 3, 10, lambda _: 1, views, 64)
    head = 2 * (1024 * 2048 + 2048**2 + 2048 * 256 + 256 * 65536)
    local = dataclasses.replace(config, image_size=96).flops()
    both = 2 * config.flops() + (2 + 98) * head
    assert Dino(DinoOptions(), context).flops() == both + both // 3 + 8 * (local + head)
