"""CrossViT: the published counts, a second, plain way to compute it in float64, its two image sizes,
and what is refused. What its authors' code computes is in tests/interchange/test_crossvit.py.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from tests.models.conftest import apply, parameters
from tests.repeats import slow_unless
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.interchange import fitting
from vit_jax.models import registry
from vit_jax.models.embeddings import interpolate, resize_images
from vit_jax.models.zoo import crossvit
from vit_jax.optim.multipliers import learning_rates

# facts §17: parameters of the authors' code, and thousand million multiply-adds, by name and image size.
PUBLISHED = {
    ("Ti", 240): (7_014_800, 1.56), ("S", 240): (26_856_272, 5.62), ("B", 240): (105_025_232, 21.19),
    ("9", 240): (8_553_296, 1.84), ("15", 240): (27_528_464, 5.79), ("18", 240): (43_271_408, 9.03),
    ("9-dagger", 240): (8_776_592, 1.98), ("15-dagger", 240): (28_209_008, 6.11),
    ("18-dagger", 240): (44_266_976, 9.47), ("15-dagger", 408): (28_500_080, 21.40),
    ("18-dagger", 408): (44_606_560, 32.41),
}  # fmt: skip
COMMON = dict(num_classes=5, remat="none", unroll=1)
PLAIN = dict(
    image_size=(8, 12), small_patch=4, large_image_size=(6, 9), patch=3, heads=2, width=12,
    mlp_dim=24, small_width=8, small_mlp_dim=16, depths=((1, 2), (2, 1)), **COMMON,
)  # fmt: skip
DAGGER = dict(
    image_size=(36, 48), heads=2, width=16, mlp_dim=24, small_width=8, small_mlp_dim=12, depths=((1, 1),),
    convolutional_stem=True, **COMMON,
)  # fmt: skip
TINY = {"plain": PLAIN, "dagger": DAGGER}


@functools.cache
def tiny(kind="plain", **options):
    return registry.model_config("CrossViT-9", **TINY[kind] | options)


def images(config, count=2):
    shape = (count, *config.height_width, config.channels)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def test_all_names_have_the_published_sizes():
    assert {f"CrossViT-{size}" for size, _ in PUBLISHED} == set(crossvit.VARIANTS)


@pytest.mark.parametrize(
    ("size", "side"), slow_unless([("Ti", 240), ("18", 240), ("15-dagger", 408)], PUBLISHED)
)
def test_parameters_and_operations_are_those_of_the_authors_code(size, side):
    parameters, multiply_adds = PUBLISHED[size, side]
    config = registry.model_config(f"CrossViT-{size}", image_size=side)
    assert registry.count_parameters(config) == parameters
    assert round(config.flops() / 2e9, 2) == multiply_adds


def test_a_name_alone_has_the_size_of_the_paper():
    assert registry.model_config("CrossViT-S") == registry.model_config(
        "CrossViT-S", image_size=240
    )


@pytest.mark.parametrize(
    ("image_size", "large"), [(240, 224), (408, 384), (504, 480), ("240x480", (224, 464))]
)
def test_the_branch_of_large_patches_sees_images_of_the_papers_size(image_size, large):
    config = registry.model_config("CrossViT-18-dagger", image_size=image_size)
    assert config.large_size == large
    again = registry.model_config(
        "CrossViT-18-dagger", image_size=image_size, large_image_size=large
    )
    assert [b.grid for b in again.branches.values()] == [b.grid for b in config.branches.values()]


def forward(config, p, x):
    """Logits of each branch (2, B, classes), by arXiv 2103.14899 §3 and facts §17."""

    def norm(p, x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def gelu(x):
        return x * (1 + erf(x / 2**0.5)) / 2

    def linear(p, x):
        return x @ p["kernel"] + p["bias"]

    def attention(p, queries, x):
        width, _, heads, size = p["qkv"]["kernel"].shape
        kernels, biases = np.moveaxis(p["qkv"]["kernel"], 1, 0), p["qkv"]["bias"]
        (q, k, v) = (
            (of @ kernel.reshape(width, -1) + bias.ravel()).reshape(*of.shape[:2], heads, size)
            for of, kernel, bias in zip((queries, x, x), kernels, biases, strict=True)
        )
        weights = np.exp(np.einsum("bqhc,bnhc->bhqn", q, k) / size**0.5)
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("bhqn,bnhc,hcd->bqd", weights, v, p["out"]["kernel"]) + p["out"]["bias"]

    def block(p, x):
        y = norm(p["attention_norm"], x)
        x = x + attention(p["attention"], y, y)
        y = gelu(linear(p["mlp"]["up"], norm(p["mlp_norm"], x)))
        return x + linear(p["mlp"]["down"], y)

    def project(p, x):
        return linear(p["linear"], gelu(norm(p["norm"], x)))

    def cross(p, own, other):
        x = np.concatenate([project(p["project"], own[:, :1]), other[:, 1:]], axis=1)
        y = norm(p["attention_norm"], x)
        x = x[:, :1] + attention(p["attention"], y[:, :1], y)
        return np.concatenate([project(p["back"], x), own[:, 1:]], axis=1)

    tokens = {}
    for name, branch in config.branches.items():
        y = resized(x, branch.height_width)
        stem = p["embedding"][name]
        if config.convolutional_stem:
            strides = {12: ((4, 3), (3, 0), (1, 1)), 16: ((4, 3), (2, 1), (2, 1))}[branch.patch]
            for i, (stride, padding) in enumerate(strides):
                y = convolution(stem[f"conv{i + 1}"], np.maximum(y, 0) if i else y, stride, padding)
        else:
            y = convolution(stem, y, branch.patch, 0)
        y = y.reshape(len(y), -1, y.shape[-1])
        class_token = np.repeat(p["class_token"][name], len(y), axis=0)
        tokens[name] = np.concatenate([class_token, y], axis=1) + p["position"][name]
    for stage in p["stages"].values():
        for name in tokens:
            for i in range(len(stage[name]["layers"]["mlp_norm"]["bias"])):
                of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], stage[name]["layers"])
                tokens[name] = block(of_layer, tokens[name])
        small, large = tokens.values()
        tokens = {
            "small": cross(stage["small_to_large"], small, large),
            "large": cross(stage["large_to_small"], large, small),
        }
    read = {name: norm(p["norm"][name], y)[:, 0] for name, y in tokens.items()}
    return np.stack([linear(p["head"][name], y) for name, y in read.items()])


def convolution(p, x, stride, padding):
    """x (B, H, W, C), zeros around it."""
    side = len(p["kernel"])
    x = np.pad(x, ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (side, side), (1, 2))
    return np.einsum("bhwcij,ijcd->bhwd", windows[:, ::stride, ::stride], p["kernel"]) + p["bias"]


def resized(x, new):
    """Bicubic, pixel by pixel: taps at -1, 0, 1 and 2, of the nearest pixel where there is none."""

    def weight(t, a=-0.75):
        t = abs(t)
        return (a + 2) * t**3 - (a + 3) * t**2 + 1 if t <= 1 else a * (t**3 - 5 * t**2 + 8 * t - 4)

    for axis, side in zip((1, 2), new, strict=True):
        old, columns = x.shape[axis], []
        for i in range(side):
            at = (i + 0.5) * old / side - 0.5
            pixels = [int(np.floor(at)) + tap for tap in (-1, 0, 1, 2)]
            columns.append(
                sum(weight(at - j) * np.take(x, min(max(j, 0), old - 1), axis) for j in pixels)
            )
        x = np.stack(columns, axis)
    return x


@functools.cache
def answers(kind):
    """Of the model: parameters, output, and the gradient of its logits, each weighed differently."""
    config = tiny(kind)
    params, x = parameters(config), images(config)

    def loss(params):
        output = apply(config, params, x)
        return (output.logits * weights(output.logits.shape)).sum(), output

    gradient, output = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params))
    return params, output, gradient


def weights(shape):
    return np.sin(1.0 + np.arange(np.prod(shape))).reshape(shape)


@pytest.mark.parametrize("kind", TINY)
def test_two_branches_meet_by_their_class_tokens(kind):
    params, output, _ = answers(kind)
    config = tiny(kind)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    expected = forward(config, exact, images(config).astype(np.float64))
    assert np.abs(expected[0] - expected[1]).max() > 0.1
    np.testing.assert_allclose(output.exits, expected, atol=1e-5)
    np.testing.assert_allclose(output.logits, expected.mean(0), atol=1e-5)
    assert output.exits.dtype == np.float32


@pytest.mark.parametrize("kind", TINY)
def test_the_gradient_of_every_parameter_is_that_of_float64(kind):
    params, _, gradient = answers(kind)
    config = tiny(kind)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x, step, rng = images(config).astype(np.float64), 1e-5, np.random.default_rng(0)
    for name, found in zip(patterns.names(gradient), jax.tree.leaves(gradient), strict=True):
        direction = rng.standard_normal(found.shape)

        def loss(by, name=name, direction=direction):
            move = lambda n, x: x + by * direction if n == name else x  # noqa: E731
            logits = forward(config, patterns.map_named(move, exact), x).mean(0)
            return (logits * weights(logits.shape)).sum()

        slope = (loss(step) - loss(-step)) / (2 * step)
        np.testing.assert_allclose(
            (found * direction).sum(), slope, rtol=1e-3, atol=1e-4, err_msg=name
        )


def test_images_are_resized_as_pytorch_does():
    functional = pytest.importorskip("torch.nn.functional")
    import torch

    x = images(tiny(), 1)
    for new in ((6, 9), (11, 5), (8, 12), (16, 24)):
        theirs = functional.interpolate(
            torch.from_numpy(x).double().permute(0, 3, 1, 2),
            size=new,
            mode="bicubic",
            align_corners=False,
        )
        np.testing.assert_allclose(
            resize_images(x, new), theirs.permute(0, 2, 3, 1), atol=1e-6, err_msg=str(new)
        )


def test_captured_is_what_both_branches_did():
    config = tiny()
    output = jax.eval_shape(
        functools.partial(apply, config, capture=True), parameters(config), images(config)
    )
    assert {name: x.shape for name, x in output.intermediates.items()} == {
        "attention": (3, 2, 2, 7, 7), "blocks": (3, 2, 7, 12), "small_attention": (3, 2, 2, 7, 7),
        "small_blocks": (3, 2, 7, 8), "small_tokens": (2, 7, 8),
    }  # fmt: skip
    assert output.features.shape == (2, 8 + 12) and output.tokens.shape == (2, 7, 12)


def test_stochastic_depth_grows_over_the_deeper_branch_and_cross_attention_has_its_stages_last():
    config = tiny(drop_path=0.4)
    assert [rates.tolist() for rates in crossvit._drop_path_rates(config)] == [
        pytest.approx([0, 0.4 / 3]),
        pytest.approx([0.8 / 3, 0.4]),
    ]
    config = tiny("dagger", drop_path=0.4, depths=((2, 1),))
    run = jax.jit(functools.partial(apply, config))
    x, params = images(config, 16), parameters(config)
    one, other = (run(params, x, jax.random.key(seed)).logits for seed in (0, 1))
    assert np.isfinite(one).all() and (np.abs(one - other).max(axis=1) > 1e-3).any()
    with pytest.raises(ValueError, match="needs rngs"):
        jax.eval_shape(lambda: registry.build(config, rngs=nnx.Rngs(0))(x, deterministic=False))


@pytest.mark.parametrize(
    ("options", "large"), [({}, (12, 18)), ({"large_image_size": 0}, (12, 21))]
)
def test_each_branch_keeps_its_positions_at_another_resolution(options, large):
    config = tiny(**options)
    at_size = dict(image_size=(16, 24), **config.options_for_image_size((16, 24)))
    target = dataclasses.replace(config, **at_size)
    assert target.large_size == large
    params = parameters(config)
    found = fitting.adapt(
        params, config, registry.abstract(target)[1], target, reset=(), resize="bicubic"
    )
    for name, branch in target.branches.items():
        expected = interpolate(
            params["position"][name], branch.grid, method="bicubic", prefix=1,
            old_grid=config.branches[name].grid,
        )  # fmt: skip
        np.testing.assert_allclose(found["position"][name], expected, atol=1e-6)


def test_layer_decay_counts_stages():
    config = tiny()
    params = registry.abstract(config)[1]
    leaves = zip(patterns.names(params), jax.tree.leaves(params), strict=True)
    shapes = {name: leaf.shape for name, leaf in leaves}
    optim = default_config().optim
    optim.layer_decay = 0.5
    found = learning_rates(optim, shapes, config.layers)
    by_part = {}
    for name, rate in found.items():
        part = "/".join(name.split("/")[: 2 if name.startswith("stages") else 1])
        by_part.setdefault(part, set()).add(float(rate))
    assert by_part == {
        "embedding": {0.125}, "class_token": {0.125}, "position": {0.125}, "stages/1": {0.25},
        "stages/2": {0.5}, "norm": {1.0}, "head": {1.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("S", dict(image_size=224), "image_size 224 cannot be split into patches of 12: take 216 or 228"),
        ("S", dict(image_size="240x250"), "image_size 240x250 .* take 240 or 252"),
        ("S", dict(large_image_size=230), "model.large_image_size 230 .* of 16: take 224 or 240"),
        ("S", dict(large_image_size="big"), "large_image_size = 'big' is no image size"),
        ("S", dict(heads=5), "width 192 cannot be split into 5 heads"),
        ("S", dict(depths=((1, 4), (0, 4))), "each stage needs two numbers of blocks, both at least 1"),
        ("S", dict(depths=((1, 4, 1),)), "each stage needs two numbers"),
        ("9-dagger", dict(patch=14, image_size=252), "for patches of 12 and 16, not .*model.patch=14"),
        ("12", dict(), "there is no CrossViT of size '12'; did you mean"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(f"CrossViT-{name}", **options)
