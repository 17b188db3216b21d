"""Shared by the tests of data: images to change."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def images():
    """Smooth, noisy, narrow-range and constant images: (6, 37, 30, 3) uint8."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:37, :30]
    smooth = np.stack([6 * y, 8 * x, 3 * (x + y)], -1)
    noise = rng.integers(0, 256, (3, 37, 30, 3))
    narrow = rng.integers(90, 141, (37, 30, 3))
    constant = np.full((37, 30, 3), 77)
    return np.stack([smooth, *noise, narrow, constant]).astype(np.uint8)
