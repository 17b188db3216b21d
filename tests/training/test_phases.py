"""A schedule of image sizes in training: the step, the run, and what cannot learn from it."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.integration.conftest import TINY
from tests.models import test_contract as families
from tests.training.test_step import make_config
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.interchange import formats
from vit_jax.models import positions, registry, resized
from vit_jax.models.embeddings import sincos_2d
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.gradient import make_gradient

SCHEDULE = {"data.size_schedule": ((0, 16), (0.5, 32)), "data.image_size": 32}


def assembled(**changes):
    config = resolve(make_config(**SCHEDULE | changes))
    return assemble(config, num_classes=10, examples_per_epoch=160)


def make_batch(size, count=4):
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (count, size, size, 3), np.uint8)
    return {"image": jnp.asarray(image), "label": jnp.arange(count, dtype=jnp.int32)}


def test_gradients_of_small_images_reach_the_whole_table_of_positions():
    """Beside a model of the small size whose positions JAX has resized, antialiased; and with accumulation."""
    changes = {"augment.flip": False, "augment.mixup": 0.0, "model.depth": 1}
    assembly = assembled(batch_size=4, accumulate=2, **changes)
    state, batch = jax.jit(assembly.init)(jax.random.key(0)), make_batch(16)
    gradient_of = make_gradient(assembly.networks, assembly.learning_rate, assembly.config)
    grads, metrics, _ = jax.jit(gradient_of)(state, batch)
    assert grads["position"].shape == (1, 1 + 16, 64)  # of images of 32 pixels in patches of 8

    small = resized.config_at(assembly.model_config, 16)
    definition = registry.abstract(small)[0]

    def loss_of(params):
        position = params["position"]
        grid = position[0, 1:].reshape(4, 4, 64)
        grid = jax.image.resize(grid, (2, 2, 64), "linear", antialias=True).reshape(1, 4, 64)
        params = params | {"position": jnp.concatenate([position[:, :1], grid], axis=1)}
        logits = nnx.merge(definition, params, {})(batch["image"] / 127.5 - 1).logits
        return -jax.nn.log_softmax(logits)[jnp.arange(4), batch["label"]].mean()

    loss, expected = jax.jit(jax.value_and_grad(loss_of))(state.params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for name, grad in patterns.named(grads).items():
        np.testing.assert_allclose(grad, patterns.named(expected)[name], atol=1e-5, err_msg=name)
    assert (jnp.abs(grads["position"][0, 1:]).max(-1) > 0).all()


@pytest.mark.parametrize("position_at", ["stem", "shared"])
def test_fixed_sines_are_spread_over_small_images(position_at):
    """Their places are those that patches of the run's own size have; other runs compute them as before."""
    assembly = assembled(**{"model.position": "sincos2d", "model.position_at": position_at})
    state = jax.eval_shape(assembly.init, jax.random.key(0))
    state = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)
    networks = assembly.networks
    table = sincos_2d((4, 4), 64).reshape(4, 4, 64)
    small = jax.image.resize(table, (2, 2, 64), "linear", antialias=True).reshape(1, 4, 64)
    for size, expected in ((16, small), (32, table.reshape(1, 16, 64))):
        model = state.learner(networks.for_batch(make_batch(size))).model
        added = positions.of(model.config).table(None, jnp.float32, model.places)
        np.testing.assert_allclose(added, expected, atol=1e-6)
        if position_at == "stem":
            np.testing.assert_array_equal(model.positions(jnp.float32), added)


def test_a_step_of_small_images_does_not_change_a_fixed_table():
    changes = {"model.position": "fixed2d", "model.pool": "mean", "optim.ema": 0.9}
    assembly = assembled(**changes)
    state = jax.eval_shape(assembly.init, jax.random.key(0))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    table = jnp.arange(16 * 64.0).reshape(1, 16, 64)
    assert state.variables["model"]["position"].shape == table.shape
    variables = state.variables | {"model": {"position": table}}
    own = {"model": variables["model"]}
    networks = assembly.networks.for_devices().for_batch(make_batch(16))
    learner = state.learner(networks, variables=variables)
    assert learner.model.position[...].shape == (1, 4, 64)
    np.testing.assert_array_equal(networks.variables_of(learner, own)["model"]["position"], table)


def test_the_operations_of_a_run_are_those_of_its_phases():
    assembly = assembled(duration="100 steps")
    small, large = assembly.phases()
    assert [(p.image_size, p.first, p.stop) for p in (small, large)] == [(16, 0, 50), (32, 50, 100)]
    alone = assemble(
        resolve(make_config(**{"data.image_size": 16})), num_classes=10, examples_per_epoch=160
    )
    assert small.step_flops == alone.step_flops < assembly.step_flops == large.step_flops
    assert assembly.flops() == 50 * small.step_flops + 50 * large.step_flops
    assert assembly.flops(45, 52) == 5 * small.step_flops + 2 * large.step_flops


