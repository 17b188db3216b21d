"""Panoptic masks: the class of every pixel, and of what is counted (things) which single one it belongs to.

In a label map the two are one number, `class + 256 * n`: n counts an image's things from 1 on, and is 0 for all that
is not counted (stuff). So a label map of classes alone is the case of an image without things.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.data.labels.masks import IGNORED, ClassTable
from vit_jax.data.record import BadImage

MOST_THINGS = 255  # of an image to learn from: such label maps are uint16
MOST_PREDICTED = (
    2**16 - 1
)  # of an image: predicted label maps are int32, and become colours of 24 bits
_PER_THING = 256


@dataclasses.dataclass(frozen=True)
class PanopticTable(ClassTable):
    """The classes of panoptic masks. A mask is (PNG, segments): the colours of the PNG are ids of COCO's form,
    R + 256 G + 65536 B, and segments (n, 2) int32 has an id and its number in label maps in each row; 0 is no segment.

    Attributes:
      things: of each class, whether single ones are counted.
      most: segments of the image that has most.
      crowded: the name of that image.
    """

    things: tuple[bool, ...] = ()
    most: int = 0
    crowded: str = ""
    dtype = np.uint16

    @property
    def colored(self) -> bool:
        """Ids are colours."""
        return True

    def describe(self) -> dict:
        """What a checkpoint says of it beside the classes, as JSON."""
        return {"things": list(self.things), "most": self.most, "crowded": self.crowded}

    def _labels_of(self, mask: tuple[bytes, np.ndarray], name: str, max_pixels: int) -> np.ndarray:
        """The class of each pixel, (H, W), of a panoptic PNG; an array (H, W) has numbers of label maps already."""
        if isinstance(mask, np.ndarray):
            return mask
        png, segments = mask
        colors = self._read(png, name, max_pixels)
        red = colors[..., 0]
        green = colors[..., 1]
        blue = colors[..., 2]
        ids = red | green << 8 | blue << 16
        segments = np.concatenate([[(0, IGNORED)], segments])
        segments = segments[segments[:, 0].argsort(kind="stable")]
        place = np.searchsorted(segments[:, 0], ids)
        place = np.minimum(place, len(segments) - 1)
        wrong = segments[place, 0] != ids
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise BadImage(
                name,
                f"its mask has the segment id {ids[row, column]} at row {row}, column {column}, which the JSON file "
                "does not list in segments_info: add it there, or paint it black if such pixels do not count",
            )
        return segments[place, 1]


def described(description: dict | None, classes: Sequence[str]) -> ClassTable | None:
    """The table of which `describe` gave a description; `None` of none."""
    if description is None:
        return None
    if "things" not in description:
        keys = tuple(map(tuple, description["keys"]))
        return ClassTable(tuple(classes), keys, tuple(description["labels"]))
    things = tuple(description["things"])
    return PanopticTable(tuple(classes), (), (), **description | {"things": things})


def numbers(classes: np.ndarray, things: tuple[bool, ...]) -> np.ndarray:
    """The numbers in label maps of an image's segments, by their classes, (n,) int32; those of `IGNORED` do not
    count.
    """
    is_thing = [number != IGNORED and things[number] for number in classes.tolist()]
    counted = np.array(is_thing, bool)
    instances = _PER_THING * np.cumsum(counted) * counted
    return (classes + instances).astype(np.int32)


def classes_of(label_map):
    """The classes of a label map's pixels, of NumPy or of JAX; one of classes alone stays as it is."""
    return label_map & (_PER_THING - 1)


def things_of(label_map):
    """Of the pixels of a label map which thing of the image they belong to, from 1 on; 0: to none."""
    return label_map >> 8


def categories(table: PanopticTable | None) -> list[dict]:
    """The classes as COCO's JSON lists them, numbered from 1 on."""
    if table is None:
        return []
    named = zip(table.classes, table.things, strict=True)
    return [
        {"id": number, "name": name, "isthing": int(thing)}
        for number, (name, thing) in enumerate(named, start=1)
    ]


def colored(label_map: np.ndarray) -> tuple[np.ndarray, list[dict]]:
    """The colours (H, W, 3) uint8 of a panoptic PNG in COCO's form, and its segments_info; see `categories`."""
    ids = np.where(label_map == IGNORED, 0, label_map.astype(np.int32) + 1)
    infos = []
    for segment in np.unique(ids[ids > 0]).tolist():
        rows, columns = np.nonzero(ids == segment)
        top = int(rows.min())
        left = int(columns.min())
        width = int(columns.max()) + 1 - left
        height = int(rows.max()) + 1 - top
        category = int(classes_of(segment - 1)) + 1
        infos.append({
            "id": segment, "category_id": category, "iscrowd": 0, "area": len(rows),
            "bbox": [left, top, width, height],
        })  # fmt: skip
    red = ids & 255
    green = ids >> 8 & 255
    blue = ids >> 16
    colors = np.stack([red, green, blue], axis=-1)
    return colors.astype(np.uint8), infos


def borders(label_map: np.ndarray) -> np.ndarray:
    """Which pixels (H, W) bool have a pixel of another segment below or to the right."""
    border = np.zeros(label_map.shape, bool)
    border[:-1] |= label_map[:-1] != label_map[1:]
    border[:, :-1] |= label_map[:, :-1] != label_map[:, 1:]
    return border
