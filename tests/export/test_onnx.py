"""Networks of every family, translated to ONNX, against ours."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.repeats import slow_unless
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.evaluation.forward import make_forward
from vit_jax.export import onnx, onnx_graph, onnx_rules, precision
from vit_jax.models import registry
from vit_jax.models.registry import Weights

DATA = dataclasses.replace(Data(), mean=(0.5, 0.4, 0.3), std=(0.3, 0.2, 0.1))


def network(name: str, size: int, dtype: str = "float32", **options):
    """A network with made-up weights that computes in a dtype: (function, weights)."""
    config = registry.model_config(name, num_classes=7, image_size=size, **options)
    config = dataclasses.replace(config, dtype=dtype)
    random = np.random.default_rng(0)

    def draw(like: jax.ShapeDtypeStruct) -> np.ndarray:
        centre = 1.0 if len(like.shape) < 2 else 0.0
        return (centre + 0.05 * random.standard_normal(like.shape)).astype(like.dtype)

    parameters, state = registry.abstract_weights(config)[1]
    state = jax.tree.map(lambda like: abs(draw(like)) + np.float32(0.5), state)
    weights = Weights(jax.tree.map(draw, parameters), state)
    forward = make_forward(registry.abstract(config)[0], config, DATA)
    return lambda weights, images: forward(weights, images).logits, weights


def check(function, weights, size: int, path, batch=None) -> None:
    batch = batch or jax.export.symbolic_shape("batch")[0]
    like = jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8)
    onnx.write(path, function, weights, like, {"outputs": {"logits": []}}, "float32")
    program = onnx.load_outputs(path)
    compiled = jax.jit(function)
    for count in (1, 3) if not isinstance(batch, int) else (batch,):
        images = np.random.default_rng(1).integers(0, 256, (count, size, size, 3), np.uint8)
        found, expected = program(images)[0], np.asarray(compiled(weights, images))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
        assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("batch", [None, 2])
def test_a_vit_is_translated_for_any_and_for_a_fixed_batch(tmp_path, batch):
    check(*network("ViT-mu/16", 32), 32, tmp_path / "m.onnx", batch)


@pytest.mark.parametrize("pool", slow_unless(["gem"], ["gem", "map", "mean"]))
def test_every_pooling_is_translated(tmp_path, pool):
    check(*network("ViT-mu/16", 32, pool=pool), 32, tmp_path / "m.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Mixer-S/16", 32), ("BiT-R26x1", 32), ("R+ViT-Ti/16", 32), ("DeepViT-16", 32), ("LocalViT-T", 32),
        ("CrossViT-9-dagger", 48), ("T2T-ViT-7", 32), ("T2T-ViT_t-14", 32), ("DVT-T2T-ViT-12", 224),
        ("FF-Ti/16", 32), ("EfficientNet-B0", 32), ("Axial-ViT-B/16", 32), ("AxialResNet-50", 32),
    ],
)  # fmt: skip
def test_every_family_is_translated(tmp_path, name, size):
    check(*network(name, size), size, tmp_path / "m.onnx")


def build(function, shape=(2, 3)):
    like = jax.ShapeDtypeStruct(shape, np.float32)
    store = functools.partial(onnx._stored, "float32")
    return onnx_graph.build(onnx_rules.RULES, function, like, ["answer"], store)


def test_a_primitive_without_a_rule_is_named():
    with pytest.raises(ConfigError, match="computes 'cumsum', for which there is no rule"):
        build(lambda x: jnp.cumsum(x, axis=0))


def test_what_depends_on_no_input_is_computed_once():
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    graph = build(lambda x: x + jnp.cumsum(jnp.exp(table), axis=1))
    assert [node.op_type for node in graph.node] == ["Add", "Identity"]
    assert len(graph.initializer) == 1


def test_int8_is_at_most_half_a_step_off():
    array = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    array[:, 3] = 0
    numbers, scale = precision.rounded_to_int8(array, {1})
    assert numbers.dtype == np.int8 and scale.shape == (1, 30)
    assert (abs(numbers * scale - array) <= scale / 2 * 1.0001).all()