@pytest.mark.parametrize(
    "changes",
    [
        {
            "objective.name": "mae",
            "objective.width": 32,
            "objective.depth": 1,
            "objective.heads": 2,
        },
        {"objective.name": "masked_patches"},
        {"optim.sam_rho": (0.1, 0.1), "optim.sam_alpha": 0.5},
        {"lora.lora_rank": 2, "init_from": "CHECKPOINT"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_step_takes_images_of_each_size(changes, tmp_path):
    if "init_from" in changes:
        model = registry.model_config(
            "ViT-mu/8", image_size=32, num_classes=10, width=64, depth=2, heads=4, mlp_dim=128, activation="gelu"
        )  # fmt: skip
        params = families.parameters(model)
        changes = changes | {"init_from": str(tmp_path / "small.safetensors")}
        checkpoint = formats.LoadedCheckpoint(model, params)
        formats.write_checkpoint(checkpoint, changes["init_from"], "timm")
    if "objective.name" in changes:
        changes = changes | {"augment.mixup": 0.0, "model.num_classes": 0}
    assembly = assembled(**changes)
    state = jax.eval_shape(assembly.init, jax.random.key(0))
    for size in (16, 32):
        batch = jax.eval_shape(lambda size=size: make_batch(size, 16))
        after, _ = jax.eval_shape(assembly.train_step, state, batch)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def check_logits(config, target):
    """Two images of the target's size have logits from a model of the config."""
    definition, weights = registry.abstract_weights(config)

    def logits(weights, images):
        model = nnx.merge(definition, *weights)
        return resized.resized(model, config, target, resized.SCHEDULED)(images).logits

    images = jax.ShapeDtypeStruct((2, *target.height_width, config.channels), jnp.float32)
    assert jax.eval_shape(logits, weights, images).shape == (2, families.CLASSES)


@pytest.mark.parametrize("family", families.TINY)
def test_a_family_learns_from_other_sizes_or_says_why_not(family):
    config = families.tiny(family)
    larger = tuple(2 * side for side in config.height_width)
    try:
        target = resized.config_at(config, larger)
        resized.check_resized(config, target, resized.SCHEDULED)
    except ConfigError as error:
        assert family in ("mixer", "feed_forward", "axial_resnet"), error
        return
    check_logits(config, target)
    assert family not in ("mixer", "feed_forward", "axial_resnet")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.size_schedule": ((0, 20), (0.5, 32))}, "ViT-mu/8 cannot learn from images of 20 .*patches of 8"),
        ({"model.position": "relative"}, "position .* cannot be interpolated"),
    ],
)  # fmt: skip
def test_what_cannot_learn_from_several_sizes_is_refused_before_the_run(changes, message):
    with pytest.raises(ConfigError, match=message):
        assembled(**changes)


def test_a_family_with_weights_for_each_token_is_refused_by_its_name():
    config = vit_jax.load_config("configs/mixer.py:B/16")
    config.update_from_flattened_dict(SCHEDULE)
    message = "Mixer-B/16 cannot learn from images of 16 .*: a Mixer has weights for each token"
    with pytest.raises(ConfigError, match=message):
        assemble(resolve(config), num_classes=1000, examples_per_epoch=160)


@pytest.fixture(scope="module")
def run(tmp_path_factory, compilation_cache):
    """The workdir of a run of 12 steps, the last 6 with larger images, and its config."""
    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(
        TINY | SCHEDULE | {"compilation_cache": compilation_cache, "model.depth": 1}
    )
    config.checkpoint.keep = 9
    workdir = tmp_path_factory.mktemp("scheduled")
    return workdir, config, vit_jax.train(config, workdir)


def parameters(workdir):
    loaded = vit_jax.load_run(workdir)
    return {
        n: np.asarray(x) for n, x in patterns.named(registry.split(loaded.model)[1].params).items()
    }


def test_a_run_that_is_resumed_across_a_change_of_size_is_the_same_to_the_bit(run, tmp_path):
    workdir, config, result = run
    killed = shutil.copytree(workdir, tmp_path / "killed")
    for folder in (killed / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > 4:
            shutil.rmtree(folder)
    again = vit_jax.train(config, killed)
    assert again["loss"] == result["loss"]
    whole = parameters(workdir)
    for name, x in parameters(killed).items():
        np.testing.assert_array_equal(x, whole[name], err_msg=name)
    assert whole["position"].shape == (1, 16, 32)  # of the last size, at which the run is evaluated
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    rows = {row["step"]: row for row in rows if "step_seconds" in row}
    flops = [row["model_flops_per_second"] * row["step_seconds"] for row in rows.values()]
    assert 3 < flops[-1] / flops[0] < 6  # four times as many patches
