"""Attention's implementations against the formula in float64: results and gradients, any token count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compute.attention_reference import SHAPE, distances, draw, reference
from vit_jax.compute import attend
from vit_jax.compute import platform as platforms
from vit_jax.devices import meshes


def results(q, k, v, dout, dtype, **options):
    @jax.jit
    def both(q, k, v, dout):
        out, back = jax.vjp(lambda *qkv: attend.attend(*qkv, **options), q, k, v)
        return out, *back(dout)

    return both(*(jnp.asarray(x, dtype) for x in (q, k, v, dout)))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_results_and_gradients_are_those_of_the_formula(implementation, dtype, tolerance):
    # Splash is interpreted here; its 9 tokens are padded to 128, of which 119 must not be seen.
    given = draw()
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in given]
    found = results(*given, dtype, implementation=implementation)
    assert all(x.dtype == dtype for x in found)
    assert max(distances(found, reference(*rounded))) <= tolerance


@pytest.mark.parametrize(("implementation", "bound"), [("xla", 2.2e-3), ("splash", 3.1e-3)])
def test_heads_whose_root_is_no_power_of_two_have_the_temperature_of_others(implementation, bound):
    # 64 channels have 1.9e-3; √72 in bfloat16 is 8.5, and gave both of these 3.4e-3.
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in draw((2, 64, 2, 72))[:3]]
    found = attend.attend(*rounded, implementation=implementation)
    q, k, v = (np.asarray(x, np.float64) for x in rounded)
    assert max(distances([found], reference(q, k, v, v)[:1])) <= bound
    exact = np.einsum("bqhc,bnhc->bhqn", q, k) / np.sqrt(72)
    slope = (np.asarray(attend.logits(*rounded[:2]), np.float64) * exact).sum() / (exact**2).sum()
    assert abs(slope - 1) < 1e-6


def test_splash_takes_a_token_count_that_needs_no_padding():
    given = draw((1, 128, 1, 8))
    found = results(*given, "float32", implementation="splash")
    assert max(distances(found, reference(*given))) <= 1e-5


def test_splash_on_a_mesh_cuts_batch_and_heads():
    given = draw((4, 9, 2, 16))
    mesh = meshes.make_mesh({"data": 2, "fsdp": 1, "tensor": 2}, jax.devices()[:4])
    with jax.set_mesh(mesh):
        found = results(*given, "float32", implementation="splash")
    assert max(distances(found, reference(*given))) <= 1e-5


def test_logits_of_any_size_do_not_overflow():
    q, k, v, dout = draw()
    found = results(q * 1e4, k, v, dout, "float32", implementation="xla")
    assert all(np.isfinite(x).all() for x in found)


def test_the_backward_pass_of_plain_attention_stores_no_weights():
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in draw())
    _, back = jax.vjp(lambda *args: attend.attend(*args, implementation="xla"), q, k, v)
    assert not any(x.shape[-2:] == (SHAPE[1], SHAPE[1]) for x in jax.tree.leaves(back))


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_plain_attention_is_the_formula_on_every_platform(monkeypatch, platform, dtype, tolerance):
    monkeypatch.setattr(platforms, "current", lambda: platform)
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in draw()]
    found = results(*draw(), dtype, implementation="xla")
    assert all(x.dtype == dtype for x in found)
    assert max(distances(found, reference(*rounded))) <= tolerance
    q, k, v, _ = (jnp.asarray(x, dtype) for x in draw())
    weights = attend.weights(q, k)
    assert weights.shape == (2, 2, 9, 9) and weights.dtype == dtype
    assert max(distances([attend.weighted(weights, v)], reference(*rounded)[:1])) <= 2 * tolerance


# Of up to 8 queries or keys logits are stored.
@pytest.mark.parametrize(
    ("implementation", "count"), [("xla", 9), ("xla", 3), ("short", 9), ("splash", 9)]
)
def test_keys_beyond_an_images_length_have_weight_and_gradient_0(implementation, count):
    given, lengths = draw(), np.array([5, 9], np.int32)
    q, dout = (x[:, :count] for x in (given[0], given[3]))
    options = dict(lengths=jnp.asarray(lengths))
    kind = dict(implementation=implementation)
    out, dq, dk, dv = results(q, *given[1:3], dout, "float32", **kind, **options)
    weights = attend.weights(*(jnp.asarray(x, jnp.float32) for x in (q, given[1])), **options)
    for i, length in enumerate(lengths):
        one = [x[i : i + 1] for x in (q, given[1][:, :length], given[2][:, :length], dout)]
        found = [x[i : i + 1] for x in (out, dq, dk[:, :length], dv[:, :length])]
        assert max(distances(found, reference(*one))) <= 2e-6
        assert not np.any(dk[i, length:]) and not np.any(dv[i, length:])
        assert not np.any(weights[i, ..., length:])
    if implementation != "xla":
        return
    none = results(q, *given[1:3], dout, "float32", lengths=jnp.zeros(2, jnp.int32))
    assert all(np.isfinite(x).all() for x in none)


@pytest.mark.parametrize("images", [(), (2,)])
def test_a_bias_is_added_to_the_logits_and_has_a_gradient(images):
    q, k, v, dout = (jnp.asarray(x, jnp.float32) for x in draw())
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((*images, 2, 9, 9)), jnp.float32)
    out, back = jax.vjp(lambda *args: attend.attend(*args[:3], bias=args[3]), q, k, v, bias)
    *expected, dbias = reference(*draw(), bias)
    expected.append(dbias if images else dbias.sum(0))
    assert max(distances([out, *back(dout)], expected)) <= 1e-5
    weighted = attend.weighted(attend.weights(q, k, bias=bias), v)
    assert max(distances([weighted], expected[:1])) <= 1e-5
