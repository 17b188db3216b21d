"""The answers of official code in `relatives`, and arithmetic in float64 to compare with: forward
passes are functions of nested dicts of arrays, as our models have them.
"""

import json

import jax
import numpy as np

from vit_jax.base import patterns


def answers_of(shared_data, name):
    """(arrays of a checkpoint, answers by name, arguments of the official constructor)."""
    folder = shared_data / "oracle" / "relatives"
    arrays = dict(np.load(folder / f"{name}.ckpt.npz"))
    answers = dict(np.load(folder / f"{name}.io.npz"))
    arguments = json.loads(str(answers.pop("meta")))["arguments"]
    return arrays, answers, arguments


def relative_of(shared_data, name):
    """(path of the checkpoint, and the above)."""
    path = shared_data / "oracle" / "relatives" / f"{name}.ckpt.npz"
    return path, *answers_of(shared_data, name)


def assert_close(found, expected, bound=1e-5, err_msg=""):
    """To `bound` of the largest expected value, absolute up to 1. Every layer rounds at the size of
    the values that pass through it, and each processor sums in its own order.
    """
    atol = bound * max(1, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=atol, err_msg=err_msg)


def in_float64(params, variables):
    """Both as one tree."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), patterns.union(params, variables))


def directional(loss, params, *, step=1e-6, seed=0):
    """By parameter, a random direction and the derivative of `loss(params)`, a NumPy function in
    float64, along it.
    """
    rng = np.random.default_rng(seed)
    for target in patterns.names(params):
        direction = {}

        def moved(by, target=target, direction=direction):
            def move(name, x):
                if name != target:
                    return x
                if name not in direction:
                    direction[name] = rng.standard_normal(x.shape)
                return x + by * direction[name]

            return patterns.map_named(move, params)

        slope = (loss(moved(step)) - loss(moved(-step))) / (2 * step)
        yield target, direction[target], slope


def check_gradient(learn, exact, params):
    """Asserts that logits and the gradient of every parameter are those of float64.

    Args:
      learn: (params, weights) -> (gradient of the sum of weights * logits, logits), in float32.
      exact: params -> logits (3, 5) in float64.
      params: float32 arrays.
    """
    weights = np.sin(1 + np.arange(15)).reshape(3, 5)
    gradient, logits = learn(params, weights)
    np.testing.assert_allclose(logits, exact(params), atol=1e-5)
    gradient = patterns.named(gradient)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    for name, direction, slope in directional(lambda p: (exact(p) * weights).sum(), params):
        found = np.vdot(np.asarray(gradient[name], np.float64), direction)
        bound = 1e-4 * np.linalg.norm(gradient[name]) * np.linalg.norm(direction) + 1e-4
        assert abs(found - slope) < bound, name


def linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def layer_norm(p, x, epsilon=1e-6):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + epsilon)
    return scaled * p["scale"] + p["bias"]


def batch_norm(p, x, training, axis=-1, epsilon=1e-5):
    x = np.moveaxis(x, axis, -1)
    others = tuple(range(x.ndim - 1))
    mean, var = (x.mean(others), x.var(others)) if training else (p["mean"], p["var"])
    y = (x - mean) / np.sqrt(var + epsilon) * p["scale"] + p["bias"]
    return np.moveaxis(y, -1, axis)


def convolution(kernel, x, stride=1):
    """kernel (S, S, inputs, outputs), x (B, H, W, C), zeros around it: as PyTorch pads S // 2."""
    size = len(kernel)
    x = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    return np.einsum("bhwcij,ijcd->bhwd", windows[:, ::stride, ::stride], kernel)


def patches(p, x):
    """Patch embedding, row by row."""
    side = len(p["kernel"])
    b, h, w, c = x.shape
    x = x.reshape(b, h // side, side, w // side, side, c)
    tokens = np.einsum("bhiwjc,ijcd->bhwd", x, p["kernel"]) + p["bias"]
    return tokens.reshape(b, -1, tokens.shape[-1])


def heads(p, x):
    """Queries, keys and values (B, H, N, C) of tokens (B, N, D)."""
    return np.einsum("bnd,dthc->tbhnc", x, p["qkv"]["kernel"]) + p["qkv"]["bias"][:, None, :, None]


def maps(q, k):
    logits = np.einsum("bhqc,bhnc->bhqn", q, k) / np.sqrt(q.shape[-1])
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def attended(p, weights, v):
    out = p["out"]
    return np.einsum("bhqn,bhnc,hcd->bqd", weights, v, out["kernel"]) + out["bias"]


def gelu(x):
    import scipy.special

    return 0.5 * x * (1 + scipy.special.erf(x / np.sqrt(2)))


def layer(stacked, number):
    return jax.tree.map(lambda x: x[number], stacked)
