"""Pooling against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import pooling

TOKENS = np.random.default_rng(0).standard_normal((3, 6, 8)).astype(np.float32)


def test_the_class_token_is_the_first():
    np.testing.assert_array_equal(pooling.token(TOKENS), TOKENS[:, 0])


def test_mean_is_over_tokens():
    np.testing.assert_allclose(pooling.mean(TOKENS), TOKENS.astype(np.float64).mean(1), atol=1e-6)


def test_the_mean_of_bfloat16_tokens_is_summed_in_float32():
    # 2048 ones and as many threes: a bfloat16 sum would stop growing at 256 and at 512.
    tokens = jnp.asarray(np.repeat([1, 3], 2048)[None, :, None], jnp.bfloat16)
    assert float(pooling.mean(tokens)[0, 0]) == 2


def test_attention_pooling_is_its_formula():
    """x = attention(probe, tokens); x + mlp(norm(x)) (Scaling ViT §3.2; facts: big_vision's
    MAPHead).
    """
    options = dict(epsilon=1e-6, activation="gelu_tanh", dtype=jnp.float32)
    definition, state = nnx.split(
        nnx.eval_shape(lambda: pooling.AttentionPooling(8, 2, 16, **options, rngs=nnx.Rngs(0)))
    )
    rng = np.random.default_rng(1)
    state = jax.tree.map(
        lambda p: rng.normal(0.1, 0.5, p.shape).astype(np.float32), nnx.to_pure_dict(state)
    )
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), state)

    qkv, bias = p["attention"]["qkv"]["kernel"], p["attention"]["qkv"]["bias"]
    q = np.einsum("d,dhc->hc", p["probe"][0, 0], qkv[:, 0]) + bias[0]
    k, v = (np.einsum("bnd,dhc->bnhc", TOKENS, qkv[:, i]) + bias[i] for i in (1, 2))
    weights = np.exp(np.einsum("hc,bnhc->bhn", q, k) / np.sqrt(4))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("bhn,bnhc->bhc", weights, v)
    x = (
        np.einsum("bhc,hcd->bd", heads, p["attention"]["out"]["kernel"])
        + p["attention"]["out"]["bias"]
    )
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    y = (y * p["norm"]["scale"] + p["norm"]["bias"]) @ p["mlp"]["up"]["kernel"] + p["mlp"]["up"][
        "bias"
    ]
    y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    expected = x + y @ p["mlp"]["down"]["kernel"] + p["mlp"]["down"]["bias"]

    pooled = jax.jit(lambda state, tokens: nnx.merge(definition, state)(tokens))(state, TOKENS)
    assert pooled.shape == (3, 8)
    np.testing.assert_allclose(pooled, expected, atol=1e-5)
