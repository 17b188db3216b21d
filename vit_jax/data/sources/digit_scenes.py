"""Scenes made of scikit-learn's digits: several on a canvas, with masks. Real strokes, known masks, and no
download. Of 'train' the digits are those of the data set 'digits' to train on, of 'test' its others.

A digit's mask is the convex hull of its strokes; what no digit covers is the class 'background'. In 'digit_things' each
digit is a thing of its own, and the background is stuff.
"""

import dataclasses

import cv2
import numpy as np

from vit_jax.data.labels import segments
from vit_jax.data.labels.masks import ClassTable, numbered
from vit_jax.data.options import Data
from vit_jax.data.record import DataSet, Record
from vit_jax.data.sources import digits, fingerprint

CANVAS = 48  # pixels of a side
SIZES = {"train": 10_000, "test": 200}
# Of a digit in pixels; digits in a scene; places tried for each.
_SIDES, _MOST, _TRIES = (24, 33), 3, 8
_STROKE = 64  # pixels above this are of a stroke
_FIRST_SEED = {"train": 0, "test": 10**6}
_CLASSES = ("background", *"0123456789")
_PANOPTIC = segments.PanopticTable(
    _CLASSES, (), (), things=(False, *[True] * 10), most=_MOST + 1, crowded="digit_scenes"
)


@dataclasses.dataclass(frozen=True)
class DigitScenes:
    """Some of the scenes: (split, number in it) each, drawn from `digits` of the split."""

    scenes: tuple[tuple[str, int], ...]
    digits: dict
    classes: tuple[str, ...] = _CLASSES
    masks: ClassTable = dataclasses.field(default_factory=lambda: numbered(_CLASSES))
    multi_label: bool = False
    labels: None = None

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Record:
        split, number = self.scenes[index]
        image, label_map = draw(self.digits[split], _FIRST_SEED[split] + number)
        label_map = label_map if self.masks == _PANOPTIC else label_map.astype(np.uint8)
        return Record(image, label_map, f"digit_scenes/{split}/{number}")

    def fingerprint(self) -> str:
        """A fingerprint of which scenes these are."""
        return fingerprint.digest(_name(self.masks), self.scenes)


def open_digit_scenes(config_data: Data) -> DataSet:
    """'train' (10,000 scenes) and 'test' (200), with masks of classes."""
    return _open(config_data, numbered(_CLASSES))


def open_digit_things(config_data: Data) -> DataSet:
    """The same scenes with panoptic masks: each digit by itself."""
    return _open(config_data, _PANOPTIC)


def _open(config_data: Data, table: ClassTable) -> DataSet:
    of_digits = digits.open_digits(config_data)

    def read(parts):
        scenes = tuple(
            (name, number) for name, first, stop in parts for number in range(first, stop)
        )
        drawn = {name: of_digits.open(name) for name in {split for split, _ in scenes}}
        return DigitScenes(scenes, drawn, masks=table)

    name = _name(table)
    return DataSet(f"the data set {name!r}", SIZES, read, identity=lambda: name)


def _name(table: ClassTable) -> str:
    return "digit_things" if table == _PANOPTIC else "digit_scenes"


def draw(source: digits.Digits, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A scene of digits: the image (48, 48, 3) uint8 and its label map (48, 48) uint16, see `segments`."""
    random = np.random.RandomState(seed)  # its stream is frozen forever
    grey = np.zeros((CANVAS, CANVAS), np.uint8)
    label_map, drawn = np.zeros((CANVAS, CANVAS), np.uint16), []
    for _ in range(random.randint(1, _MOST + 1)):
        chosen, side = random.randint(len(source)), random.randint(*_SIDES)
        small = source.images[chosen, :, :, 0]
        digit = cv2.resize(small, (side, side), interpolation=cv2.INTER_LINEAR)
        hull = _hull(digit > _STROKE)
        for top, left in random.randint(CANVAS - side + 1, size=(_TRIES, 2)):
            place = slice(top, top + side), slice(left, left + side)
            if not label_map[place][hull].any():
                grey[place] = np.maximum(grey[place], digit)
                drawn.append(source.labels[chosen] + 1)
                label_map[place][hull] = segments.numbers(np.array(drawn), _PANOPTIC.things)[-1]
                break
    return np.repeat(grey[..., None], 3, axis=2), label_map


def _hull(strokes: np.ndarray) -> np.ndarray:
    """Which pixels are in the convex hull of `strokes`, bool as they are."""
    points = np.argwhere(strokes)[:, ::-1].astype(np.int32)
    filled = cv2.fillConvexPoly(np.zeros(strokes.shape, np.uint8), cv2.convexHull(points), 1)
    return filled > 0
