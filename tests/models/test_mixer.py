"""Mixer: sizes of the paper, output of the official code, and the rule for larger images."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.devices import meshes
from vit_jax.interchange import listing
from vit_jax.models import registry
from vit_jax.models.zoo import mixer

# facts §12.1: without a head, at 224.
PARAMETERS = {
    "Mixer-S/32": 18_591_624,
    "Mixer-S/16": 18_015_264,
    "Mixer-B/32": 59_524_428,
    "Mixer-B/16": 59_111_472,
    "Mixer-L/32": 205_914_264,
    "Mixer-L/16": 207_171_168,
    "Mixer-H/14": 431_069_952,
}
# timm's table of results: billions of multiply-adds at 224.
GIGA_PRODUCTS = {
    "Mixer-S/32": 1.00,
    "Mixer-S/16": 3.79,
    "Mixer-B/32": 3.24,
    "Mixer-B/16": 12.61,
    "Mixer-L/16": 44.57,
}
TINY = dict(
    image_size=12,
    patch=4,
    depth=3,
    width=16,
    mlp_dim=32,
    token_mlp_dim=8,
    num_classes=5,
    head_init="normal",
)


def tiny(**options):
    return registry.model_config("Mixer-S/16", **TINY | options)


@pytest.mark.parametrize("name", mixer.VARIANTS)
def test_parameters_are_as_many_as_the_published_dimensions_give(name):
    assert registry.count_parameters(registry.model_config(name, num_classes=0)) == PARAMETERS[name]


@pytest.mark.parametrize("name", GIGA_PRODUCTS)
def test_operations_are_those_of_published_models(name):
    assert registry.model_config(name).flops() / 2e9 == pytest.approx(GIGA_PRODUCTS[name], abs=0.03)


def test_cost_is_linear_in_the_patches_and_all_layers_are_alike():
    """Figures of the page of models."""
    rows = {
        name: [
            listing.model_rows(pixels, [name], parameters=False)[0] for pixels in (224, 448, 896)
        ]
        for name in ("Mixer-B/16", "ViT-B/16")
    }
    gflops = {name: [round(row["gflops"], 1) for row in of] for name, of in rows.items()}
    assert gflops == {"Mixer-B/16": [25.2, 100.8, 403.2], "ViT-B/16": [35.1, 157.0, 899.4]}
    page = mixer.__doc__.replace("\n", " ")
    for name, numbers in gflops.items():
        assert re.search(rf"{name}( takes)? {numbers[0]}, {numbers[1]} and {numbers[2]}", page)
    config = registry.model_config("Mixer-B/16")
    layers = patterns.named(registry.abstract(config)[1]["layers"])
    assert layers and all(leaf.shape[0] == config.depth for leaf in layers.values())


def test_operations_are_those_of_the_compiled_program(kit):
    config = tiny(depth=1, width=256, mlp_dim=1024, token_mlp_dim=64)
    images = jax.ShapeDtypeStruct((2, 12, 12, 3), jnp.float32)
    run = (
        jax.jit(lambda p, x: kit.apply(config, p, x).logits)
        .lower(registry.abstract(config)[1], images)
        .compile()
    )
    assert 2 * config.flops() == pytest.approx(run.cost_analysis()["flops"], rel=0.03)


def published(arrays, name, shape):
    """What the official checkpoint (formats §2.1) has for our parameter `name`."""
    for ours, theirs in (
        ("^embedding", "stem"),
        ("^norm", "pre_head_layer_norm"),
        ("^layers", "MixerBlock_#"),
        ("token_norm", "LayerNorm_0"),
        ("channel_norm", "LayerNorm_1"),
        ("_mlp/up", "_mixing/Dense_0"),
        ("_mlp/down", "_mixing/Dense_1"),
    ):
        name = re.sub(ours, theirs, name)
    return (
        np.stack([arrays[name.replace("#", str(i))] for i in range(shape[0])])
        if "#" in name
        else arrays[name]
    )


def test_the_published_checkpoint_gives_what_its_own_code_gives(shared_data, kit):
    arrays = dict(np.load(shared_data / "oracle" / "vt_mixer_tiny.ckpt.npz"))
    io = dict(np.load(shared_data / "oracle" / "vt_mixer_tiny.io.npz"))
    said = json.loads(str(io["config"]))
    config = registry.model_config(
        "Mixer-B/8",
        image_size=32,
        num_classes=7,
        depth=said["num_blocks"],
        width=said["hidden_dim"],
        mlp_dim=said["channels_mlp_dim"],
        token_mlp_dim=said["tokens_mlp_dim"],
    )
    shapes = registry.abstract(config)[1]
    parameters = patterns.map_named(lambda name, leaf: published(arrays, name, leaf.shape), shapes)
    assert jax.tree.map(np.shape, parameters) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    assert sum(x.size for x in jax.tree.leaves(parameters)) == sum(x.size for x in arrays.values())

    output = kit.run(config, parameters, io["image"], capture=True)

    np.testing.assert_allclose(output.logits, io["logits"], atol=1e-5)
    np.testing.assert_allclose(output.features, io["pre_logits"], atol=1e-5)
    np.testing.assert_allclose(output.tokens, io["tap/pre_head_layer_norm"], atol=1e-5)
    for i, block in enumerate(output.intermediates["blocks"]):
        np.testing.assert_allclose(block, io[f"tap/MixerBlock_{i}"], atol=1e-5)


def convolved(block, x, grid):
    """A block of a Mixer by convolutions alone."""

    def act(x):
        return jax.nn.gelu(x, approximate=True)

    def norm(p, x):
        x = x - x.mean(-1, keepdims=True)
        return (
            x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]
        )

    def convolve(x, kernel, groups):
        axes = ("NHWC", "HWIO", "NHWC")
        how = dict(dimension_numbers=axes, feature_group_count=groups)
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", **how)

    def depthwise(p, x, places):
        """Sees all places (h, w) of (B, h w, C) at once, with the same kernels for each channel: (B, F, C)."""
        channels, (_, features) = x.shape[-1], p["kernel"].shape
        kernels = jnp.tile(p["kernel"].reshape(*places, 1, features), channels)
        y = convolve(x.reshape(-1, *places, channels), kernels, channels)
        return y.reshape(-1, channels, features).swapaxes(1, 2) + p["bias"][:, None]

    def pointwise(p, x):
        return convolve(x[:, :, None], p["kernel"][None, None], 1)[:, :, 0] + p["bias"]

    mlp = block["token_mlp"]
    y = act(depthwise(mlp["up"], norm(block["token_norm"], x), grid))
    x = x + depthwise(mlp["down"], y, (y.shape[1], 1))
    mlp = block["channel_mlp"]
    return x + pointwise(mlp["down"], act(pointwise(mlp["up"], norm(block["channel_norm"], x))))


def test_tokens_are_mixed_by_a_depthwise_convolution_that_channels_share_channels_by_a_1x1(kit):
    """Mixer §2, "connections to CNNs"."""
    config = tiny(image_size=(8, 12))
    parameters = kit.parameters(config)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 8, 12, 3)).astype(np.float32)
    blocks = kit.run(config, parameters, images, capture=True).intermediates["blocks"]
    for i in (1, 2):
        block = jax.tree.map(lambda x, i=i: x[i], parameters["layers"])
        found = jax.jit(convolved, static_argnums=2)(block, blocks[i - 1], (2, 3))
        np.testing.assert_allclose(found, blocks[i], atol=1e-5)


def enlarged_token_mlp(token_mlp, factor):
    return patterns.map_named(
        lambda part, array: mixer.enlarge_token_mlp(part, array, (3, 3), factor), token_mlp
    )


@pytest.mark.parametrize("factor", [2, 3])
def test_a_mixer_enlarged_for_larger_images_sees_each_sub_image_as_before(kit, factor):
    """Token for token, and so the mean is the mean of the small Mixer's."""
    small = tiny()
    large = tiny(image_size=12 * factor, token_mlp_dim=8 * factor**2)
    parameters = kit.parameters(small)
    layers = parameters["layers"] | {
        "token_mlp": enlarged_token_mlp(parameters["layers"]["token_mlp"], factor)
    }
    images = (
        np.random.default_rng(2).uniform(-1, 1, (2, 12 * factor, 12 * factor, 3)).astype(np.float32)
    )

    output = kit.run(large, parameters | {"layers": layers}, images)

    rows = np.stack(np.split(images, factor, axis=1))
    sub_images = np.stack(np.split(rows, factor, axis=3))  # (K across, K down, B, 12, 12, 3)
    expected = kit.run(small, parameters, sub_images.reshape(-1, 12, 12, 3))
    tokens = expected.tokens.reshape(factor, factor, 2, 3, 3, 16)
    tokens = np.einsum("xybijd->byixjd", tokens).reshape(output.tokens.shape)
    np.testing.assert_allclose(output.tokens, tokens, atol=1e-5)
    features = expected.features.reshape(factor**2, 2, 16).mean(axis=0)
    np.testing.assert_allclose(output.features, features, atol=1e-5)


