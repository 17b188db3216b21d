"""Attention's implementations against the formula in float64: results and gradients, any token count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.compute import attend, choices, partitioning
from vit_jax.devices import meshes

SHAPE = (2, 9, 2, 16)  # batch, tokens, heads, head size


def draw(shape=SHAPE, seed=0):
    """Queries (scaled), keys, values and a gradient of the result."""
    rng = np.random.default_rng(seed)
    q, k, v, gradient = rng.standard_normal((4, *shape))
    return q / np.sqrt(shape[-1]) * 3, k, v, gradient


def reference(q, k, v, gradient):
    """softmax(q kᵀ) v and its gradients by the chain rule, in NumPy float64."""
    p = np.exp(np.einsum("bqhc,bnhc->bhqn", q, k))
    p /= p.sum(-1, keepdims=True)
    of_p = np.einsum("bqhc,bnhc->bhqn", gradient, v)
    of_logits = p * (of_p - (p * of_p).sum(-1, keepdims=True))
    return (
        np.einsum("bhqn,bnhc->bqhc", p, v),
        np.einsum("bhqn,bnhc->bqhc", of_logits, k),
        np.einsum("bhqn,bqhc->bnhc", of_logits, q),
        np.einsum("bhqn,bqhc->bnhc", p, gradient),
    )


def computed(implementation, q, k, v, gradient, dtype):
    @jax.jit
    def both(q, k, v, gradient):
        out, back = jax.vjp(lambda *args: attend.attend(*args, implementation), q, k, v)
        return out, *back(gradient)

    return both(*(jnp.asarray(x, dtype) for x in (q, k, v, gradient)))


def distances(results, expected):
    return [
        np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for a, b in zip(results, expected, strict=True)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_results_and_gradients_are_those_of_the_formula(implementation, dtype, tolerance):
    # Splash is interpreted here; its 9 tokens are padded to 128, of which 119 must not be seen.
    given = draw()
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in given]
    results = computed(implementation, *given, dtype)
    assert all(result.dtype == dtype for result in results)
    assert max(distances(results, reference(*rounded))) <= tolerance


def test_splash_takes_a_token_count_that_needs_no_padding():
    given = draw((1, 128, 1, 8))
    results = computed("splash", *given, "float32")
    assert max(distances(results, reference(*given))) <= 1e-5


def test_splash_on_a_mesh_cuts_batch_and_heads():
    given = draw((4, 9, 2, 16))
    mesh = meshes.make_mesh({"data": 2, "fsdp": 1, "tensor": 2}, jax.devices()[:4])
    with jax.set_mesh(mesh):
        results = computed("splash", *given, "float32")
    assert max(distances(results, reference(*given))) <= 1e-5


def test_logits_of_any_size_do_not_overflow():
    q, k, v, gradient = draw()
    results = computed("xla", q * 1e4, k, v, gradient, "float32")
    assert all(np.isfinite(result).all() for result in results)


def test_the_backward_pass_of_plain_attention_stores_no_weights():
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in draw())
    _, back = jax.vjp(lambda *args: attend.attend(*args, "xla"), q, k, v)
    tokens = SHAPE[1]
    assert not any(x.shape[-2:] == (tokens, tokens) for x in jax.tree.leaves(back))


def test_cudnn_is_lowered_to_its_fused_kernels_forward_and_backward(monkeypatch):
    # Which version is installed is asked while tracing; without a GPU there is none.
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    q = jax.ShapeDtypeStruct((2, 577, 4, 64), jnp.bfloat16)

    def loss(q, k, v):
        return attend.attend(q, k, v, "cudnn").astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss)).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text


def chosen(platform, monkeypatch, **options):
    monkeypatch.setattr(partitioning, "platform", lambda: platform)
    given = dict(tokens=197, head_size=64, dtype="bfloat16") | options
    return choices.attention(given.pop("asked", "auto"), **given)


def test_the_implementation_is_chosen_by_device_type_and_shape(monkeypatch):
    assert chosen("cpu", monkeypatch, tokens=4096) == "xla"
    assert chosen("gpu", monkeypatch) == "xla"
    assert chosen("gpu", monkeypatch, tokens=577) == "cudnn"
    assert chosen("gpu", monkeypatch, tokens=577, dtype="float32") == "xla"
    assert chosen("gpu", monkeypatch, tokens=577, head_size=36) == "xla"
    assert chosen("tpu", monkeypatch, tokens=577) == "xla"
    assert chosen("tpu", monkeypatch, tokens=4097) == "splash"
    assert chosen("cpu", monkeypatch, asked="splash") == "splash"


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("cuts", [[], [8], [3, 4]])
def test_tokens_in_parts_attend_as_a_whole(monkeypatch, platform, dtype, tolerance, cuts):
    monkeypatch.setattr(partitioning, "platform", lambda: platform)
    given = draw()
    q, k, v, gradient = (jnp.split(jnp.asarray(x, dtype), cuts, axis=1) for x in given)
    out, back = jax.vjp(attend.attend_in_parts, tuple(q), tuple(k), tuple(v))
    results = [np.concatenate(parts, axis=1) for parts in (out, *back(tuple(gradient)))]
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in given]
    assert all(result.dtype == dtype for result in results)
    assert max(distances(results, reference(*rounded))) <= tolerance


def test_on_tpus_tokens_that_begin_another_tile_are_a_part_of_their_own(monkeypatch):
    assert choices.cuts("auto", tokens=257) == []
    monkeypatch.setattr(partitioning, "platform", lambda: "tpu")
    assert choices.cuts("auto", tokens=257) == [256]
    assert choices.cuts("xla", tokens=261) == [256]
    assert choices.cuts("splash", tokens=257) == []
    for tokens in (5, 128, 197, 256, 2049):
        assert choices.cuts("auto", tokens=tokens) == []
