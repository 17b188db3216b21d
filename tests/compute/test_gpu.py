"""What GPUs compute their own way: on a CPU against the plain formulas, and lowered for CUDA. What XLA makes of it
is in `tests/planning`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.compute import (
    activations,
    attend,
    cudnn,
    dense,
    learned,
    norms,
    partitioning,
    recompute,
)
from vit_jax.compute import platform as platforms
from vit_jax.devices import gpus, meshes
from vit_jax.models import embeddings

TOKENS = 256 * 197  # of a batch of ViT-B/16 on a GPU


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(platforms, "current", lambda: "gpu")
    monkeypatch.setattr(platforms, "device_kind", lambda: "NVIDIA H100 80GB HBM3")


def lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def heads(tokens: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, tokens, 4, 64), jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_and_gradients_are_those_of_the_plain_formulas(monkeypatch, dtype):
    random = np.random.default_rng(0)
    shapes = (3, 7, 16), (16, 3, 4, 2), (3, 4, 2), (16,), (16,)
    x, *parameters = (jnp.asarray(random.normal(1, 1, shape), jnp.float32) for shape in shapes)

    def layers(x, kernel, bias, scale, shift):
        y = norms.layer_norm(x, scale, shift, epsilon=1e-6, dtype=x.dtype)
        y = norms.rms_norm(y, scale, epsilon=1e-6, dtype=x.dtype)
        q, k, v = attend.project(partitioning.in_rows(y), kernel, bias)
        return jnp.square(activations.ACTIVATIONS["gelu"](q + k * v).astype(jnp.float32)).mean()

    def results(platform, dtype):
        monkeypatch.setattr(platforms, "current", lambda: platform)
        mesh = meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
        with jax.set_mesh(mesh):
            value, gradients = jax.jit(lambda *given: jax.value_and_grad(layers, range(5))(*given))(
                x.astype(dtype), *parameters
            )
        return [np.asarray(array, np.float64) for array in (value, *gradients)]

    exact = results("tpu", "float32")  # by formulas that are neither CPUs' nor GPUs'
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for found, expected in zip(results("gpu", dtype), exact, strict=True):
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def test_gradients_of_biases_and_norms_are_summed_in_float32_over_all_tokens(on_gpus):
    dy = jnp.asarray(np.random.default_rng(0).normal(0.01, 1, (256, 197, 64)), jnp.bfloat16)
    exact = np.asarray(dy, np.float64).sum((0, 1))
    x, zeros = jnp.ones((256, 197, 4), jnp.bfloat16), jnp.zeros(64)

    def of_bias(dy):
        return jax.vjp(lambda bias: dense.dense(x, jnp.zeros((4, 64)), bias), zeros)[1](dy)[0]

    def of_shift(dy):
        tokens, how = dy, dict(epsilon=1e-6, dtype=jnp.bfloat16)
        return jax.vjp(lambda shift: norms.layer_norm(tokens, zeros, shift, **how), zeros)[1](dy)[0]

    for gradient in (of_bias, of_shift):
        found = np.asarray(jax.jit(gradient)(dy), np.float64)
        assert np.linalg.norm(found - exact) <= 1e-6 * np.linalg.norm(exact)


def test_gradients_of_positions_and_learned_tokens_are_rounded_once(on_gpus):
    dy = jnp.asarray(np.random.default_rng(0).normal(0.01, 1, (1024, 3, 64)), jnp.bfloat16)
    exact = np.asarray(dy, np.float64).sum(0)
    zeros = jnp.zeros((1, 1, 64))

    def gradient(dy):
        def place(token, table):
            token, table = token.astype(dy.dtype), table.astype(dy.dtype)
            x = jnp.zeros((1024, 2, 64), dy.dtype) + learned.per_example(table, 1024)
            return embeddings.prepend([token], x)

        token, table = jax.vjp(place, zeros, jnp.zeros((1, 2, 64)))[1](dy)
        return jnp.concatenate([token, table], axis=1)[0]

    found = np.asarray(jax.jit(gradient)(dy), np.float64)
    assert np.linalg.norm(found - exact) <= 2e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_kernels_are_added_over_devices_in_the_type_of_the_config(on_gpus, dtype):
    x, dy = (jax.ShapeDtypeStruct((2, 3, d), jnp.bfloat16) for d in (4, 5))

    def gradient(x, dy):
        with dense.gradients_in(dtype):
            return jax.vjp(lambda k: dense.dense(x, k, None), jnp.zeros((4, 5)))[1](dy)

    jaxpr = jax.make_jaxpr(gradient)(x, dy)
    products = re.findall(r":(\w+)\[4,5\] = dot_general", str(jaxpr))
    assert products == [{"float32": "f32", "bfloat16": "bf16"}[dtype]]
    assert jaxpr.out_avals[0].dtype == jnp.float32


@pytest.mark.parametrize("tokens", [196, 197, 256])
def test_cudnns_attention_is_not_padded_and_its_backward_pass_knows_the_lengths(on_gpus, tokens):
    q = heads(tokens)

    def loss(q, k, v):
        return attend.attend(q, k, v).astype(jnp.float32).sum()

    inference, training = lowered(loss, q, q, q), lowered(jax.grad(loss, (0, 1, 2)), q, q, q)
    calls = re.findall(r"custom_call @(__cudnn\S+?)\(", training)
    assert calls == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert "stablehlo.pad" not in inference + training
    masks = re.findall(r"mask_type\\22: \\22(\w+)", training)
    assert masks == ["NO_MASK", "NO_MASK" if tokens % cudnn.TILE == 0 else "PADDING"]
    assert "PADDING" not in inference


def test_cudnn_gets_how_many_keys_of_each_image_count(on_gpus):
    q, lengths = heads(256), jax.ShapeDtypeStruct((heads(256).shape[0],), jnp.int32)

    def loss(q, k, v, lengths):
        return attend.attend(q, k, v, lengths=lengths).astype(jnp.float32).sum()

    training = lowered(jax.grad(loss, (0, 1, 2)), q, q, q, lengths)
    assert re.findall(r"mask_type\\22: \\22(\w+)", training) == ["PADDING", "PADDING"]


def test_policies_store_what_cudnn_gives(on_gpus):
    def calls(remat):
        body = recompute.apply(attend.attend, remat, prevent_cse=True)
        loss = lambda *qkv: body(*qkv).astype(jnp.float32).sum()  # noqa: E731
        gradient = jax.value_and_grad(loss, (0, 1, 2))
        return lowered(gradient, *[heads(197)] * 3).count("custom_call @__cudnn$fmha")

    assert {remat: calls(remat) for remat in recompute.POLICIES} == {
        "none": 2, "save_products": 2, "save_attention": 2, "full": 3
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 64, "cudnn"),
        ("NVIDIA H100 80GB HBM3", 256, "cudnn"),
        ("NVIDIA GH200 480GB", 256, "cudnn"),
        ("NVIDIA H100 80GB HBM3", 264, "xla"),
        ("NVIDIA A100-SXM4-80GB", 128, "cudnn"),
        ("NVIDIA A100-SXM4-80GB", 256, "xla"),
        ("NVIDIA B200", 136, "xla"),
        ("Tesla T4", 64, "xla"),
        ("Tesla V100-SXM2-16GB", 64, "xla"),
        ("NVIDIA L40S", 64, "cudnn"),
        ("AMD Instinct MI300X", 64, "xla"),
    ],
)
def test_cudnn_is_chosen_for_heads_that_its_kernels_take(
    on_gpus, monkeypatch, kind, size, expected
):
    monkeypatch.setattr(platforms, "device_kind", lambda: kind)
    shape = dict(queries=197, keys=197, heads=12, head_size=size, dtype="bfloat16")
    assert attend.choose("auto", **shape) == expected


def test_what_is_recorded_is_what_attention_took(on_gpus):
    few, many = heads(65), heads(197)
    with attend.record() as kinds:
        jax.eval_shape(attend.attend, few, few, few)
        assert list(kinds) == ["xla"]
        jax.eval_shape(attend.attend, many, many, many)
    assert list(kinds) == ["xla", "cudnn"]


def test_deterministic_sets_flags_before_a_device_is_used():
    environment = {"XLA_FLAGS": "--xla_dump_to=/tmp"}
    assert not gpus.is_deterministic(environment)
    gpus.make_deterministic(environment, too_late=False)
    flags = "--xla_dump_to=/tmp --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
    assert environment == {"XLA_FLAGS": flags} and gpus.is_deterministic(environment)
    # Whoever set them before has what he wants.
    gpus.make_deterministic(environment, too_late=True)
    assert environment == {"XLA_FLAGS": flags}
    with pytest.raises(ConfigError, match="XLA_FLAGS='--xla_gpu_deterministic_ops=true"):
        gpus.make_deterministic({}, too_late=True)
    contrary = {"XLA_FLAGS": "--xla_gpu_autotune_level=4"}
    with pytest.raises(ConfigError, match="XLA_FLAGS have --xla_gpu_autotune_level=4"):
        gpus.make_deterministic(contrary, too_late=False)


def test_deterministic_takes_plain_attention_whose_kernels_xla_finds(on_gpus, monkeypatch):
    def trace(implementation):
        def loss(q):
            out = attend.attend(q, q, q, implementation=implementation)
            return out.astype(jnp.float32).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(heads(197)))

    assert "dot_product_attention" in trace("auto")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert "dot_product_attention" not in trace("auto")
    with pytest.raises(ConfigError, match="set attention to auto"):
        trace("cudnn")


def test_on_several_gpus_lengths_are_sharded_and_pinned_tokens_exchange_nothing(on_gpus):
    mesh = meshes.make_mesh({"data": 2, "fsdp": 1, "tensor": 2}, jax.devices()[:4])

    def loss(x):
        q = partitioning.in_rows(x).reshape(2, 197, 4, 64)
        return attend.attend(q, q, q).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((2, 197, 256), jnp.bfloat16)
        program = str(jax.make_jaxpr(jax.grad(loss))(x))
    assert re.search(r"i32\[2\]\S* = sharding_constraint", program)
    assert program.count("= layout_constraint") == 2 and "psum" not in program
