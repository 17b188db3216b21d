"""Patch sizes by step, `config.data.patch_sizes` (FlexiViT, arXiv 2212.08013): all images have one size, and each step
splits them into patches of another. What becomes of kernel and positions is in `models/resized.py`.

A batch says by its shape what its patches are, see `contract.split_images`, so that each size has a program. The size
is a function of (seed, step). Runs without patch sizes do not import this file.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data

_FIELD = "config.data.patch_sizes"


def find_sizes(data: Data) -> dict[int, float]:
    """Share of the steps by patch size, the smallest first, whose steps are the longest. Shares sum to 1.

    Raises:
      ConfigError: one of them is no size, or another option of `data` excludes them.
    """
    for field in ("views", "size_schedule", "native_tokens"):
        if value := getattr(data, field):
            raise ConfigError(
                f"{_FIELD} is for images of one size: set config.data.{field}={type(value)()!r}"
            )
    if data.permute != "none":
        raise ConfigError(
            f"{_FIELD}: config.data.permute = {data.permute!r} permutes patches of one size alone"
        )
    shares = {}
    for entry in data.patch_sizes:
        size, share = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (entry, 1)
        _check_size(size, share, data)
        if size in shares:
            raise ConfigError(f"{_FIELD} names {size} twice: give it a share, ({size}, 2)")
        shares[size] = share
    total = sum(shares.values())
    return {size: shares[size] / total for size in sorted(shares)}


def make_size_choice(data: Data, draw: Callable[[int], float]) -> Callable[[int], int]:
    """Step, from 0, -> which of `find_sizes` it has.

    Args:
      draw: step -> a number in [0, 1), by the seed.
    """
    ends = _ends(data)
    return lambda step: bisect.bisect_right(ends, draw(step))


def count_sizes(data: Data, numbers: np.ndarray) -> list[int]:
    """How many of the steps for which these numbers were drawn have each of `find_sizes`."""
    ends = _ends(data)
    return np.bincount(np.searchsorted(ends, numbers, "right"), minlength=len(ends) + 1).tolist()


def _ends(data: Data) -> list[float]:
    return list(itertools.accumulate(find_sizes(data).values()))[:-1]


def split_evenly(data: Data) -> list[Data]:
    """`data` for batches of each of `find_sizes`."""
    return [dataclasses.replace(data, patch_sizes=(size,)) for size in find_sizes(data)]


def _check_size(size: object, share: object, data: Data) -> None:
    numbers = [x for x in (size, share) if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) < 2 or not isinstance(size, int):
        raise ConfigError(f"{_FIELD}: {size!r} is no patch size in pixels, or (size, share)")
    if size < 2:
        raise ConfigError(
            f"{_FIELD} = {size}: a kernel cannot be resized to one pixel, which has no pattern; set 2 or more"
        )
    if share <= 0:
        raise ConfigError(f"{_FIELD}: the share of {size} is {share}; it must be above 0")
    height, width = sizes.height_width(data.image_size)
    image = sizes.size_text(data.image_size)
    if height % size or width % size:
        raise ConfigError(
            f"{_FIELD}: images of config.data.image_size = {image} cannot be split into patches of {size}; "
            f"possible are {', '.join(map(str, _divisors(height, width)))}"
        )
    if height * width == size * size:
        raise ConfigError(
            f"{_FIELD} = {size} leaves one patch of an image of {image} pixels: set a smaller one"
        )


def _divisors(height: int, width: int) -> list[int]:
    """Patch sizes that both sides allow, and that leave several patches."""
    largest = min(height, width, max(height, width) - 1)
    return [n for n in range(2, largest + 1) if not height % n and not width % n]
