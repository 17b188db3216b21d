"""Published models by their names in timm: what no weight file tells, such as heads, activation and how
images are prepared. The names and facts are in published.json, which tests/interchange/published_names.py
writes.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from absl import logging

from vit_jax.base import schema, sizes
from vit_jax.base.sizes import Size, height_width
from vit_jax.models.preprocessing import Preprocessing

FILE = pathlib.Path(__file__).with_name("published.json")


class Architecture(NamedTuple):
    """A model without its weights.

    Attributes:
      kind: timm's class.
      arguments: of that class, as JSON, those that are not its defaults. `norm_eps` is the epsilon
        of `norm_layer`.
      tags: of its published weights, each with how its images are prepared; {} for a model that timm
        has without weights.
    """

    kind: str
    arguments: dict[str, Any]
    tags: dict[str, Preprocessing]


@functools.cache
def architectures() -> dict[str, Architecture]:
    """All by their names."""
    content = json.loads(FILE.read_text())
    prepared = [
        preprocessing_from(dict(zip(_FIELDS, row, strict=True))) for row in content["preprocessing"]
    ]
    return {
        name: Architecture(
            *known, {tag: prepared[i] for tag, i in content["names"].get(name, {}).items()}
        )
        for name, known in content["architectures"].items()
    }


def names() -> list[str]:
    """Every published name, with its tag."""
    return [
        f"{name}.{tag}" if tag else name
        for name, architecture in architectures().items()
        for tag in architecture.tags
    ]


def nearest_published(name: str) -> str:
    """'; did you mean …?' for a name that is not published."""
    return schema.nearest(name, names() if "." in name else architectures())


def named_in(parts: Iterable[str]) -> tuple[str, str]:
    """The published model that words name, such as the parts of a path: (architecture, tag), the tag ''
    where they do not say it; ('', '') for none. The last part that names one decides.
    """
    known = architectures()
    for part in reversed(list(parts)):
        for word in re.findall(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*", part):
            name, *rest = word.split(".")
            name = name.rpartition("__")[2]  # as caches write owners before names
            if re.fullmatch(r"efficientnet_\w+", name):
                return name, ""  # not TensorFlow's, though it has the same tensors
            if name in known:
                return name, next((tag for tag in rest if tag in known[name].tags), "")
    return "", ""


def preprocessing(architecture: str, tag: str) -> Preprocessing | None:
    """How images are prepared for a published model; `None` if its tags differ and none is given."""
    entry = architectures().get(architecture)
    if entry is None:
        return None
    if tag in entry.tags:
        return entry.tags[tag]
    different = set(entry.tags.values())
    return different.pop() if len(different) == 1 else None


def preprocessing_from(
    metadata: Mapping[str, Any], source: object = "timm"
) -> Preprocessing | None:
    """What a `pretrained_cfg` of timm says of images; fields that it leaves out are timm's own. `None`
    if it says nothing, or, with a warning that names `source`, what we cannot do.
    """
    if not {"mean", "std", "input_size"} <= metadata.keys():
        return None
    interpolation, mode = (
        metadata.get("interpolation") or "bicubic",
        metadata.get("crop_mode") or "center",
    )
    if interpolation not in ("bilinear", "bicubic") or mode not in _CROPS:
        logging.warning(
            "%s says of its images interpolation %r and crop_mode %r, which are not supported",
            source, interpolation, mode,
        )  # fmt: skip
        return None
    size = sizes.parse(tuple(metadata["input_size"][1:]))
    share, smaller = metadata.get("crop_pct", 0.875), min(height_width(size))
    crop = "resize" if mode == "squash" and share == 1 else _CROPS[mode]
    # Rounded down as in timm, plus a margin for rounding in our own division.
    side = 256 if crop == "resize" else math.floor(smaller / share + 1e-6)
    return Preprocessing(
        size, tuple(metadata["mean"]), tuple(metadata["std"]), crop, side, interpolation
    )


def at_size(prepared: Preprocessing, size: Size, source: object) -> Preprocessing:
    """The same preparation for images of another size, as timm has it: the crop stays the same share of the image."""
    if prepared.image_size == size:
        return prepared
    side = prepared.eval_resize
    if prepared.eval_crop != "resize":
        smaller = min(height_width(prepared.image_size))
        share = _shares().get(prepared) or _share(smaller, side)
        side = math.floor(min(height_width(size)) / share + 1e-6)
    before, now = sizes.size_text(prepared.image_size), sizes.size_text(size)
    logging.info(
        "%s: its model is for images of %s pixels, its published preparation for %s: the smaller side is resized to "
        "%d, not %d, before images are cut", source, now, before, side, prepared.eval_resize,
    )  # fmt: skip
    return dataclasses.replace(prepared, image_size=size, eval_resize=side)


@functools.cache
def _shares() -> dict[Preprocessing, float]:
    """The `crop_pct` of every published preparation."""
    rows = json.loads(FILE.read_text())["preprocessing"]
    records = [dict(zip(_FIELDS, row, strict=True)) for row in rows]
    return {preprocessing_from(metadata): metadata["crop_pct"] for metadata in records}


def _share(smaller: int, side: int) -> float:
    """The `crop_pct` that made `side` of `smaller`, which it was rounded down to: the shortest decimal that does."""
    shares = (round(smaller / side, digits) for digits in range(1, 5))
    return next((p for p in shares if p and math.floor(smaller / p + 1e-6) == side), smaller / side)


_CROPS = {"center": "torchvision", "squash": "squash"}  # `crop_mode` -> `eval_crop`
_FIELDS = ("input_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")
