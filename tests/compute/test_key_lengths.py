"""Kernels of TPUs, interpreted, where only leading keys of each image count: against the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compute.attention_reference import distances, draw, reference
from vit_jax.compute import splash, tpu_attention, tpu_attention_grid
from vit_jax.devices import meshes

KERNELS = {"short": tpu_attention.attend, "splash": splash.splash}


def given(shape):
    """Logits of about 1."""
    q, *others = draw(shape)
    return q / 3, *others


def errors(kernel, q, k, v, dout, lengths):
    """Of the result and the gradients; those of keys that do not count are 0."""
    scale = q.shape[-1] ** -0.5 if kernel == "splash" else 1

    @jax.jit
    def both(q, k, v, dout):
        out, back = jax.vjp(lambda *qkv: KERNELS[kernel](*qkv, jnp.asarray(lengths)), q, k, v)
        return out, *back(dout)

    out, dq, dk, dv = both(*(jnp.asarray(x, jnp.float32) for x in (scale * q, k, v, dout)))
    counts = np.arange(q.shape[1]) < np.asarray(lengths)[:, None]
    assert not np.asarray(dk)[~counts].any() and not np.asarray(dv)[~counts].any()
    *expected, _ = reference(q, k, v, dout, np.where(counts, 0, -np.inf)[:, None, None])
    return max(distances((out, scale * dq, dk, dv), expected))


@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [
        ("short", 37),
        *(pytest.param("short", n, marks=pytest.mark.slow) for n in (197, 576, 1024)),
        pytest.param("splash", 520, marks=pytest.mark.slow),
    ],
)
def test_only_leading_keys_count(kernel, tokens):
    lengths = [tokens, tokens // 3, tokens // 9]
    assert errors(kernel, *given((3, tokens, 2, 64)), lengths) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 80, 128])
def test_only_leading_keys_count_for_heads_of_any_width(size):
    assert errors("short", *given((2, 50, 2, size)), [50, 9]) <= 1e-6


@pytest.mark.slow
def test_only_leading_keys_count_for_several_blocks_of_queries(monkeypatch):
    monkeypatch.setattr(tpu_attention_grid, "MOST_UNROLLED", 1)
    assert errors("short", *given((2, 300, 2, 64)), [17, 290]) <= 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mesh_shards_lengths_as_it_does_images(kernel):
    mesh = meshes.make_mesh({"data": 2, "fsdp": 1, "tensor": 2}, jax.devices()[:4])
    with jax.set_mesh(mesh):
        assert errors(kernel, *given((4, 50, 2, 64)), [50, 3, 20, 1]) <= 1e-6


def test_packed_projections_take_lengths_and_do_not_see_what_lies_behind():
    q, k, v, dout = (jnp.asarray(x, jnp.float32) for x in given((2, 50, 2, 64)))
    lengths = jnp.asarray([50, 21])

    @jax.jit
    def both(q, k, v):
        def packed(q, k, v):
            flat = jnp.concatenate([x.reshape(2, 50, -1) for x in (q, k, v)], axis=-1)
            out = tpu_attention.attend_packed(flat, jnp.zeros(384), 64, lengths)
            return out.reshape(q.shape)

        out, back = jax.vjp(packed, q, k, v)
        return out, *back(dout)

    ours, other = both(q, k, v), both(q, k.at[1, 21:].mul(-1e4), v.at[1, 21:].add(1e4))
    counts = np.arange(50) < np.asarray(lengths)[:, None]
    *expected, _ = reference(q, k, v, dout, np.where(counts, 0, -np.inf)[:, None, None])
    assert max(distances(ours, expected)) <= 1e-6
    for one, same in zip(ours, other, strict=True):
        np.testing.assert_array_equal(one, same)
