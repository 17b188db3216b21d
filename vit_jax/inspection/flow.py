"""Attention flow (arXiv 2005.00928): how much could flow from an output token to each input token, if
layers were pipes as wide as their attention. Slow: a maximum flow for each input token.
"""

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

# Capacities are whole numbers there; all that leaves a token sums to one, and must fit 32 bits.
_UNIT = 10**9


def flow(weights: np.ndarray, source: int = 0) -> np.ndarray:
    """The maximum flow from one token after the last layer to each token before the first.

    Args:
      weights: (L, T, T), averaged over heads: one image.
      source: the token, by default the class token.

    Returns:
      (T,) float64, of capacities (A + I) with rows normalised; within 1e-6.
    """
    layers, tokens = weights.shape[:2]
    capacity = weights.astype(np.float64) + np.eye(tokens)
    capacity /= capacity.sum(-1, keepdims=True)
    # Node (layer, token) is layer · T + token; layer 0 is the input.
    upper, query, key = np.indices(capacity.shape)
    rows, columns = ((upper + 1) * tokens + query).ravel(), (upper * tokens + key).ravel()
    units = np.rint(capacity * _UNIT).astype(np.int32).ravel()
    nodes = (layers + 1) * tokens
    graph = coo_array((units, (rows, columns)), (nodes, nodes)).tocsr()
    start = layers * tokens + source
    flows = [maximum_flow(graph, start, token).flow_value for token in range(tokens)]
    return np.array(flows) / _UNIT
