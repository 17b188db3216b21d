"""A patch size a step (FlexiViT): the step, the run, its evaluation at any size, and what cannot learn so."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.integration.conftest import TINY
from tests.models import test_contract as families
from tests.training.test_phases import check_logits, make_batch, parameters
from tests.training.test_step import make_config
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.data import views
from vit_jax.models import registry, resized
from vit_jax.models.contract import split_images
from vit_jax.models.patch_kernels import resize_patch_embedding
from vit_jax.prediction.overrides import load_for_images
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.gradient import make_gradient
from vit_jax.training.step_programs import StepPrograms

SIZES = {"data.patch_sizes": (8, 4), "data.image_size": 16}


def assembled(**changes):
    config = resolve(make_config(**SIZES | changes))
    return assemble(config, num_classes=10, examples_per_epoch=160)


def test_gradients_of_small_patches_are_those_of_a_model_that_has_them():
    """Its kernel and positions are resized by other code, once; the gradient goes through the same two linear maps."""
    assembly = assembled(**{
        "batch_size": 4, "augment.flip": False, "augment.mixup": 0.0, "model.depth": 1,
    })  # fmt: skip
    state, batch = jax.jit(assembly.init)(jax.random.key(0)), make_batch(16)
    shape = split_images((16, 16, 3), 4)
    split = batch | {"image": batch["image"].reshape(4, *shape)}
    gradient_of = make_gradient(assembly.networks, assembly.learning_rate, assembly.config)
    grads, metrics, _ = jax.jit(gradient_of)(state, split)
    assert grads["embedding"]["kernel"].shape == (8, 8, 3, 64)

    definition = registry.abstract(dataclasses.replace(assembly.model_config, patch=4))[0]
    # (4, 4, 8, 8): of each pixel of a kernel of 8 its share of those of one of 4.
    matrix = resize_patch_embedding(np.eye(64).reshape(8, 8, 1, 64), 4)[:, :, 0].reshape(4, 4, 8, 8)

    def loss_of(params):
        grid = params["position"][0, 1:].reshape(2, 2, 64)
        grid = jax.image.resize(grid, (4, 4, 64), "linear", antialias=True).reshape(1, 16, 64)
        position = jnp.concatenate([params["position"][:, :1], grid], axis=1)
        kernel = jnp.einsum("pqPQ,PQcd->pqcd", matrix, params["embedding"]["kernel"])
        embedding = params["embedding"] | {"kernel": kernel}
        params = params | {"position": position, "embedding": embedding}
        logits = nnx.merge(definition, params, {})(batch["image"] / 127.5 - 1).logits
        return -jax.nn.log_softmax(logits)[jnp.arange(4), batch["label"]].mean()

    loss, expected = jax.jit(jax.value_and_grad(loss_of))(state.params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    for name, grad in patterns.named(grads).items():
        np.testing.assert_allclose(grad, patterns.named(expected)[name], atol=1e-5, err_msg=name)


def test_the_operations_of_a_run_are_those_of_its_steps():
    assembly, choose = assembled(), views.make_choice(resolve(make_config(**SIZES)), 160)
    each = [assembled(**{"data.patch_sizes": (size,)}).step_flops for size in (4, 8)]
    alone = resolve(make_config(**{"data.image_size": 16}))
    assert each[1] == assemble(alone, num_classes=10, examples_per_epoch=160).step_flops
    assert assembly.step_flops == each[0] > each[1]
    assert assembly.flops(5, 25) == sum(each[choose(step)] for step in range(5, 25))


@pytest.mark.parametrize("family", families.TINY)
def test_a_family_has_several_patch_sizes_or_says_why_not(family):
    config = families.tiny(family)
    try:
        patch = 2 * (getattr(config, "patch", None) or 1)
        size = tuple(2 * side for side in config.height_width)
        target = resized.config_at(config, size, patch)
        resized.check_resized(config, target, resized.SCHEDULED)
    except ConfigError as error:
        assert config.fixed_size_reason in str(error) and config.fixed_size_reason
        return
    check_logits(config, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective.name": "mae", "model.num_classes": 0, "augment.mixup": 0.0}, "depends on the size"),
        ({"data.patch_sizes": (8, 1)}, "set 2 or more"),
    ],
)  # fmt: skip
def test_what_cannot_have_several_patch_sizes_is_refused_before_the_run(changes, message):
    config = make_config(**SIZES | changes)
    with pytest.raises(ConfigError, match=message):
        assemble(resolve(config), num_classes=10, examples_per_epoch=160)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("digits.py:mixer", "Mixer-S/4 .* 32 pixels in patches of 8 .* a weight for each token"),
        ("digits.py:hybrid", "its patches are those of a ResNet's map of the whole image"),
        ("digits.py:resnet", "its layers work on the whole grid of an image"),
        ("t2t_vit.py:smoke", "its patches overlap"),
    ],
)
def test_a_family_with_one_patch_size_is_refused_with_its_reason(recipe, message):
    config = vit_jax.load_config(f"configs/{recipe}")
    config.data.patch_sizes = (8, 16)
    with pytest.raises(ConfigError, match=message):
        assemble(resolve(config), num_classes=10, examples_per_epoch=160)


@pytest.fixture(scope="module")
def run(tmp_path_factory, compilation_cache):
    """The workdir of a run of 12 steps of two patch sizes, its config, its result, and the shapes it compiled for."""
    config = vit_jax.load_config("configs/digits.py")
    changes = {"compilation_cache": compilation_cache, "model.depth": 1, "data.image_size": 32}
    config.update_from_flattened_dict(TINY | changes | {"data.patch_sizes": (8, 16)})
    config.checkpoint.keep, config.eval.evaluators = 9, ("patch_sizes",)
    workdir, compiled, waits = tmp_path_factory.mktemp("flexible"), [], []

    def counted(method, into):
        @functools.wraps(method)
        def call(self, *arguments):
            into.append(arguments)
            return method(self, *arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepPrograms, "compile", counted(StepPrograms.compile, compiled))
        patch.setattr(StepPrograms, "wait", counted(StepPrograms.wait, waits))
        result = vit_jax.train(config, workdir)
    return workdir, config, result, compiled, waits


def test_each_patch_size_has_one_program_and_only_its_first_step_waits_for_it(run):
    _, _, _, compiled, waits = run
    ((_, batches, _),) = compiled
    assert [b["image"].shape[1:] for b in batches] == [(4, 8, 4, 8, 3), (2, 16, 2, 16, 3)]
    assert len(waits) == 2 and len({batch["image"].shape for (batch,) in waits}) == 2


@pytest.mark.slow
def test_a_run_that_is_resumed_at_any_step_is_the_same_to_the_bit(run, tmp_path):
    workdir, config, result, *_ = run
    killed = shutil.copytree(workdir, tmp_path / "killed")
    for folder in (killed / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > 4:
            shutil.rmtree(folder)
    again = vit_jax.train(config, killed)
    assert again["patch_sizes/8/loss"] == result["patch_sizes/8/loss"]
    whole = parameters(workdir)
    for name, x in parameters(killed).items():
        np.testing.assert_array_equal(x, whole[name], err_msg=name)
    assert whole["embedding/kernel"].shape[:2] == (8, 8)


def test_a_run_is_evaluated_at_each_patch_size_and_at_any_other(run):
    workdir, _, result, *_ = run
    trained = vit_jax.load_run(workdir)
    for size in (8, 16):
        alone = trained.evaluate(model__patch=size)
        assert alone["loss"] == pytest.approx(result[f"patch_sizes/{size}/loss"], rel=1e-5)
    larger = trained.evaluate(model__patch=10, data__image_size=40)
    assert set(larger) == {"accuracy", "top5_accuracy", "loss", "examples"}
    with pytest.raises(ConfigError, match="patches of 7"):
        trained.evaluate(model__patch=7)


def test_images_of_a_user_are_seen_in_any_patches_too(run):
    at_ten = [("model.patch", "10"), ("data.image_size", "40")]
    models = [load_for_images(run[0], settings, "predict") for settings in ((), at_ten)]
    assert [model.config.data.image_size for model in models] == [32, 40]
    stored, sized = (patterns.named(registry.split(m.model)[1].params) for m in models)
    kernel = resize_patch_embedding(np.asarray(stored["embedding/kernel"]), 10)
    np.testing.assert_allclose(sized["embedding/kernel"], kernel, atol=1e-6)
    np.testing.assert_array_equal(sized["position"], stored["position"])  # both of 4 x 4
    with pytest.raises(ConfigError, match="patches of 7"):
        load_for_images(run[0], [("model.patch", "7")], "predict")


@pytest.mark.slow
def test_the_distance_to_the_teacher_is_reported_by_size(run, tmp_path):
    """A student that does not learn is its teacher in patches of the teacher's size, and another in larger ones."""
    config = run[1].copy_and_resolve_references()
    config.objective.update(dict(name="distill", kind="soft", alpha=1.0, teacher=str(run[0])))
    config.init_from, config.init_reset = str(run[0]), ()
    config.optim.lr, config.duration = 0.0, "1 step"
    result = vit_jax.train(config, tmp_path)
    apart = {size: result[f"patch_sizes/{size}/teacher_kl"] for size in (8, 16)}
    assert abs(apart[8]) < 1e-6 and apart[16] > 1e-4