def test_the_enlarged_token_mlp_is_block_diagonal_where_tokens_come_sub_image_by_sub_image(kit):
    """As the paper writes it; exactly, for one layer and for a stack."""
    stacked = kit.parameters(tiny())["layers"]["token_mlp"]
    single = jax.tree.map(lambda leaf: leaf[1], stacked)
    enlarged, of_stack = (enlarged_token_mlp(part, 2) for part in (single, stacked))
    jax.tree.map(lambda one, all_: np.testing.assert_array_equal(one, all_[1]), enlarged, of_stack)
    order = np.arange(36).reshape(2, 3, 2, 3).transpose(0, 2, 1, 3).ravel()
    diagonal = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(
        enlarged["up"]["kernel"][order], np.kron(diagonal, single["up"]["kernel"])
    )
    np.testing.assert_array_equal(
        enlarged["down"]["kernel"][:, order], np.kron(diagonal, single["down"]["kernel"])
    )
    np.testing.assert_array_equal(enlarged["up"]["bias"], np.tile(single["up"]["bias"], 4))
    np.testing.assert_array_equal(
        enlarged["down"]["bias"][order], np.tile(single["down"]["bias"], 4)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(enlarged)} == {np.dtype("float32")}


def test_stochastic_depth_drops_whole_residuals_and_scales_the_others_up(kit):
    """Last of two blocks, rate 0.75, channel MLP silenced: an example keeps its input or gets 4
    times the residual.
    """
    config = tiny(depth=2, drop_path=0.75)
    parameters = kit.parameters(config)
    channel_mlp = parameters["layers"]["channel_mlp"]
    channel_mlp["down"] = jax.tree.map(np.zeros_like, channel_mlp["down"])
    images = np.repeat(kit.images[:1], 400, axis=0)
    exact = kit.run(config, parameters, images[:1], capture=True).intermediates["blocks"]
    drawn = kit.run(config, parameters, images, jax.random.key(3), capture=True).intermediates[
        "blocks"
    ]

    np.testing.assert_allclose(drawn[0], np.repeat(exact[0], 400, axis=0), atol=1e-5)
    residual = (drawn[1] - drawn[0]) / (exact[1] - exact[0])
    scale = np.median(residual, axis=(1, 2))
    assert set(np.round(scale, 3)) == {0.0, 4.0}
    assert np.mean(scale > 0) == pytest.approx(0.25, abs=0.07)


