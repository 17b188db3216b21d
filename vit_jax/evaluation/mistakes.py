"""The surest mistakes of a classifier as small pictures, for a person to look at: often the label is what is wrong."""

from collections.abc import Sequence

import numpy as np
from etils import epath
from PIL import Image, ImageOps

from vit_jax.base import outputs
from vit_jax.data.decoding.decode import decode
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, Source

FOLDER = "mistakes"
_MOST, _SIDE = 48, 192  # pictures, and pixels of a side


def surest_mistakes(targets: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """The rows, at most `_MOST`, whose best class is no class of theirs, the most probable first.

    Args:
      targets: (n, classes) bool.
      probabilities: (n, classes).
    """
    best = probabilities.argmax(-1)
    rows = np.arange(len(best))
    wrong = np.flatnonzero(~targets[rows, best])
    return wrong[np.argsort(-probabilities[wrong, best[wrong]], kind="stable")][:_MOST]


def write_pictures(
    folder: epath.Path, source: Source, places: Sequence[int], data: Data
) -> list[str]:
    """Writes a small JPEG of each example into FOLDER/mistakes, and removes those of an earlier evaluation.

    Args:
      places: of the examples in `source`.
      data: that section of the config.

    Returns:
      The names of the files below `folder`, in the order of `places`; '' of one that is no picture.
    """
    below = outputs.make_folder(folder / FOLDER, "out")
    for old in below.glob("*.jpg"):
        old.unlink()
    names = []
    for number, place in enumerate(places):
        record = source[int(place)]
        try:
            limits = dict(max_pixels=data.max_pixels, max_value=data.max_value)
            pixels = decode(record.image, name=record.name, **limits)
        except BadImage:  # of other channels than a picture's
            names.append("")
            continue
        small = ImageOps.contain(Image.fromarray(pixels), (_SIDE, _SIDE))
        names.append(f"{FOLDER}/{number:02}.jpg")
        with (folder / names[-1]).open("wb") as file:
            small.save(file, format="JPEG", quality=85)
    return names
