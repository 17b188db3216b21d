"""The factored second moment of Scaling ViT §3.4."""

import jax
import numpy as np
import pytest

from vit_jax.optim.adafactor import Factored, factored_axes


def gradients(shape, steps=4):
    rng = np.random.default_rng(3)
    scale = np.exp(rng.standard_normal(shape))
    return [(scale * rng.standard_normal(shape)).astype(np.float32) for _ in range(steps)]


def reference(start, grads, lr, b1, cap):
    """A matrix: V = r c^T / mean(r), with r and c running means of g^2 along rows and columns, then
    momentum.
    """
    p, m = start.astype(np.float64), np.zeros(start.shape)
    r, c = np.zeros(start.shape[0]), np.zeros(start.shape[1])
    for t, g in enumerate(grads, start=1):
        g = g.astype(np.float64)
        decay = min(cap, 1 - t**-0.8)
        r = decay * r + (1 - decay) * (g**2 + 1e-30).mean(axis=1)
        c = decay * c + (1 - decay) * (g**2 + 1e-30).mean(axis=0)
        m = b1 * m + (1 - b1) * g / np.sqrt(np.outer(r, c) / r.mean())
        p = p - lr * m
        yield p


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (32, 32)])
def test_a_matrix_follows_the_formula(kit, shape):
    # With a cap of 0.5 the third update (1 - 3^-0.8 = 0.58) is the first that it changes.
    config = kit.config(name="adafactor", lr=0.01, b2=0.5)
    start, grads = np.ones(shape, np.float32), gradients(shape)
    trajectory, _ = kit.train(config, {"kernel": start}, [{"kernel": g} for g in grads])
    for ours, theirs in zip(trajectory, reference(start, grads, 0.01, 0.9, 0.5), strict=True):
        np.testing.assert_allclose(ours["kernel"], theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 34), (36, 3, 2, 33), (2, 33, 36), (40,), (16, 16, 3)])
def test_stacked_layers_are_updated_as_if_each_were_alone(kit, shape):
    depth = 40  # as long as the axes that are factored, so that it would be one of them by its size
    config = kit.config(name="adafactor", lr=0.1)
    grads = gradients((depth, *shape), steps=3)
    start = np.zeros((depth, *shape), np.float32)
    stacked = kit.train(
        config, {"layers": {"kernel": start}}, [{"layers": {"kernel": g}} for g in grads]
    )[0][-1]
    alone = {f"block{i}": {"kernel": start[i]} for i in (0, depth - 1)}
    separate = kit.train(
        config, alone, [{f"block{i}": {"kernel": g[i]} for i in (0, depth - 1)} for g in grads]
    )[0][-1]
    for i in (0, depth - 1):
        np.testing.assert_allclose(
            stacked["layers"]["kernel"][i], separate[f"block{i}"]["kernel"], rtol=1e-5, atol=1e-7
        )


def test_joint_qkv_is_treated_as_three_separate_kernels(kit):
    config = kit.config(name="adafactor", lr=0.1)
    grads = gradients((48, 3, 2, 32), steps=3)
    joint = kit.train(
        config, {"qkv": {"kernel": 0 * grads[0]}}, [{"qkv": {"kernel": g}} for g in grads]
    )[0][-1]
    parts = lambda x: {name: {"kernel": x[:, i]} for i, name in enumerate("qkv")}  # noqa: E731
    separate = kit.train(config, parts(0 * grads[0]), [parts(g) for g in grads])[0][-1]
    for i, name in enumerate("qkv"):
        np.testing.assert_allclose(
            joint["qkv"]["kernel"][:, i], separate[name]["kernel"], rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("head/kernel", (768, 1000), (1, 0)),
        ("head/kernel", (768, 31), None),
        ("head/bias", (1000,), None),
        ("embedding/kernel", (16, 16, 3, 768), None),
        ("encoder/layers/mlp/up/kernel", (48, 768, 3072), (2, 1)),
        ("encoder/layers/mlp/up/bias", (48, 3072), None),
        ("encoder/layers/attention/qkv/kernel", (12, 768, 3, 12, 64), (1, 4)),
        ("encoder/layers/attention/out/kernel", (12, 12, 64, 768), (3, 2)),
        ("pool/attention/out/kernel", (64, 64, 64), (2, 1)),
    ],
)
def test_the_two_largest_axes_but_never_the_layers_are_factored(name, shape, expected):
    assert factored_axes(name, shape) == expected


def test_the_second_moment_of_a_stacked_kernel_is_two_arrays_per_layer(kit):
    params = {"layers": {"kernel": jax.ShapeDtypeStruct((12, 64, 256), np.float32)}}
    optimizer, _ = kit.make(kit.config(name="adafactor", moment_dtype="bfloat16"), params)
    state = jax.eval_shape(optimizer.init, params)
    factored = [
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Factored))
        if isinstance(x, Factored)
    ]
    assert [(x.rows.shape, x.columns.shape) for x in factored] == [((12, 64), (12, 256))]


def test_a_gradient_of_zero_gives_a_finite_update(kit):
    params = {"kernel": np.ones((32, 32), np.float32)}
    trajectory, _ = kit.train(
        kit.config(name="adafactor"), params, [{"kernel": np.zeros((32, 32), np.float32)}] * 2
    )
    np.testing.assert_array_equal(trajectory[-1]["kernel"], 1)
