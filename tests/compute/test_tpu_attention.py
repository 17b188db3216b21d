"""The kernels for short sequences, interpreted: results and gradients against the formula in float64, and
against plain attention in whole layers.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.compute.attention_reference import distances, draw, exactness, reference
from tests.repeats import slow_unless
from vit_jax.compute import attend, rope, tpu_attention, tpu_attention_grid
from vit_jax.devices import meshes
from vit_jax.models.layers import layer_norm
from vit_jax.models.zoo.vit_zoo_blocks import PublishedAttention
from vit_jax.planning import target

# 37 and 49 are those of small crops, 1,370 of 518 px in patches of 14, 1,601 of 640 in patches of 16, 2,309 of 768 with
# four registers.
COUNTS = (8, 37, 49, 50, 196, 197, 257, 577, 1370, 1601, 2116, 2304)
SIZES = (16, 32, 40, 64, 72, 80, 88, 96, 104, 128)
# Most sizes and counts once; all pairs are slow.
QUICK = ((8, 40), (37, 64), (49, 16), (50, 32), (50, 64), (196, 80), (197, 64), (197, 88), (257, 72), (257, 104),
         (577, 128))  # fmt: skip
GRID = [
    pair if pair in QUICK else pytest.param(pair, marks=pytest.mark.slow)
    for pair in [*itertools.product(COUNTS, SIZES), (2309, 64)]
]


@jax.jit
def forward_and_backward(q, k, v, dout):
    out, back = jax.vjp(functools.partial(attend.attend, implementation="short"), q, k, v)
    return out, *back(dout)


def results(*arrays, dtype="float32"):
    return forward_and_backward(*(jnp.asarray(x, dtype) for x in arrays))


@pytest.mark.parametrize("pair", GRID, ids=lambda pair: "{} tokens, heads of {}".format(*pair))
def test_results_and_gradients_are_those_of_the_formula(pair):
    tokens, size = pair
    # Six heads of 32 are a tile and half of another.
    given = draw((1, tokens, 6 if size == 32 else 2, size))
    assert max(distances(results(*given), reference(*given))) <= exactness(*given)


@pytest.mark.parametrize("size", [32, 64, 80])
def test_bfloat16_is_as_exact_as_plain_attention(size):
    given = draw((2, 197, 3, size))
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in given]
    found = results(*given, dtype="bfloat16")
    assert all(x.dtype == jnp.bfloat16 for x in found)
    # Rounded are the weights, or the gradient of the logits, and the result: each to 8 bits.
    assert max(distances(found, reference(*rounded))) <= 2 * 2**-8


def test_heads_of_several_programs_are_those_of_the_formula(monkeypatch):
    # Groups of two heads of 64 fill a tile: three programs an image.
    monkeypatch.setattr(tpu_attention_grid, "UNROLLED", 1)
    given = draw((2, 50, 6, 64))
    assert max(distances(results(*given), reference(*given))) <= exactness(*given)


@pytest.mark.parametrize("tokens", [256, 300])
def test_queries_of_several_programs_are_those_of_the_formula(tokens, monkeypatch):
    # Blocks of 128 queries; the third of 300 has 44, and whatever lies behind them.
    monkeypatch.setattr(tpu_attention_grid, "MOST_UNROLLED", 1)
    given = draw((2, tokens, 2, 64))
    assert max(distances(results(*given), reference(*given))) <= exactness(*given)


@pytest.mark.parametrize(
    ("kind", "tokens", "heads", "size", "split"),
    [
        ("TPU v5 lite", 197, 12, 64, (12, 197)),
        ("TPU v5 lite", 577, 12, 64, (2, 577)),
        ("TPU v5 lite", 1370, 12, 64, (2, 1370)),
        ("TPU v5 lite", 1370, 16, 80, (8, 256)),
        ("TPU v5 lite", 2304, 12, 64, (2, 768)),
        ("TPU v5 lite", 2309, 16, 64, (2, 640)),
        ("TPU v5 lite", 2309, 16, 80, None),
        ("TPU v5 lite", 2304, 16, 104, (16, 128)),
        ("TPU v6 lite", 201, 32, 128, (32, 201)),
        ("TPU v5", 201, 32, 128, (32, 128)),
        ("TPU v4", 201, 32, 128, (8, 201)),
        ("TPU v4", 1370, 12, 64, (2, 384)),
        ("TPU v4", 1370, 16, 104, None),
        ("TPU v5", 1370, 16, 104, (16, 128)),  # keys buffered once
        ("TPU v3", 197, 12, 64, None),
    ],
)  # fmt: skip
def test_a_program_has_what_fits_the_fast_memory_and_little_code(
    kind, tokens, heads, size, split, monkeypatch
):
    monkeypatch.setattr(tpu_attention_grid.platform, "device_kind", lambda: kind)
    assert tpu_attention_grid.program_shape(tokens, heads, size, jnp.bfloat16) == split
    assert tpu_attention.fits(tokens, heads, size, jnp.bfloat16) == (split is not None)


def test_logits_of_any_size_do_not_overflow():
    q, k, v, dout = draw((1, 50, 2, 64))
    assert all(np.isfinite(x).all() for x in results(q * 1e4, k, v, dout))


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 1)])
def test_a_mesh_shards_images_and_heads(sizes):
    given = draw((4, 50, 2, 64))
    mesh = meshes.make_mesh(mesh_sizes(sizes), jax.devices()[: np.prod(sizes)])
    with jax.set_mesh(mesh):
        found = results(*given)
    assert max(distances(found, reference(*given))) <= exactness(*given)


def mesh_sizes(sizes):
    return dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))


def layer(**options) -> tuple[nnx.GraphDef, nnx.State]:
    """A layer of two heads of 64, whose parameters are all away from their initial values."""

    def make() -> PublishedAttention:
        how = dict(dtype=jnp.float32, rngs=nnx.Rngs(0))
        norm = functools.partial(layer_norm, epsilon=1e-6, **how)
        return PublishedAttention(128, 2, norm=norm, **how, **options)

    definition, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda p: jnp.asarray(rng.normal(0.02, 0.1, p.shape), jnp.float32), state)
    return definition, state


OPTIONS = [
    ({}, False), ({"qk_norm": True}, False), ({"key_bias": False}, False), ({"qkv_bias": False}, False),
    ({"qk_norm": True}, True),
]  # fmt: skip


# All options where heads are sharded, and no option elsewhere.
@pytest.mark.parametrize(
    ("options", "turned", "mesh"),
    slow_unless(
        [*((*each, (1, 1, 2)) for each in OPTIONS), ({}, False, None), ({}, False, (2, 1, 1))],
        [(*each, mesh) for each in OPTIONS for mesh in (None, (2, 1, 1), (1, 1, 2))],
    ),
    ids=lambda value: "turned" if value is True else str(value or "plain"),
)
def test_a_layer_has_the_results_and_gradients_of_plain_attention(options, turned, mesh):
    x, dout = np.random.default_rng(1).standard_normal((2, 2, 50, 128)).astype(np.float32)
    angles = rope.axial_angles((5, 10), 64, theta=100.0)[:, None]
    rotation = {"angles": (np.cos(angles), np.sin(angles))} if turned else {}

    def gradients(implementation):
        definition, state = layer(implementation=implementation, **options)

        @jax.jit
        def both(state, x):
            def apply(state, x):
                return nnx.merge(definition, state)(x, **rotation)[0]

            out, back = jax.vjp(apply, state, x)
            return out, *jax.tree.leaves(back(dout))

        return both(state, x)

    plain = gradients("xla")
    sizes = mesh_sizes(mesh or (1, 1, 1))
    with jax.set_mesh(meshes.make_mesh(sizes, jax.devices()[: np.prod(mesh or 1)])):
        ours = gradients("short")
    # All as one: the gradient of a bias of keys is rounding alone, softmax does not see it.
    ours, plain = (np.concatenate([np.ravel(leaf) for leaf in leaves]) for leaves in (ours, plain))
    # Both are rounded.
    assert distances([ours], [plain])[0] <= 2e-6


def test_a_layer_without_norms_between_takes_one_product_for_queries_keys_and_values():
    definition, state = layer(implementation="short")
    program = str(
        jax.make_jaxpr(lambda x: nnx.merge(definition, state)(x)[0])(jnp.zeros((1, 50, 128)))
    )
    assert "f32[1,50,384] = dot_general" in program


@pytest.mark.parametrize("topology", ["v5e:1x1"])
def test_the_kernels_compile_for_a_tpu(topology):
    compile_for(topology, (1, 50, 2, 64))


SHORT = [
    *itertools.product((50, 196, 197, 257, 577), (32, 64, 80, 88, 96, 104, 128)),
    (8, 40), (37, 64), (49, 16), (257, 72), (1370, 64), (2309, 64),
]  # fmt: skip
# Sixteen heads at a time fill tiles, which the 16 MiB of TPU v4 do not hold.
TOO_WIDE = ((196, 104), (197, 104), (257, 72), (257, 88), (257, 104), (577, 88), (577, 104))
COMPILED = [
    *itertools.product(["v5e:1x1", "v5p:2x2x1", "v6e:1x1"], SHORT),
    *itertools.product(["v4:2x2x1"], (pair for pair in SHORT if pair not in TOO_WIDE)),
    *itertools.product(["v5e:1x1"], ((1370, 72), (1370, 80), (1370, 104), (1601, 64))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "pair"), COMPILED)
def test_the_kernels_compile_for_every_tpu(topology, pair):
    tokens, size = pair
    compile_for(topology, (1, tokens, 16, size))


def compile_for(topology: str, shape: tuple[int, ...]) -> None:
    """Forward and backward, for one device."""
    devices = target.find(topology).devices[:1]
    mesh = meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, devices)
    with jax.set_mesh(mesh):
        chosen = attend.choose(
            "auto",
            queries=shape[1],
            keys=shape[1],
            heads=shape[2],
            head_size=shape[3],
            dtype="bfloat16",
        )
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        text = forward_and_backward.lower(x, x, x, x).compile().as_text()
    assert chosen == "short" and text.count('custom_call_target="tpu_custom_call"') == 2
