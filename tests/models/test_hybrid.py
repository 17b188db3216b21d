"""Hybrids: sizes that the papers and tables imply, and the output of the official code."""

import json
import re

import jax
import numpy as np
import pytest

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.models.zoo import hybrid

# facts §2.5: with a linear head of 1000, at 224, and the tokens without the class token.
PARAMETERS = {
    "R+ViT-Ti/16": (6_337_704, 49),
    "R26+ViT-S/32": (36_431_912, 49),
    "R50+ViT-B/16": (98_659_112, 196),
    "R50+ViT-B/32": (110_945_832, 49),
    "R50+ViT-L/16": (316_483_624, 196),
    "R50+ViT-L/32": (328_994_856, 49),
}
# timm's table of results at 384, in millions (facts §2.5).
PARAMETERS_AT_384 = {"R+ViT-Ti/16": 6.36, "R50+ViT-B/16": 98.95, "R50+ViT-L/32": 329.09}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_the_published_dimensions_give(name):
    config = registry.model_config(name)
    assert (registry.count_parameters(config), config.tokens - 1) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS_AT_384)
def test_at_another_resolution_only_the_positions_are_more(name):
    config = registry.model_config(name, image_size=384)
    assert round(registry.count_parameters(config) / 1e6, 2) == PARAMETERS_AT_384[name]


@pytest.mark.parametrize("name", hybrid.VARIANTS)
def test_operations_are_those_of_the_resnet_and_of_the_vit_above(name):
    """The ViT's patches, whose cost is 2·places·channels·width, are all that is not counted in a
    part.
    """
    config = registry.model_config(name)
    vit = registry.model_config(re.sub(r".*\+(.*)/.*", r"\1/", name) + str(224 // config.grid[0]))
    patches = 2 * config.grid[0] ** 2 * config.width
    body = vit.flops() - patches * vit.patch**2 * 3
    assert (
        config.flops()
        == config.backbone.flops() + body + patches * config.patch**2 * config.backbone.outputs
    )


def published(arrays, name, shape):
    """What the official checkpoint (formats §2.1) has for our parameter `name`."""
    for ours, theirs in (
        ("^class_token$", "cls"),
        ("^position$", "Transformer/posembed_input/pos_embedding"),
        ("encoder/norm", "Transformer/encoder_norm"),
        ("encoder/layers/", "Transformer/encoderblock_#/"),
        ("attention_norm", "LayerNorm_0"),
        ("mlp_norm", "LayerNorm_1"),
        ("attention/", "MultiHeadDotProductAttention_0/"),
        ("mlp/up", "MlpBlock_0/Dense_0"),
        ("mlp/down", "MlpBlock_0/Dense_1"),
        ("embedding/backbone/", ""),
        ("root/conv/", "conv_root/"),
        ("root/norm/", "gn_root/"),
        ("shortcut_norm/", "gn_proj/"),
        ("shortcut/", "conv_proj/"),
        (r"norm(\d)/", r"gn\1/"),
        (r"stages/(\d)/first/", r"block\1/unit1/"),
        (r"stages/(\d)/layers/", r"block\1/unit#/"),
    ):
        name = re.sub(ours, theirs, name)
    if "#" not in name:
        return arrays[name]
    first = 0 if name.startswith("Transformer") else 2
    names = [name.replace("#", str(i)) for i in range(first, first + shape[0])]
    if "qkv" not in name:
        return np.stack([arrays[name] for name in names])
    axis = 1 if name.endswith("kernel") else 0
    parts = ("query", "key", "value")
    return np.stack(
        [np.stack([arrays[name.replace("qkv", part)] for part in parts], axis) for name in names]
    )


def test_the_published_checkpoint_gives_what_its_own_code_gives(shared_data, kit):
    arrays = dict(np.load(shared_data / "oracle" / "vt_hybrid_tiny.ckpt.npz"))
    io = dict(np.load(shared_data / "oracle" / "vt_hybrid_tiny.io.npz"))
    said = json.loads(str(io["config"]))
    config = registry.model_config(
        "R50+ViT-B/16",
        image_size=64,
        num_classes=7,
        units=said["resnet"]["num_layers"],
        width_factor=said["resnet"]["width_factor"],
        width=said["hidden_size"],
        depth=said["transformer"]["num_layers"],
        mlp_dim=said["transformer"]["mlp_dim"],
        heads=said["transformer"]["num_heads"],
    )
    shapes = registry.abstract(config)[1]
    parameters = patterns.map_named(lambda name, leaf: published(arrays, name, leaf.shape), shapes)
    assert jax.tree.map(np.shape, parameters) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    assert sum(x.size for x in jax.tree.leaves(parameters)) == sum(x.size for x in arrays.values())

    output = kit.run(config, parameters, io["image"], capture=True)

    np.testing.assert_allclose(output.logits, io["logits"], atol=2e-5)
    np.testing.assert_allclose(output.features, io["pre_logits"], atol=2e-5)
    np.testing.assert_allclose(output.tokens, io["tap/Transformer/encoder_norm"], atol=2e-5)
    for i, block in enumerate(output.intermediates["blocks"]):
        np.testing.assert_allclose(block, io[f"tap/Transformer/encoderblock_{i}"], atol=5e-5)


def test_the_root_alone_is_cut_into_patches_of_eight(kit):
    config = registry.model_config("R+ViT-Ti/16", image_size=64, depth=1, num_classes=5)
    assert (config.patch, config.units, config.grid) == (8, (), (2, 2))
    shapes = registry.abstract(config)[1]
    assert shapes["embedding"]["kernel"].shape == (8, 8, 64, 192)
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), np.float32)
    output = jax.eval_shape(lambda p, x: kit.apply(config, p, x), shapes, images)
    assert output.tokens.shape == (2, 5, 192) and output.logits.shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("R50+ViT-B/8", {}, "no such hybrid of total stride 8; did you mean 'R50\\+ViT-B/"),
        ("R+ViT-Ti/32", {}, "no such hybrid of total stride 32; did you mean 'R\\+ViT-Ti/16'"),
        ("R51+ViT-B/16", {}, "no ResNet of size .51."),
        ("R50+ViT-BB/16", {}, "no ViT of size 'BB'"),
        (
            "R50+ViT-B/32",
            {"image_size": 240},
            "image size 240 does not fit a hybrid of total stride 32",
        ),
        ("R50+ViT-B/32", {"preactivation": True}, "no option 'preactivation'"),
        (
            "R50+ViT-B/32",
            {"width_factor": 0.3},
            "gives 19 channels, which cannot be normalised in 32",
        ),
    ],
)
def test_what_is_no_hybrid_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(name, **options)
