"""Files beside images that are no examples: arrays of the same name (0.npy beside 0.png), and masks (0_mask.png, or the
PNG of each JPEG where all have one).
"""

import os
import re
from collections.abc import Iterable, Sequence

from vit_jax.base.errors import ConfigError
from vit_jax.data.sources.text import readable
from vit_jax.data.sources.unused import Unused

ARRAYS = "arrays (.npy) beside a picture of the same name"
MASKS = "named like masks of images beside them"

_FEW_FILES = 4  # the least number of files that make a pattern
_MASK_WORDS = (
    "mask", "masks", "seg", "segm", "segmentation", "label", "labels", "lbl", "gt", "groundtruth", "ground_truth",
    "annotation", "annotations", "annot", "matte", "trimap", "alpha", "depth", "heatmap", "overlay", "roi", "semantic",
    "instance", "panoptic",
)  # fmt: skip
_MASK_WORD = f"(?:{'|'.join(_MASK_WORDS)})"
_MASK_AT_END = re.compile(rf"(.+?)[ ._-]+{_MASK_WORD}(?:[ ._-]?\d+)?", re.IGNORECASE)
_MASK_AT_START = re.compile(rf"{_MASK_WORD}[ ._-]+(.+)", re.IGNORECASE)
_MASK_FOLDER = re.compile(_MASK_WORD, re.IGNORECASE)
_IMAGE_FOLDERS = ("images", "image", "imgs", "img", "")


def is_array(name: str) -> bool:
    """Whether it is a .npy file: an image, unless a picture of the same name is beside it."""
    return name.lower().endswith(".npy")


def find_arrays(files: Iterable[str]) -> set[str]:
    """The .npy files among images that have a picture of the same name beside them."""
    files = list(files)
    arrays = [file for file in files if is_array(file)]
    if not arrays:
        return set()
    pictures = {_stem(file) for file in files if not is_array(file)}
    return {file for file in arrays if _stem(file) in pictures}


def find_masks(files: Iterable[str]) -> dict[str, str]:
    """The images that are named like masks of other images: mask → image.

    Args:
      files: images in the folders of a class, with their folders.
    """
    files = list(files)
    text = "\n".join(files).lower()
    if twins := _find_twins(files, text):
        return twins
    if not any(word in text for word in _MASK_WORDS):
        return {}  # quickly: there may be millions of files
    candidates = {file: bases for file in files if (bases := _bases(file))}
    if not candidates:
        return {}
    by_stem = {_stem(file): file for file in files if file not in candidates}
    masks = {}
    for file, bases in candidates.items():
        image = next((by_stem[base] for base in bases if base in by_stem), None)
        if image is not None:
            masks[file] = image
    return masks


def _find_twins(files: Sequence[str], text: str) -> dict[str, str]:
    """PNG → JPEG of the same name, if there are nothing but such pairs, and several of them.

    Args:
      text: of all files, in small letters.
    """
    if ".png" not in text or ".jp" not in text or len(files) < _FEW_FILES:
        return {}
    jpegs = {_stem(file): file for file in files if file.lower().endswith((".jpg", ".jpeg"))}
    pngs = {_stem(file): file for file in files if file.lower().endswith(".png")}
    if jpegs.keys() != pngs.keys() or len(jpegs) + len(pngs) < len(files):
        return {}
    return {png: jpegs[stem] for stem, png in pngs.items()}


def ask_about_masks(where: str, masks: dict[str, str]) -> ConfigError:
    """The question whether files that are named like masks are examples."""
    mask, image = next(iter(masks.items()))
    return ConfigError(
        f"{where}: {len(masks):,} files are {MASKS}, the first is {readable(mask)} beside {readable(image)}. Set "
        "--config.data.mask_files=skip if they are no examples, or =keep if they are (vit_jax prepare: --mask_files)"
    )


def _stem(file: str) -> str:
    return os.path.splitext(file)[0]


def _bases(file: str) -> Sequence[str]:
    """Without their endings, the images that a file could be the mask of; none if it is named like an image."""
    folder, base = os.path.split(_stem(file))
    for pattern in (_MASK_AT_END, _MASK_AT_START):
        if match := pattern.fullmatch(base):
            return [os.path.join(folder, match[1])]
    parent, last = os.path.split(folder)
    if not _MASK_FOLDER.fullmatch(last):
        return []
    return [os.path.join(parent, images, base) for images in _IMAGE_FOLDERS]


def find_examples(where: str, files: Sequence[str], mask_files: str, unused: Unused) -> list[str]:
    """The files of a class that are examples.

    Args:
      where: the name of the data set in errors.
      files: images in the folders of a class.
      mask_files: `config.data.mask_files`.
      unused: counts the files that are skipped.

    Raises:
      ConfigError: some are named like masks, and `mask_files` is 'ask'.
    """
    arrays = find_arrays(files)
    masks = find_masks(files) if mask_files != "keep" else {}
    if masks and mask_files == "ask":
        raise ask_about_masks(where, masks)
    unused.skip(ARRAYS, arrays)
    unused.skip(MASKS, masks)
    return [file for file in files if file not in arrays and file not in masks]
