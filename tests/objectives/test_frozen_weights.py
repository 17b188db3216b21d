"""The types in which the weights of fixed teachers are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.conftest import parameters
from vit_jax.base import patterns
from vit_jax.compute import choices
from vit_jax.config import default_config
from vit_jax.devices import meshes
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.objectives import frozen_weights
from vit_jax.objectives.networks import fixed_teacher
from vit_jax.training import initial_weights
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.gradient import make_gradient

BFLOAT16 = jnp.dtype("bfloat16")


@pytest.fixture(autouse=True)
def in_bfloat16(monkeypatch):
    """Computing in bfloat16 on any CPU."""
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: True)


@pytest.fixture
def assembly(tmp_path):
    """Of a run in bfloat16 with a ViT as its teacher."""
    model = registry.model_config(
        name="ViT-mu/8", width=32, heads=2, depth=2, num_classes=0, image_size=16
    )
    path = str(tmp_path / "teacher.npz")
    seen = Preprocessing(16)
    checkpoint = formats.LoadedCheckpoint(model, parameters(model), preprocessing=seen)
    formats.write_checkpoint(checkpoint, path, "official")
    config = default_config()
    config.data.image_size, config.batch_size, config.duration = 16, 4, "2 steps"
    config.model.update(dict(name="ViT-mu/8", width=16, depth=1, dtype="bfloat16"))
    config.objective.update(dict(name="features", teachers=(path,), hidden=8))
    config.optim.warmup = "0 steps"
    return assemble(resolve(config), num_classes=10, examples_per_epoch=64)


def both_kinds(assembly):
    """The teacher's weights and digest as they are kept, and as they are in its file."""
    teacher, whole = (
        assembly.networks.teachers[0],
        meshes.replicated(jax.make_mesh((1,), ("data",))),
    )
    (kept,) = assembly.networks.abstract_teachers()
    exact = registry.abstract_weights(teacher.config)[1]
    return [
        initial_weights.teacher_weights(
            teacher,
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), like),
        )
        for like in (kept, exact)
    ]


def test_what_a_teacher_rounds_first_is_kept_rounded_and_gives_the_same_bits(assembly):
    (kept, digest), (exact, digest_of_file) = both_kinds(assembly)
    types = {name: x.dtype for name, x in patterns.named(kept.params).items()}
    for name in (
        "attention/qkv/kernel",
        "attention/out/kernel",
        "mlp/up/kernel",
        "mlp/down/kernel",
    ):
        assert types[f"encoder/layers/{name}"] == BFLOAT16
    assert types["embedding/kernel"] == BFLOAT16
    assert {kind for name, kind in types.items() if "norm" in name} == {jnp.dtype("float32")}
    assert digest == digest_of_file  # A run that kept it in float32 resumes.

    @jax.jit
    def features(weights, images):
        teacher = fixed_teacher(assembly.networks.for_devices().teachers[0], weights)
        return teacher.model(teacher.prepare_inputs(images)).tokens

    images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 16, 3)), jnp.float32)
    np.testing.assert_array_equal(*(features(weights, images) for weights in (kept, exact)))


@pytest.mark.slow
def test_a_step_has_the_same_loss_and_gradient_to_the_bit(assembly):
    state = jax.jit(assembly.init)(jax.random.key(0))
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), np.uint8)
    gradient = jax.jit(make_gradient(assembly.networks, assembly.learning_rate, assembly.config))
    results = [
        gradient(state.replace(frozen_teachers=(weights,)), {"image": jnp.asarray(images)})
        for weights, _ in both_kinds(assembly)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_weights_that_are_used_before_they_are_rounded_stay_exact():
    def layer(x, weights):
        kernel, bias, scale = weights
        x = jnp.float32(x) * scale
        return x.astype(BFLOAT16) @ kernel.astype(BFLOAT16) + bias[:2].astype(BFLOAT16), None

    def network(stacked, both, given, x):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, stacked)
        x += both.astype(BFLOAT16) * jnp.sum(both)
        return x, given.reshape(2)

    kernel, bias, scale = jnp.ones((3, 2, 2)), jnp.ones((3, 4)), jnp.ones((3, 2))
    arrays = (kernel, bias, scale), jnp.ones(2), jnp.ones((1, 2)), jnp.ones((5, 2), BFLOAT16)
    program = jax.make_jaxpr(network)(*arrays).jaxpr
    exact = frozen_weights._exact_inputs(program, BFLOAT16)
    assert exact == [False, False, True, True, True, True]
