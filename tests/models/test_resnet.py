"""ResNets: sizes of the papers, outputs of the code that published weights come from, and the
arithmetic in float64.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.repeats import slow_unless
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.models.zoo import resnet

TINY = dict(image_size=32, units=(3, 1), width_factor=0.5, num_classes=5, head_init="normal")
# ResNet-*: torchvision's ResNets, whose batch norms have as many. BiT-*: timm's table of results,
# in millions.
PARAMETERS = {
    "ResNet-R50x1": 25_557_032,
    "ResNet-R101x1": 44_549_160,
    "ResNet-R152x1": 60_192_808,
    "BiT-R50x1": 25.55,
    "BiT-R50x3": 217.32,
    "BiT-R101x1": 44.54,
    "BiT-R101x3": 387.93,
    "BiT-R152x2": 236.34,
    "BiT-R152x4": 936.53,
}
# Of torchvision's table of weights, a multiply-add counted as 1, at 224.
GFLOPS = {"ResNet-R50x1": 4.09, "ResNet-R101x1": 7.80, "ResNet-R152x1": 11.51}


@pytest.fixture(params=["BiT-R50x1", "ResNet-R50x1"])
def tiny(request):
    """The config of a small ResNet of either style."""
    return registry.model_config(request.param, **TINY)


@pytest.fixture
def images():
    return np.random.default_rng(1).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)


@pytest.mark.parametrize(
    "name", slow_unless(["ResNet-R50x1", "BiT-R50x1", "BiT-R152x2"], PARAMETERS)
)
def test_parameters_are_as_many_as_in_published_models(name):
    count, expected = registry.count_parameters(registry.model_config(name)), PARAMETERS[name]
    assert (count if isinstance(expected, int) else round(count / 1e6, 2)) == expected


def test_the_largest_bit_has_928_million_parameters_below_its_head():
    """BiT §4."""
    assert (
        round(registry.count_parameters(registry.model_config("BiT-R152x4", num_classes=0)) / 1e6)
        == 928
    )


@pytest.mark.parametrize("name", resnet.VARIANTS)
def test_every_listed_name_is_a_model_of_stride_32(name):
    config = registry.model_config(name, image_size=224)
    assert (config.grid, config.tokens, config.stride) == ((7, 7), 49, 32)
    assert config.preactivation == name.startswith("BiT")


@pytest.mark.parametrize("name", GFLOPS)
def test_operations_are_those_of_published_models(name):
    assert registry.model_config(name).flops() / 2e9 == pytest.approx(GFLOPS[name], rel=2e-3)


def test_operations_are_those_of_the_compiled_program(kit):
    """XLA leaves out products with padding, and counts what is no product; in wide layers that is
    little.
    """
    config = registry.model_config(
        "BiT-R50x1", **TINY | dict(image_size=96, units=(1, 2), width_factor=2.0)
    )
    images = jax.ShapeDtypeStruct((1, 96, 96, 3), jnp.float32)
    run = (
        jax.jit(lambda p, x: kit.apply(config, p, x).logits)
        .lower(registry.abstract(config)[1], images)
        .compile()
    )
    assert config.flops() == pytest.approx(run.cost_analysis()["flops"], rel=0.1)


def published(arrays, name, shape):
    """What a checkpoint of big_vision's `bit` or `bit_paper` (formats §2.1) has for our parameter
    `name`.
    """
    name = name.removeprefix("backbone/")
    for ours, theirs in (
        ("root/conv/", "conv_root/"),
        ("root/norm/", "gn_root/"),
        ("shortcut_norm/", "gn_proj/"),
        ("shortcut/", "conv_proj/"),
        (r"norm(\d)/", r"gn\1/"),
        (r"^norm/", "norm-pre-head/"),
    ):
        name = re.sub(ours, theirs, name)
    paper = "norm-pre-head/scale" in arrays
    name = name.replace("conv_root", "root_block/conv_root") if paper else name
    unit = "unit{:02}" if paper else "unit{}"
    if match := re.match(r"stages/(\d)/(first|layers)/(.*)", name):
        stage, which, rest = match.groups()
        of_unit = lambda u: arrays[f"block{stage}/{unit.format(u)}/{rest}"].squeeze()  # noqa: E731
        value = (
            of_unit(1)
            if which == "first"
            else np.stack([of_unit(u) for u in range(2, 2 + shape[0])])
        )
    else:
        value = arrays[name]
    # Group norms may be (1, 1, 1, C); kernels of 1x1 were squeezed above.
    return value.reshape(shape)


@pytest.mark.parametrize(
    ("oracle", "name"), [("bv_bit_tiny", "ResNet-R50x1"), ("bv_bit_paper_tiny", "BiT-R50x1")]
)
def test_published_checkpoints_give_what_their_own_code_gives(shared_data, kit, oracle, name):
    arrays = dict(np.load(shared_data / "oracle" / f"{oracle}.ckpt.npz"))
    io = dict(np.load(shared_data / "oracle" / f"{oracle}.io.npz"))
    said = json.loads(str(io["config"]))
    config = registry.model_config(
        name, image_size=64, num_classes=7, units=said["depth"], width_factor=said["width"]
    )
    shapes = registry.abstract(config)[1]
    parameters = patterns.map_named(lambda name, leaf: published(arrays, name, leaf.shape), shapes)
    assert sum(x.size for x in jax.tree.leaves(parameters)) == sum(x.size for x in arrays.values())

    output = kit.run(config, parameters, io["image"], capture=True)

    np.testing.assert_allclose(output.logits, io["logits"], atol=2e-5)
    np.testing.assert_allclose(output.features, io["pre_logits"], atol=2e-5)
    maps = output.intermediates | {"last": output.tokens.reshape(2, 2, 2, 1024)}
    expected = {"root": io["tap/stem"], "last": io["tap/pre_logits_2d"]}
    for stage, count in enumerate(said["depth"], 1):
        expected[f"stage{stage}"] = io[
            f"tap/stage{stage}" + (f"/unit{count:02}" if "paper" in oracle else "")
        ]
    for what, value in expected.items():
        np.testing.assert_allclose(maps[what], value, atol=1e-5 * np.abs(value).max(), err_msg=what)


def test_zeros_around_what_the_root_of_bit_pools_show_at_its_border_alone(kit, images):
    config, zeros = (
        registry.model_config("BiT-R50x1", **TINY | dict(units=(), root_zeros=z))
        for z in (False, True)
    )
    without, with_zeros = (
        kit.run(c, kit.parameters(config), images, capture=True) for c in (config, zeros)
    )
    expected = without.intermediates["root"].copy()
    assert (expected[:, 0] < 0).any()
    # At an even size the border below and to the right is not reached.
    expected[:, 0], expected[:, :, 0] = (
        np.maximum(expected[:, 0], 0),
        np.maximum(expected[:, :, 0], 0),
    )
    np.testing.assert_array_equal(with_zeros.intermediates["root"], expected)


@pytest.mark.parametrize("preactivation", [True, False])
def test_standardised_kernels_are_those_of_the_formula(preactivation):
    """So small that the epsilons (BiT: 1e-10 below the root; hybrids: 1e-5 beside it) show."""
    kernel = 1e-4 * np.random.default_rng(0).standard_normal((3, 3, 4, 6))
    centred = kernel - kernel.mean((0, 1, 2))
    variance = (centred**2).mean((0, 1, 2))
    expected = centred / (np.sqrt(variance + 1e-10) if preactivation else np.sqrt(variance) + 1e-5)
    np.testing.assert_allclose(
        resnet.standardize(jnp.float32(kernel), preactivation), expected, atol=1e-5
    )


@pytest.mark.slow
def test_unrolling_and_recomputing_change_neither_output_nor_gradient(kit, images, tiny):
    def gradient(**options):
        one_stage = dict(units=(3,), preactivation=tiny.preactivation)
        config = registry.model_config("BiT-R50x1", **TINY | one_stage | options)
        loss = lambda p: jnp.square(kit.apply(config, p, images).logits - 1).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(kit.parameters(config))

    expected = gradient()
    for value, exact in zip(
        jax.tree.leaves(gradient(remat="full", unroll=0)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(value, exact, atol=1e-4 * np.abs(exact).max())


def test_bfloat16_computes_close_to_float32_and_keeps_parameters_and_logits_in_float32(
    kit, images, tiny
):
    half = registry.model_config(
        "BiT-R50x1", **TINY, preactivation=tiny.preactivation, dtype="bfloat16"
    )
    parameters = kit.parameters(tiny)
    expected, output = (kit.run(config, parameters, images) for config in (tiny, half))
    assert {leaf.dtype for leaf in jax.tree.leaves(registry.abstract(half)[1])} == {
        jnp.dtype("float32")
    }
    assert output.logits.dtype == np.float32 and output.tokens.dtype == jnp.bfloat16
    assert (
        0 < np.linalg.norm(output.logits - expected.logits) < 3e-2 * np.linalg.norm(expected.logits)
    )


def test_images_of_any_size_are_rounded_up_to_places_of_the_map(kit, tiny):
    images = jax.ShapeDtypeStruct((2, 33, 50, 3), jnp.float32)
    output = jax.eval_shape(
        lambda p, x: kit.apply(tiny, p, x, capture=True), registry.abstract(tiny)[1], images
    )
    assert output.intermediates["stage2"].shape == (2, 5, 7, 256) and output.tokens.shape == (
        2,
        35,
        256,
    )
    assert registry.model_config("BiT-R50x1", **TINY | dict(image_size=33)).grid == (5, 5)


def test_units_of_a_new_v1_resnet_begin_as_the_identity():
    """The scale of their last norm is 0, and every other one 1 (big_vision's bit.py)."""
    config = registry.model_config("ResNet-R50x1", **TINY | dict(units=(3,)))
    p = jax.jit(lambda key: registry.initialize(config, key))(jax.random.key(0))
    for name, value in zip(patterns.names(p), jax.tree.leaves(p), strict=True):
        if name.endswith("scale"):
            assert (value == (0 if "norm3" in name else 1)).all(), name
    kernels = p["backbone"]["stages"]["1"]["layers"]["conv2"]["kernel"]
    assert kernels.shape == (2, 3, 3, 32, 32) and not np.array_equal(kernels[0], kernels[1])
    assert kernels.std() == pytest.approx((9 * 32) ** -0.5, rel=0.02)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("BiT-R51x1", {}, "no ResNet of size .51.; did you mean '50'"),
        ("BiT-R50", {}, "unknown model 'BiT-R50'; did you mean 'BiT-R50x"),
        ("BiT-R50x1", {"units": (1, 0)}, "every stage has at least one unit"),
        ("ResNet-R50x1", {"root_zeros": True}, "model.root_zeros is for BiT"),
        (
            "BiT-R50x1",
            {"width_factor": 0.25},
            "gives 16 channels, which cannot be normalised in 32",
        ),
    ],
)
def test_what_is_no_resnet_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(name, **options)
