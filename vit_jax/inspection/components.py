"""Principal components: of filters, and of the features of patches."""

import numpy as np


def principal_components(rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The directions in which rows differ most.

    Args:
      rows: (n, D) float64, less their mean.
      count: how many directions, at most.

    Returns:
      directions (count, D) of length 1, the first largest, each with the sign that makes its largest number
      positive; and their shares of the rows' variance (count,).
    """
    _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
    directions, variance = directions[:count], sizes**2
    largest = np.take_along_axis(directions, np.abs(directions).argmax(1)[:, None], axis=1)
    return directions * np.where(largest < 0, -1, 1), variance[:count] / (variance.sum() or 1)
