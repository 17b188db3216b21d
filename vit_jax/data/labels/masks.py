"""Label maps of segmentation: from a mask's values or colours to the class of every pixel.

Where masks lie is the sources' business; how a label map is cut beside its image is in `decode.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import cv2
import numpy as np

from vit_jax.data.crops import Part
from vit_jax.data.decoding import images, resize, samples
from vit_jax.data.options import MAX_PIXELS
from vit_jax.data.record import BadImage, Source, decoding

IGNORED = 255  # in a label map: a pixel that counts nowhere
MAX_CLASSES = 255  # label maps are uint8
# The columns of a table: classes are values of pixels, or colours.
VALUE = ("value",)
COLOR = ("red", "green", "blue")
_UNKNOWN = -1
_PNG_DEPTH = 24  # where a file says its bits per channel
# By these bits: the brightness, of 255, that stands for a number of 1.
_BRIGHTNESS = {2: 85, 4: 17}


@dataclasses.dataclass(frozen=True)
class ClassTable:
    """Which values, or which colours, of a mask stand for which class.

    Attributes:
      classes: their names, in the order of the model's outputs.
      keys: (value,) or (red, green, blue) of each row of the table.
      labels: (n,) of each row: a class, or `IGNORED`.
    """

    classes: tuple[str, ...]
    keys: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    dtype = np.uint8  # of label maps

    @property
    def colored(self) -> bool:
        """Whether masks have colours."""
        return len(self.keys[0]) == len(COLOR)

    def describe(self) -> dict:
        """What a file says of it beside the classes, as JSON; see `segments.described`."""
        return {"keys": [list(key) for key in self.keys], "labels": list(self.labels)}

    def decode(
        self,
        mask: bytes | np.ndarray,
        *,
        name: str,
        size: tuple[int, ...] | None = None,
        orientation: int = 0,
        max_pixels: int = MAX_PIXELS,
    ) -> np.ndarray:
        """The label map (H, W) of a mask, a PNG file or an array (H, W) of values, of `dtype`.

        A mask is turned as it asks itself, or else as its image is; not if it has the upright image's size as it is.

        Args:
          name: of the image.
          size: height and width of the upright image, to compare with; `None`: any.
          orientation: how the image was turned, see `decode.orientation`.

        Raises:
          BadImage: it is no PNG, it has a value or colour that is not in the table, or another size.
        """
        label_map = self._labels_of(mask, name, max_pixels)
        turned = samples.upright(label_map, _orientation_of(mask, name, max_pixels) or orientation)
        if size is None or turned.shape == size:
            label_map = turned
        if size is not None and label_map.shape != size:
            height, width = size
            tall, wide = label_map.shape
            raise BadImage(
                name, f"its mask has {wide} x {tall} pixels, and the image {width} x {height}"
            )
        return label_map.astype(self.dtype)

    def _labels_of(self, mask: bytes | np.ndarray, name: str, max_pixels: int) -> np.ndarray:
        """(H, W) of classes."""
        values = self._read(mask, name, max_pixels)
        codes = _code(values) if self.colored else values
        if self.colored:
            known, labels = self._sorted
            place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
            label_map = np.where(known[place] == codes, labels[place], _UNKNOWN)
        elif values.dtype == np.uint8:  # five times as fast
            label_map = cv2.LUT(np.ascontiguousarray(values), self._by_value[:256])
        else:
            label_map = self._by_value[codes]
        if (label_map == _UNKNOWN).any():
            row, column = np.argwhere(label_map == _UNKNOWN)[0]
            what = f"colour {tuple(map(int, values[row, column]))}" if self.colored else "value"
            what += "" if self.colored else f" {values[row, column]}"
            raise BadImage(
                name,
                f"the mask has the {what} at row {row}, column {column}, which the table of {len(self.classes)} "
                "classes does not list: add it to classes.csv (or config.data.mask_table), without a name if such "
                "pixels do not count",
            )
        return label_map

    # Cached: a table serves every mask of its data set.
    @functools.cached_property
    def _by_value(self) -> np.ndarray:
        table = np.full(2**16, _UNKNOWN, np.int16)
        table[IGNORED] = IGNORED
        for (value,), label in zip(self.keys, self.labels, strict=True):
            table[value] = label
        return table

    @functools.cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        codes = _code(np.asarray(self.keys, np.int32))
        order = np.argsort(codes)
        return codes[order], np.asarray(self.labels, np.int16)[order]

    def _read(self, mask: bytes | np.ndarray, name: str, max_pixels: int) -> np.ndarray:
        """Values (H, W), or colours (H, W, 3)."""
        if isinstance(mask, np.ndarray):
            return mask
        head = images.check_image(mask, name, max_pixels)
        if head.kind != images.PNG:
            raise BadImage(
                name, f"a mask must be a PNG file, which keeps values; this is {head.kind}"
            )
        with decoding(name), images.open_with_pillow(mask, head.kind) as opened:
            if self.colored:
                return np.asarray(opened.convert("RGB"), np.int32)
            if opened.mode not in ("P", "L", "1", "I", "I;16"):
                raise BadImage(
                    name,
                    f"the mask has colours (mode {opened.mode}), and classes.csv (or config.data.mask_table) lists "
                    "values: give the columns name, red, green and blue there, or store class numbers",
                )
            values = np.asarray(opened)
            depth = mask[_PNG_DEPTH]
            if opened.mode == "L" and depth in _BRIGHTNESS:
                # Pillow has stretched grey of 2 and 4 bits to brightness, 0 to 255.
                values = values // _BRIGHTNESS[depth]
            return values if values.dtype == np.uint8 else values.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class LabelMap:
    """The mask of an example, and where the part of it goes that belongs to a crop of its image.

    Attributes:
      mask: see `ClassTable.decode`.
      table: what it means.
      out: (H, W) of the table's `dtype`.
    """

    mask: bytes | np.ndarray | tuple
    table: ClassTable
    out: np.ndarray

    def cut(
        self,
        part: Part,
        filled: tuple[int, int],
        size: tuple[int, int],
        orientation: int,
        *,
        name: str,
        max_pixels: int,
    ) -> None:
        """Fills `out`, all of it `IGNORED` but the first `filled` rows and columns.

        Args:
          part, size, orientation: of the image, and its height and width once it is turned; see `ClassTable.decode`.
          name: of the image.

        Raises:
          BadImage: see `ClassTable.decode`.
        """
        labels = self.table.decode(
            self.mask, name=name, size=size, orientation=orientation, max_pixels=max_pixels
        )
        rows, columns = filled
        if filled != self.out.shape:
            self.out[:] = IGNORED
        resize.cut_labels(labels, part, self.out[:rows, :columns])


def _orientation_of(mask: bytes | np.ndarray | tuple, name: str, max_pixels: int) -> int:
    """How a mask asks to be turned itself, see `images.orientation_of`."""
    png = mask[0] if isinstance(mask, tuple) else mask
    if isinstance(png, np.ndarray):
        return 0
    head = images.check_image(png, name, max_pixels)
    with decoding(name):
        return images.orientation_of(png, head)


def mask_table(source: Source) -> ClassTable | None:
    """The table of a source whose labels are masks; few sources have one, as the attribute `masks`."""
    return getattr(source, "masks", None)


def numbered(classes: Sequence[str]) -> ClassTable:
    """The table of masks whose values are the numbers of the classes."""
    count = len(classes)
    values = tuple((value,) for value in range(count))
    labels = tuple(range(count))
    return ClassTable(tuple(classes), values, labels)


def _code(colors: np.ndarray) -> np.ndarray:
    """(…, 3) -> one number for each colour."""
    red = colors[..., 0]
    green = colors[..., 1]
    blue = colors[..., 2]
    return red << 16 | green << 8 | blue
