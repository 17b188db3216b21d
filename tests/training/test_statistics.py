"""Running statistics of batch norms in training: over meshes, parts of a batch, averages, bad steps, and
when the loss of held-out examples is measured.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.new_models import drawn
from tests.training.test_step import MESHES, make_batches, make_config, run
from vit_jax.base import schema
from vit_jax.config import config_class
from vit_jax.data.augmentation.augment import normalize
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel
from vit_jax.evaluation.loss import Loss
from vit_jax.models import registry
from vit_jax.training.assembly import assemble, resolve


def deepvit(**overrides):
    config = make_config(**{"augment.mixup": 0.0, "augment.flip": False} | overrides)
    config.model.update({"name": "DeepViT-16", "depth": None, "patch": 8, "stages": (1, 1)})
    config.model.update({"width": 16, "mlp_dim": 32})
    return config


def assert_close(found, expected, tolerance=1e-5):
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_parts_of_a_batch_over_a_mesh_move_them_the_average_follows_and_bad_steps_leave_them():
    config = deepvit(accumulate=2, nonfinite="skip", **{"model.unroll": 1})
    first, state, _, step = run(config, MESHES["mixed"], steps=1)
    assembly = assemble(resolve(config), num_classes=10, examples_per_epoch=160)
    definition, began = registry.abstract(assembly.model_config)[0], new_statistics(assembly)
    (batch,) = make_batches(1)

    @jax.jit
    def both_parts(images):
        model = nnx.merge(definition, first, began)
        for part in (images[0::2], images[1::2]):
            model(part, deterministic=False)
        return registry.split(model)[1].variables

    expected = both_parts(normalize(batch["image"], config.data.mean, config.data.std, np.float32))
    assert (
        np.abs(expected["stages"]["2"]["layers"]["attention"]["theta"]["norm"]["mean"]).max() > 0.01
    )
    found = jax.device_get(state.variables)
    assert_close(found["model"], expected)
    # The average's decay begins at 0.1.
    assert_close(found["ema"], jax.tree.map(lambda a, b: 0.1 * a + 0.9 * b, began, expected))

    broken = jax.tree.map(lambda x: x * np.nan, state.params["head"])
    batch = jax.device_put(batch, meshes.batch_sharding(meshes.make_mesh(MESHES["mixed"])))
    after, _ = step(state.replace(params=state.params | {"head": broken}), batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.variables), found)


def new_statistics(assembly):
    model = drawn(lambda: registry.build(assembly.model_config, rngs=nnx.Rngs(0)))
    return registry.split(model)[1].variables


def test_the_loss_of_held_out_examples_is_by_the_averaged_ones_whatever_the_batch():
    config = deepvit()
    config.data.name, config.data.eval_crop, config.data.eval_split = (
        "digits",
        "resize",
        "test[:12]",
    )
    assembly = assemble(resolve(config), num_classes=10, examples_per_epoch=160)
    mesh = meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
    with jax.set_mesh(mesh):
        state = jax.jit(assembly.init)(jax.random.key(0))
        state.variables["model"] = jax.tree.map(lambda x: x + 5, state.variables["model"])
        losses = []
        for batch_size in (12, 8):
            typed = dataclasses.replace(schema.typed(config_class(), config), batch_size=batch_size)
            context = EvalContext(
                typed, assembly.model_config, assembly.definition, (), networks=assembly.networks
            )
            evaluator = Loss(Loss.Options(), context)
            losses.append(evaluator(EvaluatedModel(state.weights(), state), mesh)["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
