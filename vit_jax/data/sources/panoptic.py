"""Which segments panoptic masks have, by JSON files in COCO's form: beside each folder of masks a file of its name,
`masks.json` for `masks/`, or `masks/train.json` for `masks/train/`, with `categories` and `annotations`.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.labels.masks import IGNORED, MAX_CLASSES
from vit_jax.data.labels.segments import MOST_THINGS, PanopticTable, numbers, things_of

Segments = dict[str, np.ndarray]  # (n, 2) by the mask's file, see `PanopticTable`


def read_panoptic(root: epath.Path, files: Iterable[str]) -> tuple[PanopticTable, Segments] | None:
    """What the JSON files of a data set say; `None` if there are none.

    Args:
      root: the folder that `files` are relative to.
      files: all below `masks`; `masks.json` itself is looked for.

    Raises:
      ConfigError: a file is not in that form or says something twice, its categories are not those of the others, or
        an image has too many things.
    """
    json_files = sorted(name for name in files if name.endswith(".json"))
    json_files += ["masks.json"] if (root / "masks.json").exists() else []
    if not json_files:
        return None
    categories, segments = None, {}
    for name in json_files:
        try:
            content = json.loads(places.read_bytes(root / name))
            of_file = [
                (int(c["id"]), str(c["name"]), bool(c["isthing"])) for c in content["categories"]
            ]
            annotations = [
                (str(a["file_name"]), [_Segment.of(info) for info in a["segments_info"]])
                for a in content["annotations"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{root / name} is no JSON file of panoptic masks ({error!r}): it needs categories (id, name, isthing) "
                "and annotations (file_name, segments_info: id, category_id)"
            ) from None
        if categories not in (None, of_file):
            raise ConfigError(
                f"{root / name} and {root / json_files[0]} must have the same categories"
            )
        categories = of_file
        where = f"{root / name}: categories"
        _check_once([number for number, _, _ in categories], f"{where} has the id")
        _check_once([class_name for _, class_name, _ in categories], f"{where} has the name")
        files = [file for file, _ in annotations]
        _check_once(files, f"{root / name}: annotations has the file_name")
        for file, infos in annotations:
            mask = f"{name.removesuffix('.json')}/{file}"
            if mask in segments:
                raise ConfigError(
                    f"{root / name} and another JSON file beside it both have segments of {mask}: remove one of them"
                )
            segments[mask] = _segments(infos, categories, f"{root / name}: {file}")
    if not 2 <= len(categories) <= MAX_CLASSES:
        raise ConfigError(
            f"{root / json_files[0]} has {len(categories)} categories: segmentation needs 2 to {MAX_CLASSES}"
        )
    things = tuple(thing for _, _, thing in categories)
    counts = {
        mask: len(np.unique(rows[rows[:, 1] != IGNORED, 1])) for mask, rows in segments.items()
    }
    crowded = max(counts, key=counts.get, default="")
    classes = tuple(name for _, name, _ in categories)
    table = PanopticTable(
        classes, (), (), things=things, most=counts.get(crowded, 0), crowded=crowded
    )
    return table, segments


class _Segment(NamedTuple):
    """An entry of `segments_info`."""

    number: int
    category: int
    crowd: bool

    @classmethod
    def of(cls, info: dict) -> "_Segment":
        number = int(info["id"])
        if number != float(info["id"]) or not 0 <= number < 2**24:  # of a colour
            raise ValueError(f"id {info['id']}")
        return cls(number, int(info["category_id"]), bool(info.get("iscrowd")))


def _check_once(values: Sequence[Any], what: str) -> None:
    """Raises `ConfigError` if one of the values is there twice; the message begins with `what`."""
    places_of: dict[Any, int] = {}
    for place, value in enumerate(values):
        first = places_of.setdefault(value, place)
        if first != place:
            raise ConfigError(
                f"{what} {value!r} twice, in its entries {first} and {place} (the first is 0): each must be there once"
            )


def _segments(segments: list[_Segment], categories: list[tuple], where: str) -> np.ndarray:
    """The rows of an image. Crowds do not count."""
    _check_once([segment.number for segment in segments], f"{where}: segments_info has the id")
    if any(segment.number == 0 for segment in segments):
        raise ConfigError(
            f"{where} has a segment with the id 0, whose colour is black, which means no segment: number them from 1 on"
        )
    known = {number: place for place, (number, _, _) in enumerate(categories)}
    for segment in segments:
        if segment.category not in known:
            raise ConfigError(
                f"{where} has a segment of the category {segment.category!r}, which categories does not list"
            )
    classes = [IGNORED if segment.crowd else known[segment.category] for segment in segments]
    ids = np.array([segment.number for segment in segments], np.int32)
    codes = numbers(np.array(classes, np.int32), tuple(thing for _, _, thing in categories))
    if len(codes) and (most := things_of(codes).max()) > MOST_THINGS:
        raise ConfigError(
            f"{where} has {most} things, and label maps hold {MOST_THINGS} of an image"
        )
    return np.stack([ids, codes], axis=-1).reshape(-1, 2)