def test_stochastic_depth_without_randomness_is_an_error(kit):
    config = tiny(drop_path=0.5)
    with pytest.raises(ValueError, match="needs rngs unless deterministic=True"):
        nnx.merge(registry.abstract(config)[0], kit.parameters(config))(
            kit.images, deterministic=False
        )


@pytest.mark.slow
def test_unrolling_and_recomputing_change_neither_output_nor_gradient(kit):
    def gradient(**options):
        config = tiny(drop_path=0.3, **options)

        def loss(p):
            return jnp.square(kit.apply(config, p, kit.images, jax.random.key(0)).logits - 1).sum()

        value, gradients = jax.jit(jax.value_and_grad(loss))(kit.parameters(config))
        # Rounding alone: norms take away what this bias adds to all channels.
        rounding = gradients["layers"]["token_mlp"]["down"].pop("bias")
        assert np.abs(rounding).max() < 1e-6
        return jax.tree.leaves((value, gradients))

    for value, exact in zip(gradient(remat="full", unroll=2), gradient(remat="none"), strict=True):
        np.testing.assert_allclose(value, exact, atol=1e-5 * np.abs(exact).max() + 1e-7)


def test_bfloat16_computes_close_to_float32_and_keeps_parameters_and_logits_in_float32(kit):
    exact, half = tiny(), tiny(dtype="bfloat16")
    expected, output = (
        kit.run(config, kit.parameters(exact), kit.images) for config in (exact, half)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(registry.abstract(half)[1])} == {
        jnp.dtype("float32")
    }
    assert output.logits.dtype == np.float32 and output.tokens.dtype == jnp.bfloat16
    assert (
        0 < np.linalg.norm(output.logits - expected.logits) < 2e-2 * np.linalg.norm(expected.logits)
    )


def test_tensor_parallelism_cuts_the_hidden_axis_of_both_mlps():
    mesh = meshes.make_mesh({"data": 1, "fsdp": 4, "tensor": 2})
    layers = meshes.shardings(registry.abstract(tiny())[1], mesh, fsdp_min_size=10**9)["layers"]
    for mlp in ("token_mlp", "channel_mlp"):
        assert layers[mlp]["up"]["kernel"].spec == P(None, None, "tensor")
        assert layers[mlp]["down"]["kernel"].spec == P(None, "tensor", None)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Mixer-XL/16", {}, "no Mixer of size 'XL'"),
        ("Mixer-B16", {}, "unknown model 'Mixer-B16'; did you mean 'Mixer-B/16'"),
        ("Mixer-B/16", {"image_size": 225}, "image size 225 cannot be split into patches of 16"),
        ("Mixer-B/16", {"drop_path": 1.0}, "model.drop_path = 1.0 must be below 1"),
        ("Mixer-B/16", {"heads": 12}, "model Mixer-B/16 has no option 'heads'"),
    ],
)
def test_what_is_no_mixer_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(name, **options)
