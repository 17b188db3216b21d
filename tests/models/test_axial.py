"""Axial-ViT and AxialResNet against their formulas in float64."""

import math
import re

import jax
import numpy as np
import pytest

from tests.models import oracles
from tests.models.conftest import parameters, run
from vit_jax.base.errors import ConfigError
from vit_jax.compute import attend, choices
from vit_jax.devices import meshes
from vit_jax.models import registry
from vit_jax.models.zoo import axial_resnet

COMMON = dict(num_classes=5, remat="none", unroll=1)
VIT = dict(patch=4, depth=2, width=16, mlp_dim=32, heads=2) | COMMON
RESNET = dict(units=(1, 1)) | COMMON


def vit(**options):
    return registry.model_config("Axial-ViT-B/16", **VIT | {"image_size": (8, 12)} | options)


def resnet(**options):
    # Maps of 9 x 8, of which the second unit makes 5 x 4.
    return registry.model_config("AxialResNet-50", **RESNET | {"image_size": (36, 32)} | options)


def images(config, batch=3):
    shape = (batch, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def vit_forward(config, p, x):
    """Logits in float64: ViT Eq. 2 and 3 in every row, then in every column (ViT §D.6)."""

    def half(p, lines):
        y = oracles.layer_norm(p["attention_norm"], lines)
        q, k, v = oracles.heads(p["attention"], y)
        lines = lines + oracles.attended(p["attention"], oracles.maps(q, k), v)
        y = oracles.linear(p["mlp"]["up"], oracles.layer_norm(p["mlp_norm"], lines))
        return lines + oracles.linear(p["mlp"]["down"], gelu_tanh(y))

    rows, columns = config.grid
    x = oracles.patches(p["embedding"], x) + p["position"]
    x = x.reshape(len(x), rows, columns, -1)
    for i in range(config.depth):
        block = oracles.layer(p["layers"], i)
        x = np.stack([half(block["row"], x[:, r]) for r in range(rows)], 1)
        x = np.stack([half(block["column"], x[:, :, c]) for c in range(columns)], 2)
    x = oracles.layer_norm(p["norm"], x.reshape(len(x), rows * columns, -1))
    return oracles.linear(p["head"], x.mean(1))


def group_norm(p, x, groups=32):
    """x (B, ..., C)."""
    y = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    y = (y - y.mean((1, 3), keepdims=True)) / np.sqrt(y.var((1, 3), keepdims=True) + 1e-4)
    return y.reshape(x.shape) * p["scale"] + p["bias"]


def standardised(kernel):
    centred = kernel - kernel.mean((0, 1, 2))
    return centred / np.sqrt(np.square(centred).mean((0, 1, 2)) + 1e-10)


def windows(x, size, stride, fill):
    """(B, H', W', C, S, S), with TensorFlow's SAME padding."""
    pads = [(0, 0)]
    for length in x.shape[1:3]:
        pad = max((-(-length // stride) - 1) * stride + size - length, 0)
        pads.append((pad // 2, pad - pad // 2))
    padded = np.pad(x, [*pads, (0, 0)], constant_values=fill)
    found = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
    return found[:, ::stride, ::stride]


def convolution(p, x, stride=1):
    kernel = standardised(p["kernel"])
    return np.einsum("bhwcij,ijcd->bhwd", windows(x, len(kernel), stride, 0), kernel)


def attention(p, line, heads):
    """Lines (B, N, D): every term of every pair of places by itself."""
    batch, n, width = line.shape
    size = width // heads
    qkv = group_norm(p["qkv_norm"], line @ p["qkv"]["kernel"]).reshape(batch, n, heads, 2 * size)
    q, k, v = qkv[..., : size // 2], qkv[..., size // 2 : size], qkv[..., size:]
    of_q, of_k, of_v = np.split(p["relative"], [size // 2, size])
    logits = np.empty((batch, heads, n, n))
    for i in range(n):
        for j in range(n):
            offset = j - i + n - 1
            logits[:, :, i, j] = (q[:, i] * k[:, j]).sum(-1)
            logits[:, :, i, j] += q[:, i] @ of_k[:, offset] + k[:, i] @ of_q[:, offset]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.zeros((batch, n, heads, size))
    for i in range(n):
        for j in range(n):
            out[:, i] += weights[:, :, i, j, None] * (v[:, j] + of_v[:, j - i + n - 1])
    return group_norm(p["out_norm"], out.reshape(batch, n, width))


def resnet_forward(config, p, x):
    """Logits in float64 (the authors' code of the ViT paper's AxialResNet)."""

    def unit(p, x, stride):
        y = np.maximum(group_norm(p["norm1"], convolution(p["conv1"], x)), 0)
        columns = y.swapaxes(1, 2)
        lines = columns.reshape(-1, *columns.shape[2:])
        y = attention(p["down"], lines, config.heads).reshape(columns.shape).swapaxes(1, 2)
        lines = y.reshape(-1, *y.shape[2:])
        y = attention(p["across"], lines, config.heads).reshape(y.shape)
        if stride == 2:
            y = windows(y, 2, 2, 0).mean((4, 5))
        y = group_norm(p["norm3"], convolution(p["conv3"], np.maximum(y, 0)))
        if "shortcut" in p:
            x = group_norm(p["shortcut_norm"], convolution(p["shortcut"], x, stride))
        return np.maximum(x + y, 0)

    x = np.maximum(group_norm(p["root_norm"], convolution(p["root"], x, 2)), 0)
    x = windows(x, 3, 2, -np.inf).max((4, 5))
    for number, count in enumerate(config.units):
        stage = p["stages"][str(number + 1)]
        x = unit(stage["first"], x, 2 if number else 1)
        for i in range(count - 1):
            x = unit(oracles.layer(stage["layers"], i), x, 1)
    return oracles.linear(p["head"], x.mean((1, 2)))


def test_units_at_one_resolution_are_those_of_float64():
    config = resnet(units=(2,), image_size=(20, 36))
    params, x = parameters(config), images(config, 2)
    p = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    found, expected = run(config, params, x).logits, resnet_forward(config, p, x.astype(np.float64))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_on_one_row_an_axial_vit_is_a_vit():
    """Its columns, of one patch each, add nothing here."""
    config = vit(image_size=(4, 24))
    params, x = parameters(config), images(config)
    column = params["layers"]["column"]
    for last in (column["attention"]["out"], column["mlp"]["down"]):
        last.update(jax.tree.map(np.zeros_like, dict(last)))
    row = {name: tree for name, tree in params.items() if name not in ("layers", "norm")}
    row["encoder"] = {"layers": params["layers"]["row"], "norm": params["norm"]}
    plain = registry.model_config("ViT-B/4", pool="mean", image_size=(4, 24), **VIT)
    np.testing.assert_allclose(run(config, params, x).logits, run(plain, row, x).logits, atol=1e-5)


def test_what_is_captured_of_an_axial_vit_are_maps_of_rows_and_of_columns():
    config = vit()
    captured = run(config, parameters(config), images(config), capture=True).intermediates
    assert captured["row_attention"].shape == (2, 3, 2, 2, 3, 3)
    assert captured["column_attention"].shape == (2, 3, 3, 2, 2, 2)
    for name in ("row_attention", "column_attention"):
        np.testing.assert_allclose(captured[name].sum(-1), 1, rtol=1e-5)


def test_an_axial_resnet_takes_no_kernel_of_attention():
    mesh = meshes.make_mesh({"data": -1, "fsdp": 1, "tensor": 1})

    def summary(config):
        with attend.record() as kinds:
            run(config, parameters(config), images(config))
        return choices.summarize(config, mesh, kinds)

    assert summary(resnet()) == "remat: none, computed in: float32"
    assert summary(vit()).startswith("attention: xla, layers: scanned")


def test_tables_of_relative_positions_are_interpolated_between_their_ends():
    table = np.arange(5.0)[None] ** 2
    np.testing.assert_allclose(axial_resnet.resize_offsets(table, 5), table)
    np.testing.assert_allclose(
        axial_resnet.resize_offsets(table, 9), [[0, 0.5, 1, 2.5, 4, 6.5, 9, 12.5, 16]]
    )
    np.testing.assert_allclose(axial_resnet.resize_offsets(table, 3), [[0, 4, 16]])


def test_published_sizes_are_counted_by_hand():
    block = 2 * (4 * 768 * 769 + 2 * 768 * 3072 + 3072 + 768 + 4 * 768)
    for patch, tokens in ((16, 196), (32, 49)):
        config = registry.model_config(f"Axial-ViT-B/{patch}")
        body = 12 * block + 768 * (3 * patch**2 + 1 + tokens + 2)
        assert registry.count_parameters(config) == body + 769 * 1000
    config = registry.model_config("AxialResNet-50")
    expected, inputs, side = 147 * 64 + 2 * 64 + 2049 * 1000, 64, 56
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for unit in range(count):
            n = side // 2 ** max(stage - (unit == 0), 0)
            attention = 2 * inner**2 + 6 * inner + inner * (2 * n - 1)
            expected += inputs * inner + 2 * inner + 2 * attention + 4 * inner**2 + 8 * inner
            expected += (unit == 0) * (inputs * 4 * inner + 8 * inner)
            inputs = 4 * inner
    assert registry.count_parameters(config) == expected
    assert math.prod(config.grids[0]) == 56 * 56 and config.tokens == 49


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Axial-ViT-Q/16", {}, "no ViT of size 'Q'"),
        ("Axial-ViT-B/16", {"image_size": 225}, "cannot be split into patches of 16"),
        ("Axial-ViT-B/16", {"heads": 7}, "width 768 cannot be split into 7 heads"),
        ("AxialResNet-49", {}, "no AxialResNet of size '49'"),
        ("AxialResNet-50", {"heads": 5}, "64 channels cannot be split into 5 heads"),
        ("AxialResNet-50", {"units": ()}, "at least one stage"),
        ("AxialResNet-50", {"width_factor": 0.7}, "take a multiple of 0.5"),
    ],
)
def test_what_is_no_axial_network_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(name, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smoke", "smoke-resnet"])
def test_a_small_one_learns_digits(command, tmp_path, kind):
    recipe = f"configs/axial.py:{kind}"
    code, out, _ = command("train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}")
    assert code == 0 and float(re.search(r"accuracy ([\d.]+)", out)[1]) >= 0.95
