"""Logits of distances against loops over pairs of tokens, and attention that adds them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.compute import attend, relative

HEADS, SIZE = 2, 4


def draw(patches, others):
    rng = np.random.default_rng(patches)
    shape = (3, others + patches, HEADS, SIZE)
    return rng.standard_normal((2 * patches - 1, SIZE)), rng.standard_normal((4, *shape))


def loops(table, q, others):
    """(B, H, T, T): row p_q - p_k + N - 1 of the table, for patches."""
    b, tokens, heads, _ = q.shape
    patches = tokens - others
    found = np.zeros((b, heads, tokens, tokens))
    for i, j in itertools.product(range(patches), repeat=2):
        found[:, :, others + i, others + j] = q[:, others + i] @ table[i - j + patches - 1]
    return found


@pytest.mark.parametrize(("patches", "others"), [(5, 0), (4, 1), (3, 4), (1, 1), (1, 0)])
def test_every_pair_of_patches_meets_the_embedding_of_its_distance(patches, others):
    table, (q, *_) = draw(patches, others)
    found = relative.logits(jnp.asarray(table, jnp.float32), jnp.asarray(q, jnp.float32))
    np.testing.assert_allclose(found, loops(table, q, others), atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_attention_and_its_gradients_are_those_of_the_formula(dtype, tolerance):
    table, (q, k, v, dout) = draw(6, 1)
    given = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in (q, k, v, dout)]
    q, k, v, dout = given

    @jax.jit
    def both(table, q, k, v, dout):
        def function(t, *qkv):
            return attend.attend(*qkv, bias=jax.tree_util.Partial(relative.logits, t))

        out, back = jax.vjp(function, table, q, k, v)
        return out, *back(dout)

    arrays = [jnp.asarray(x, dtype) for x in given]
    found = both(jnp.asarray(table, jnp.float32), *arrays)
    weights = attend.weights(
        *arrays[:2], bias=jax.tree_util.Partial(relative.logits, jnp.asarray(table, jnp.float32))
    )

    scaled = q / np.sqrt(SIZE)
    p = np.exp(np.einsum("bqhc,bnhc->bhqn", scaled, k) + loops(table, scaled, 1))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bqhc,bnhc->bhqn", dout, v)
    dlogits = p * (dp - (p * dp).sum(-1, keepdims=True))
    dtable, dq = np.zeros_like(table), np.einsum("bhqn,bnhc->bqhc", dlogits, k)
    for i, j in itertools.product(range(6), repeat=2):
        of_pair = dlogits[:, :, 1 + i, 1 + j, None]
        dtable[i - j + 5] += (of_pair * scaled[:, 1 + i]).sum((0, 1))
        dq[:, 1 + i] += of_pair * table[i - j + 5]
    expected = (
        np.einsum("bhqn,bnhc->bqhc", p, v), dtable, dq / np.sqrt(SIZE),
        np.einsum("bhqn,bqhc->bnhc", dlogits, scaled), np.einsum("bhqn,bqhc->bnhc", p, dout),
    )  # fmt: skip
    for one, other in zip((*found, weights), (*expected, p), strict=True):
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


def test_the_backward_pass_stores_the_table_and_no_logits():
    def stored(bias):
        q = jax.ShapeDtypeStruct((8, 33, HEADS, SIZE), jnp.float32)
        table = jax.ShapeDtypeStruct((63, SIZE), jnp.float32)
        _, back = jax.eval_shape(
            lambda q, t: jax.vjp(lambda q, t: attend.attend(q, q, q, bias=bias(t, q)), q, t),
            q, table,
        )  # fmt: skip
        return sum(x.size for x in jax.tree.leaves(back))

    pairs = 8 * HEADS * 33 * 33
    assert (
        stored(lambda t, q: jax.tree_util.Partial(relative.logits, t))
        < pairs
        <= stored(lambda t, q: relative.logits(t, q))
    )
