"""Attention against its formula in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.base import patterns
from vit_jax.compute import attend
from vit_jax.compute import platform as platforms
from vit_jax.models.attention import Attention
from vit_jax.models.layers import layer_norm
from vit_jax.models.zoo.vit_zoo_blocks import PublishedAttention

WIDTH, HEADS = 12, 3
SIZE = WIDTH // HEADS


def attention(kind=Attention, **options) -> Attention:
    """A layer whose parameters are all away from their initial values."""

    def layer():
        return kind(WIDTH, HEADS, **{"dtype": jnp.float32, "rngs": nnx.Rngs(0)} | options)

    rng = np.random.default_rng(0)
    definition, state = nnx.split(nnx.eval_shape(layer))
    state = jax.tree.map(
        lambda p: rng.normal(0.1, 0.5, p.shape).astype(np.float32), nnx.to_pure_dict(state)
    )
    return nnx.merge(definition, state)


def run(layer: Attention, x, **options):
    """The layer, compiled."""
    definition, state = nnx.split(layer)
    return jax.jit(lambda state, x, options: nnx.merge(definition, state)(x, **options))(
        state, x, options
    )


def reference(
    layer: Attention, queries: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(q kᵀ / sqrt(D/H)) v, head by head (ViT Eq. 5 to 8), float64."""
    p = dict(
        zip(
            patterns.names(state := nnx.to_pure_dict(nnx.state(layer))),
            jax.tree.leaves(state),
            strict=True,
        )
    )
    p = {name: np.asarray(value, np.float64) for name, value in p.items()}

    def project(inputs, which, head):
        return inputs @ p["qkv/kernel"][:, which, head] + p["qkv/bias"][which, head]

    def norm(y, name):
        if f"{name}/scale" not in p:
            return y
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
        return y * p[f"{name}/scale"] + p[f"{name}/bias"]

    out, weights = p["out/bias"], []
    for head in range(HEADS):
        q, k = norm(project(queries, 0, head), "query_norm"), norm(project(x, 1, head), "key_norm")
        logits = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(SIZE))
        weights.append(logits / logits.sum(-1, keepdims=True))
        out = out + weights[-1] @ project(x, 2, head) @ p["out/kernel"][head]
    return out, np.stack(weights, axis=1)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).standard_normal((2, 7, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_self_attention_is_its_formula(tokens, qk_norm):
    norm = lambda width: layer_norm(width, 1e-6, jnp.float32, nnx.Rngs(0))  # noqa: E731
    layer = attention(PublishedAttention, norm=norm, qk_norm=True) if qk_norm else attention()
    expected, expected_weights = reference(layer, tokens, tokens)
    out, weights = run(layer, tokens)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-6)


def test_a_tpu_computes_the_same_by_other_products(tokens, monkeypatch):
    layer = attention()
    expected, _ = reference(layer, tokens, tokens)
    monkeypatch.setattr(platforms, "current", lambda: "tpu")
    np.testing.assert_allclose(run(layer, tokens)[0], expected, atol=3e-6)


def test_queries_from_elsewhere_attend_to_the_tokens(tokens):
    layer, queries = (
        attention(),
        np.random.default_rng(2).standard_normal((2, 3, WIDTH)).astype(np.float32),
    )
    expected, expected_weights = reference(layer, queries, tokens)
    out, weights = run(layer, tokens, queries=queries)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    np.testing.assert_allclose(weights, expected_weights, atol=1e-6)


class Biased(Attention):
    """Every head sees the token before, and itself."""

    def attend(self, q, k, v, *, key):
        tokens = q.shape[1]
        seen = np.eye(tokens, dtype=bool) | np.eye(tokens, k=-1, dtype=bool)
        bias = jnp.broadcast_to(jnp.where(seen, 0.0, -1e9), (HEADS, tokens, tokens))
        return super().attend(q, k, v, key=key, bias=bias)


class HeadsMixed(Attention):
    """Every head weighs the values by the mean of all heads' weights."""

    def attend(self, q, k, v, *, key):
        weights = attend.weights(q, k)
        weights = jnp.broadcast_to(weights.mean(1, keepdims=True), weights.shape)
        return attend.weighted(weights, v), weights


class Turned(Attention):
    """Queries and keys in another order of their dimensions, which changes no product."""

    def project(self, x, queries):
        q, k, v = super().project(x, queries)
        return q[..., ::-1], k[..., ::-1], v


def test_a_layer_built_on_attention_adds_to_the_logits(tokens):
    _, weights = run(attention(Biased), tokens)
    assert not np.triu(weights, 1).any() and not np.tril(weights, -2).any()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_a_layer_built_on_attention_changes_the_weights(tokens):
    layer = attention(HeadsMixed)
    _, plain = reference(layer, tokens, tokens)
    _, mixed = run(layer, tokens)
    np.testing.assert_allclose(mixed, np.stack([plain.mean(1)] * HEADS, 1), atol=1e-6)


def test_a_layer_built_on_attention_projects_in_its_own_way(tokens):
    layer = attention(Turned)
    np.testing.assert_allclose(
        run(layer, tokens)[0], reference(layer, tokens, tokens)[0], atol=3e-6
    )


def test_the_softmax_of_a_bfloat16_layer_is_taken_in_float32(tokens):
    layer = attention(dtype=jnp.bfloat16)
    program = jax.make_jaxpr(lambda x: layer(x))(jnp.asarray(tokens, jnp.bfloat16))
    assert "f32[2,3,7,7] = exp" in str(program) and "bf16[2,3,7,7] = exp" not in str(program)
    assert [result.dtype for result in program.out_avals] == [jnp.bfloat16, jnp.bfloat16]


def test_huge_logits_do_not_overflow(tokens):
    out, weights = run(attention(), tokens * 1e4)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_attention_dropout_zeroes_weights_and_scales_the_others(tokens):
    layer = attention(attention_dropout=0.5)
    # With all values the same, the output tells the sum of the weights that were kept: on average
    # 1.
    layer.qkv.kernel[...][:, 2], layer.qkv.bias[...][2] = 0, 1
    layer.out.kernel[...][:], layer.out.bias[...][:] = 1 / WIDTH, 0
    kept = np.asarray(run(layer, np.repeat(tokens, 500, axis=0), key=jax.random.key(0))[0])
    assert abs(kept.mean() - 1) < 0.02 and kept.std() > 0.1


def test_the_joint_kernel_is_drawn_as_three_separate_ones_would_be():
    layer = Attention(256, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    limit = np.sqrt(6 / (256 + 256))
    for kernel in (*np.moveaxis(np.asarray(layer.qkv.kernel), 1, 0), np.asarray(layer.out.kernel)):
        assert 0.99 * limit < np.abs(kernel).max() <= limit
        assert abs(kernel.std() / np.sqrt(2 / (256 + 256)) - 1) < 0.01
    assert not np.any(layer.qkv.bias) and not np.any(layer.out.bias)


def test_heads_that_do_not_divide_the_width_are_an_error():
    with pytest.raises(ValueError, match="width 12 cannot be split into 5 heads"):
        Attention(12, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))
