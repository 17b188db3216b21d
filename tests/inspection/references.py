"""What is inspected, in NumPy and float64, written out as the papers say it."""

import numpy as np


def distance(weights, grid, size):
    """Of one image and head, (T, T): the authors' bookkeeping, patch by patch."""
    count = grid[0] * grid[1]
    patches, total = weights[-count:, -count:].astype(np.float64), 0.0
    side = size[0] / grid[0], size[1] / grid[1]
    for query in range(count):
        for key in range(count):
            down = (query // grid[1] - key // grid[1]) * side[0]
            across = (query % grid[1] - key % grid[1]) * side[1]
            total += patches[query, key] * np.sqrt(down**2 + across**2)
    return total / count


def rollout(weights):
    """(L, H, T, T) of one image to (T, T): products of all (A + I), rows normalised."""
    joint = np.eye(weights.shape[-1])
    for layer in weights.astype(np.float64).mean(1):
        mixed = layer + np.eye(len(layer))
        joint = mixed / mixed.sum(-1, keepdims=True) @ joint
    return joint


def entropy(weights):
    """(…, Q, K) to (…)."""
    weights = weights.astype(np.float64)
    return -(weights * np.log(weights)).sum(-1).mean(-1)


def similarity(weights):
    """(L, H, T, T) of one image to (L, L)."""
    rows = weights.astype(np.float64)
    rows /= np.sqrt((rows**2).sum(-1, keepdims=True))
    return np.array([[(a * b).sum(-1).mean() for b in rows] for a in rows])
