"""Attention by its formula in NumPy float64."""

import numpy as np

SHAPE = (2, 9, 2, 16)  # batch, tokens, heads, head size


def draw(shape=SHAPE, seed=0):
    """Queries, keys, values and a gradient of the result."""
    q, k, v, dout = np.random.default_rng(seed).standard_normal((4, *shape))
    return 3 * q, k, v, dout


def reference(q, k, v, dout, bias=None):
    """softmax(q kᵀ / √C + bias) v and its gradients by the chain rule, in NumPy float64; of a bias
    that for each image.
    """
    q = q / np.sqrt(q.shape[-1])
    p = np.exp(np.einsum("bqhc,bnhc->bhqn", q, k) + (0 if bias is None else bias))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bqhc,bnhc->bhqn", dout, v)
    dlogits = p * (dp - (p * dp).sum(-1, keepdims=True))
    found = (
        np.einsum("bhqn,bnhc->bqhc", p, v),
        np.einsum("bhqn,bnhc->bqhc", dlogits, k) / np.sqrt(q.shape[-1]),
        np.einsum("bhqn,bqhc->bnhc", dlogits, q),
        np.einsum("bhqn,bqhc->bnhc", p, dout),
    )
    return found if bias is None else (*found, dlogits)


def exactness(q, k, *_):
    """The bound of `distances` in float32: an exponential is wrong by as much of itself as its logit is
    wrong by, which is rounded at the size of the largest.
    """
    logits = np.einsum("bqhc,bnhc->bhqn", q, k) / np.sqrt(q.shape[-1])
    return np.finfo(np.float32).eps * np.abs(logits).max()


def distances(found, expected):
    return [
        np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for a, b in zip(found, expected, strict=True)
    ]
