"""EfficientNet against its formula in float64; `tests/interchange/test_efficientnet.py` has timm and
transformers.
"""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models import oracles
from tests.models.conftest import parameters, run, statistics
from tests.repeats import slow_unless
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.compute import convolution
from vit_jax.models import registry
from vit_jax.models.zoo import efficientnet

PARAMETERS = {
    "B0": 5_288_548, "B1": 7_794_184, "B2": 9_109_994, "B3": 12_233_232, "B4": 19_341_616,
    "B5": 30_389_784, "B6": 43_040_704, "B7": 66_347_960, "L2": 480_309_308,
}  # fmt: skip
# The README of tensorflow/tpu and the first table of the paper: billions of multiply-adds.
PUBLISHED = {"B0": 0.39, "B7": 37}
TINY = dict(units=(1, 2), width_factor=0.25, num_classes=5, remat="none", unroll=1)
# Stride 2 meets an odd number of rows twice, and columns once.
SIZE = (13, 10)


def tiny(**options):
    return registry.model_config("EfficientNet-B0", **TINY | {"image_size": SIZE} | options)


def images(config, batch=3):
    shape = (batch, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def swish(x):
    return x / (1 + np.exp(-x))


def windows(x, size, stride):
    """(B, H', W', C, S, S): what a kernel meets, with TensorFlow's SAME padding."""
    pads = [(0, 0)]
    for length in x.shape[1:3]:
        pad = max((-(-length // stride) - 1) * stride + size - length, 0)
        pads.append((pad // 2, pad - pad // 2))
    padded = np.pad(x, [*pads, (0, 0)])
    found = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
    return found[:, ::stride, ::stride]


def forward(config, p, x, training=False):
    """Logits in float64 (EfficientNet Table 1, and the conventions of its authors' code)."""
    norm = functools.partial(oracles.batch_norm, training=training, epsilon=1e-3)

    def block(p, x, kernel, stride):
        y = x
        if "expand" in p:
            y = swish(norm(p["expand_norm"], oracles.linear(p["expand"], y)))
        kernel = p["depthwise"]["kernel"][:, :, 0]
        y = np.einsum("bhwcij,ijc->bhwc", windows(y, len(kernel), stride), kernel)
        y = swish(norm(p["depthwise_norm"], y))
        squeezed = swish(oracles.linear(p["gate"]["reduce"], y.mean((1, 2))))
        gate = 1 / (1 + np.exp(-oracles.linear(p["gate"]["expand"], squeezed)))
        y = oracles.linear(p["project"], y * gate[:, None, None])
        y = norm(p["project_norm"], y)
        return x + y if y.shape == x.shape and stride == 1 else y

    x = np.einsum("bhwcij,ijcd->bhwd", windows(x, 3, 2), p["root"]["kernel"])
    x = swish(norm(p["root"]["norm"], x))
    stages = [(3, 1), (3, 2), (5, 2), (3, 2), (5, 1), (5, 2), (3, 1)]
    for number, (count, (kernel, stride)) in enumerate(zip(config.units, stages, strict=False), 1):
        stage = p["stages"][str(number)]
        x = block(stage["first"], x, kernel, stride)
        for i in range(count - 1):
            x = block(oracles.layer(stage["layers"], i), x, kernel, 1)
    x = swish(norm(p["top_norm"], oracles.linear(p["top"], x)))
    return oracles.linear(p["head"], x.mean((1, 2)))


# All are by one rule: the smallest and the two largest.
@pytest.mark.parametrize("size", slow_unless(["B0", "B7", "L2"], efficientnet.SIZES))
def test_parameters_and_multiply_adds_are_the_published_ones(size):
    resolution = efficientnet.SIZES[size].resolution
    config = registry.model_config(f"EfficientNet-{size}", image_size=resolution)
    assert registry.count_parameters(config) == PARAMETERS[size]
    if size in PUBLISHED:
        assert abs(config.flops() / 2e9 / PUBLISHED[size] - 1) < 0.03


def test_all_seven_stages_with_even_and_odd_maps_are_those_of_float64():
    config = tiny(units=(1,) * 7, image_size=(48, 41))
    params, variables, x = parameters(config), statistics(config), images(config, 2)
    expected = forward(config, oracles.in_float64(params, variables), x.astype(np.float64))
    found = run(config, params, x)
    np.testing.assert_allclose(found.logits, expected, atol=1e-5 * np.abs(expected).max())
    assert found.tokens.shape == (2, config.tokens, 320) and config.tokens == 4


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [3, 5])
def test_a_depthwise_convolution_on_cpus_is_xlas_convolution(size, stride):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 7, 4)).astype(np.float32)
    kernel = rng.normal(size=(size, size, 1, 4)).astype(np.float32)
    dy = rng.normal(size=(2, -(-6 // stride), -(-7 // stride), 4)).astype(np.float32)

    def both(compute):
        y, back = jax.vjp(lambda x, kernel: compute(x, kernel, stride), x, kernel)
        return jax.tree.leaves((y, back(dy)))

    both = jax.jit(both, static_argnums=0)

    found = both(convolution.depthwise), both(convolution.depthwise.plain)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_running_statistics_move_by_a_hundredth_of_the_batchs():
    config = tiny()
    params, variables, x = parameters(config), statistics(config), images(config)

    @jax.jit
    def train(params, variables, x):
        model = nnx.merge(registry.abstract(config)[0], params, variables)
        model(x, deterministic=False, rngs=nnx.Rngs(dropout=0))
        return registry.split(model)[1].variables

    after = train(params, variables, x)
    maps = np.einsum(
        "bhwcij,ijcd->bhwd", windows(x.astype(np.float64), 3, 2), params["root"]["kernel"]
    )
    before = variables["root"]["norm"]
    mean, var = maps.mean((0, 1, 2)), maps.var((0, 1, 2), ddof=1)
    found = after["root"]["norm"]
    np.testing.assert_allclose(found["mean"], 0.99 * before["mean"] + 0.01 * mean, atol=1e-6)
    np.testing.assert_allclose(found["var"], 0.99 * before["var"] + 0.01 * var, atol=1e-6)


def test_stochastic_depth_leaves_blocks_out_and_scales_the_others_up():
    """The rate of the second of two blocks is half of the option's."""
    config = tiny(units=(2,), drop_path=0.999999, fixed_statistics=True)
    params, x = parameters(config), images(config, 8)

    def tokens(factor, key=None):
        last = "stages/1/layers/project_norm/"
        scale = lambda name, leaf: factor * leaf if name.startswith(last) else leaf  # noqa: E731
        return run(config, patterns.map_named(scale, params), x, key).tokens

    found, absent, doubled = tokens(1, jax.random.key(0)), tokens(0), tokens(2)
    is_absent = np.isclose(found, absent, atol=1e-4).all((1, 2))
    is_doubled = np.isclose(found, doubled, atol=1e-4).all((1, 2))
    assert 0 < is_absent.sum() < len(x) and (is_absent ^ is_doubled).all()


def test_dropout_without_randomness_is_an_error():
    config = tiny(dropout=0.5)
    with pytest.raises(ValueError, match="needs rngs"):
        model = nnx.merge(registry.abstract(config)[0], parameters(config), statistics(config))
        model(images(config), deterministic=False)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("EfficientNet-B9", {}, "no EfficientNet of size 'B9'"),
        ("EfficientNet-B0", {"units": (1,) * 8}, "one to 7 stages"),
        ("EfficientNet-B0", {"units": (1, 0)}, "at least one block"),
        ("EfficientNet-B0", {"units": ()}, "one to 7 stages"),
        ("EfficientNet-B0", {"width_factor": 0.0}, "width_factor"),
    ],
)
def test_what_is_no_efficientnet_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(name, **options)


@pytest.mark.slow
def test_a_small_one_learns_digits(command, tmp_path):
    recipe = "configs/efficientnet.py:smoke"
    code, out, _ = command("train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}")
    assert code == 0 and float(re.search(r"accuracy ([\d.]+)", out)[1]) >= 0.95
