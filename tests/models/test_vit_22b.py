"""ViT-22B: its parallel blocks against NumPy, its parameters counted by hand, its layout on a mesh."""

import jax
import numpy as np
from flax import nnx

from vit_jax.base import patterns
from vit_jax.devices import meshes
from vit_jax.models import registry
from vit_jax.models.zoo.vit_zoo_blocks import make_block

OPTIONS = dict(parallel=True, qk_norm=True, qkv_bias=False, norm_bias=False)


def test_a_parallel_block_is_its_formula(kit):
    """x + attention(norm(x)) + mlp(norm(x)), queries and keys normed (ViT-22B §2), in float64."""
    config = kit.config(depth=1, **OPTIONS)
    parameters = jax.tree.map(lambda p: p[0], kit.parameters(config)["encoder"]["layers"])
    definition, _ = nnx.split(
        nnx.eval_shape(lambda: make_block(config, dtype=np.float32, rngs=nnx.Rngs(0)))
    )
    x = np.random.default_rng(0).standard_normal((2, 7, config.width)).astype(np.float32)
    out, _ = jax.jit(lambda p, x: nnx.merge(definition, p)(x, 0.0, None))(parameters, x)

    p = dict(zip(patterns.names(parameters), jax.tree.leaves(parameters), strict=True))
    p = {name: np.asarray(value, np.float64) for name, value in p.items()}
    assert not any(name.endswith("bias") and ("qkv" in name or "norm" in name) for name in p) and {
        "attention/out/bias",
        "mlp/up/bias",
        "mlp/down/bias",
    } < set(p)

    def norm(y, name):
        y = y - y.mean(-1, keepdims=True)
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * p[f"{name}/scale"]

    x = x.astype(np.float64)
    y = norm(x, "attention_norm")
    q, k, v = np.einsum("bnd,dthc->tbnhc", y, p["attention/qkv/kernel"])
    q, k = norm(q, "attention/query_norm"), norm(k, "attention/key_norm")
    weights = np.exp(np.einsum("bqhc,bnhc->bhqn", q, k) / np.sqrt(q.shape[-1]))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("bhqn,bnhc->bqhc", weights, v)
    attended = np.einsum("bqhc,hcd->bqd", heads, p["attention/out/kernel"])
    z = y @ p["mlp/up/kernel"] + p["mlp/up/bias"]
    z = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    expected = (
        x + attended + p["attention/out/bias"] + z @ p["mlp/down/kernel"] + p["mlp/down/bias"]
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_the_parameters_of_22b_are_counted_exactly():
    width, depth, hidden, heads, patches = 6144, 48, 24576, 48, 16**2
    attention = 4 * width**2 + width + 2 * width // heads  # QKV and output; scales of q and k
    mlp = 2 * width * hidden + hidden + width
    probe = width + 4 * width**2 + 4 * width + 2 * width + mlp
    total = (
        (14**2 * 3 + 1) * width + patches * width  # patch and position embedding
        + depth * (attention + mlp + width) + width  # one scale each block, one at the end
        + probe + (width + 1) * 1000
    )  # fmt: skip
    config = registry.model_config("ViT-22B/14")
    assert registry.count_parameters(config) == total
    assert round(depth * (4 * width**2 + 2 * width * hidden) / 1e9, 3) == 21.743  # as published


def test_22b_is_cut_over_fsdp_and_tensor():
    _, like = registry.abstract(registry.model_config("ViT-22B/14"))
    mesh = meshes.make_mesh({"data": 1, "fsdp": 4, "tensor": 2}, jax.devices()[:8])
    shardings = meshes.shardings(like, mesh, fsdp_min_size=2**16)
    parts = jax.tree.map(lambda x, s: np.prod(s.shard_shape(x.shape)), like, shardings)
    layers = parts["encoder"]["layers"]
    whole = like["encoder"]["layers"]
    for one, all_ in zip(
        jax.tree.leaves((layers["attention"]["qkv"], layers["mlp"]["up"]["kernel"])),
        jax.tree.leaves((whole["attention"]["qkv"], whole["mlp"]["up"]["kernel"])),
        strict=True,
    ):
        assert one * 8 == np.prod(all_.shape)
    assert (
        sum(jax.tree.leaves(parts))
        < 1.01 * registry.count_parameters(registry.model_config("ViT-22B/14")) / 8
    )
