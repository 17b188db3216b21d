"""Quantities that say whether layers do their work: functions of NumPy arrays in float64."""

import numpy as np

OUTLIER = 3.0  # times the median norm
SILENT = 0.01  # of the median deviation of a layer's channels


def effective_rank(tokens: np.ndarray) -> float:
    """In how many directions tokens (N, D) differ from their mean: the exponential of the entropy of
    their singular values, which sum to one (Roy and Vetterli, 2007). Between 1 and min(N, D).
    """
    tokens = np.asarray(tokens, np.float64)
    sizes = np.linalg.svd(tokens - tokens.mean(0), compute_uv=False)
    total = sizes.sum()
    if not total:
        return 1.0
    shares = sizes[sizes > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


def outliers(norms: np.ndarray) -> np.ndarray:
    """Which tokens have norms (L, …) above `OUTLIER` times their layer's median: (L, …) bool."""
    norms = np.asarray(norms, np.float64)
    median = np.median(norms.reshape(len(norms), -1), axis=1)
    return norms > OUTLIER * median.reshape(-1, *[1] * (norms.ndim - 1))


def silent(deviations: np.ndarray) -> np.ndarray:
    """How many channels of each layer hardly change over tokens and images: deviations (L, D) to (L,)."""
    deviations = np.asarray(deviations, np.float64)
    return (deviations < SILENT * np.median(deviations, axis=1, keepdims=True)).sum(1)
