"""TIFF files as the numbers they hold: any number of channels, 8 or 16 bits or floats.

OpenCV reads TIFF files that are pictures, of one or three channels and 8 bits. Others it and Pillow
read wrongly or not at all; but both decompress one channel of any type. So the file's directory is
read here (TIFF 6.0, Adobe 1992), and OpenCV gets the same data as one channel that is as many times
as wide.
"""

import dataclasses
import math
import struct

import cv2
import numpy as np

from vit_jax.data.decoding.samples import upright
from vit_jax.data.record import BadImage, decoding

_BIG = (b"II+\0", b"MM\0+")  # how BigTIFF begins

# Tags
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLORS, _FILL_ORDER = 256, 257, 258, 259, 262, 266
_STRIPS, _ORIENTATION, _SAMPLES, _ROWS, _STRIP_BYTES, _PLANAR = 273, 274, 277, 278, 279, 284
_PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 317, 322, 323, 324, 325
_EXTRA, _FORMAT = 338, 339
_KNOWN = frozenset((
    _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLORS, _FILL_ORDER, _STRIPS, _ORIENTATION, _SAMPLES, _ROWS,
    _STRIP_BYTES, _PLANAR, _PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _EXTRA, _FORMAT,
))  # fmt: skip
_MOST_NUMBERS = 2**20  # of one tag: strips or tiles

_TYPES = {1: "B", 3: "H", 4: "I", 16: "Q"}  # of the numbers in the tags above
_COMPRESSIONS = {1: "none", 5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate"}
_DTYPES = {(1, 8): "uint8", (1, 16): "uint16", (3, 32): "float32", (3, 64): "float64"}
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB = 0, 1, 2
_PALETTE, _CMYK, _YCC, _LAB = 3, 5, 6, 8
_COLOR_CHANNELS = {
    _WHITE_IS_ZERO: 1, _BLACK_IS_ZERO: 1, _RGB: 3, _PALETTE: 1, _CMYK: 4, _YCC: 3, _LAB: 3
}  # fmt: skip
_ALPHAS = 1, 2
_DIFFERENCES = 2  # the predictor that stores each sample less the previous one in its channel
_MOST_BYTES = 2**15  # of pixels that one byte of a file can hold, compressed


@dataclasses.dataclass(frozen=True)
class Directory:
    """What a file says about its first image.

    Attributes:
      order: '<' or '>', as in `struct`.
      big: whether it is a BigTIFF.
      tags: numbers by tag.
    """

    order: str
    big: bool
    tags: dict[int, tuple[int, ...]]

    def one(self, tag: int, default: int = 0) -> int:
        """The first number of a tag."""
        return self.tags.get(tag, (default,))[0]

    @property
    def size(self) -> tuple[int, int]:
        """(height, width), of the image or of a tile where that is larger: decoders allocate both."""
        return tuple(
            max(self.one(side), self.one(tile))
            for side, tile in ((_HEIGHT, _TILE_HEIGHT), (_WIDTH, _TILE_WIDTH))
        )

    @property
    def orientation(self) -> int:
        """1 to 8, as EXIF numbers them."""
        return self.one(_ORIENTATION, 1)

    @property
    def sample_bytes(self) -> int:
        """Of all its samples once they are decompressed."""
        bits = max(self.tags.get(_BITS, (1,)))
        return math.prod(self.size) * self.one(_SAMPLES, 1) * bits // 8

    @property
    def is_picture(self) -> bool:
        """Whether it has the channels and depth of a picture, as OpenCV reads it."""
        colors = _COLOR_CHANNELS.get(self.one(_COLORS))
        return max(self.tags.get(_BITS, (1,))) <= 8 and self.one(_SAMPLES, 1) == colors

    @property
    def has_alpha(self) -> bool:
        """Whether its last channel says how opaque a picture is; of four with RGB, it is taken for
        that.
        """
        further = self.one(_SAMPLES, 1) - _COLOR_CHANNELS.get(self.one(_COLORS), 0)
        return further == 1 and (self.one(_COLORS) == _RGB or self.one(_EXTRA) in _ALPHAS)


def read_directory(image: bytes, name: str) -> Directory:
    """Reads the directory of a file's first image.

    Raises:
      BadImage: it is damaged.
    """
    order, big = ("<" if image.startswith(b"II") else ">"), image[:4] in _BIG
    count_type, entry_type, inline = ("Q", "HHQ", 8) if big else ("H", "HHI", 4)
    try:
        (at,) = struct.unpack_from(f"{order}{'Q' if big else 'I'}", image, 8 if big else 4)
        (entries,) = struct.unpack_from(order + count_type, image, at)
        at += struct.calcsize(order + count_type)
        tags, size = {}, struct.calcsize(order + entry_type)
        for entry in range(at, at + min(entries, 4096) * (size + inline), size + inline):
            tag, kind, count = struct.unpack_from(order + entry_type, image, entry)
            if tag not in _KNOWN or kind not in _TYPES or not count:
                continue
            if count > _MOST_NUMBERS:
                raise BadImage(name, f"its directory's tag {tag} has {count} numbers")
            numbers = f"{order}{count}{_TYPES[kind]}"
            place = entry + size
            if struct.calcsize(numbers) > inline:
                (place,) = struct.unpack_from(order + ("Q" if big else "I"), image, place)
            if tag in tags:  # of two, decoders may take either
                raise BadImage(name, f"its directory has the tag {tag} twice")
            tags[tag] = struct.unpack_from(numbers, image, place)
    except (struct.error, OverflowError):
        raise BadImage(name, f"its end is missing ({len(image)} bytes are there)") from None
    return Directory(order, big, tags)


def read_samples(image: bytes, directory: Directory, name: str) -> np.ndarray:
    """The first image as it is stored, upright: (H, W, C) uint8, uint16, float32 or float64.

    Raises:
      BadImage: it is damaged, or of a kind that is not read.
    """
    get = directory.one
    height, width, samples = get(_HEIGHT), get(_WIDTH), get(_SAMPLES, 1)
    bits = set(directory.tags.get(_BITS, (1,)))
    kind = get(_FORMAT, 1), max(bits)
    if len(bits) > 1 or kind not in _DTYPES:
        what = {1: "unsigned", 2: "signed", 3: "float"}.get(kind[0], "other")
        raise BadImage(
            name,
            f"it holds {what} numbers of {'/'.join(map(str, sorted(bits)))} bits: store unsigned ones of 8 or "
            "16, or floats of 32 or 64",
        )
    if get(_COMPRESSION, 1) not in _COMPRESSIONS:
        known = ", ".join(dict.fromkeys(_COMPRESSIONS.values()))
        raise BadImage(
            name, f"compression {get(_COMPRESSION)} is not read with that many channels or bits: {known} are"
        )  # fmt: skip
    if get(_COLORS, _BLACK_IS_ZERO) in (_PALETTE, _YCC, _LAB):
        raise BadImage(name, "its colours are not read with that many channels or bits: store RGB")
    if not 0 < height * width * samples * kind[1] // 8 <= _MOST_BYTES * len(image):
        raise BadImage(
            name,
            f"{len(image)} bytes cannot hold the {height} x {width} pixels, {samples} channels of its header",
        )
    separate = get(_PLANAR, 1) == 2 and samples > 1
    if separate:
        planes = [_read_plane(image, directory, name, plane, 1) for plane in range(samples)]
        pixels = np.stack(planes, axis=2)
    else:
        pixels = _read_plane(image, directory, name, 0, samples)
        pixels = pixels.reshape(height, width, samples)
    if pixels.dtype != _DTYPES[kind]:
        raise BadImage(name, f"OpenCV reads {pixels.dtype}, the file says {_DTYPES[kind]}")
    if samples > 1 and not separate and get(_PREDICTOR, 1) != 1:
        pixels = _undo_differences(pixels, directory, name)
    if get(_COLORS) == _WHITE_IS_ZERO:
        pixels = 1 - pixels if kind[0] == 3 else ~pixels
    return np.ascontiguousarray(upright(pixels, directory.orientation))


def _read_plane(
    image: bytes, directory: Directory, name: str, plane: int, samples: int
) -> np.ndarray:
    """A plane of separate ones, or all `samples` of a pixel side by side: (H, W * samples)."""
    tags = {tag: directory.tags[tag] for tag in _KEPT if tag in directory.tags}
    for tag in (_WIDTH, _TILE_WIDTH):
        if tag in tags:
            tags[tag] = (tags[tag][0] * samples,)
    for tag in (_STRIPS, _STRIP_BYTES, _TILES, _TILE_BYTES):
        if tag in tags and samples == 1 and directory.one(_SAMPLES, 1) > 1:
            each = len(tags[tag]) // directory.one(_SAMPLES)
            tags[tag] = tags[tag][plane * each : (plane + 1) * each]
    if samples > 1:
        tags[_PREDICTOR] = (1,)  # undone afterwards
    tags |= {_BITS: directory.tags[_BITS][:1], _COLORS: (_BLACK_IS_ZERO,), _SAMPLES: (1,)}
    file = _with_directory(image, directory, tags)
    with decoding(name):
        pixels = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None or pixels.shape != (directory.one(_HEIGHT), tags[_WIDTH][0]):
        raise BadImage(name, "its data is damaged or incomplete")
    return pixels


_KEPT = (
    _WIDTH, _HEIGHT, _COMPRESSION, _FILL_ORDER, _STRIPS, _ROWS, _STRIP_BYTES, _PREDICTOR,
    _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _FORMAT,
)  # fmt: skip


def _with_directory(image: bytes, directory: Directory, tags: dict[int, tuple[int, ...]]) -> bytes:
    """The file with another directory, which is put at its end."""
    order, big = directory.order, directory.big
    kind, entry, offset = (16, "HHQ", "Q") if big else (4, "HHI", "I")
    at = len(image) + len(image) % 2
    data_at = at + struct.calcsize(order + ("Q" if big else "H")) + struct.calcsize(order + offset)
    data_at += len(tags) * struct.calcsize(order + entry + offset)
    entries, data = [], b""
    for tag, numbers in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(numbers)}{offset}", *numbers)
        place = packed
        if len(numbers) > 1:
            place = struct.pack(order + offset, data_at + len(data))
            data += packed
        entries.append(struct.pack(order + entry, tag, kind, len(numbers)) + place)
    header_end = 16 if big else 8
    start = image[: 8 if big else 4] + struct.pack(order + offset, at)
    count = struct.pack(order + ("Q" if big else "H"), len(entries))
    padding = bytes(at - len(image))
    return b"".join(
        [start, image[header_end:], padding, count, *entries, bytes(header_end // 2), data]
    )


def _undo_differences(pixels: np.ndarray, directory: Directory, name: str) -> np.ndarray:
    """Sums up what predictor 2 has stored, from the left edge of the image or of each tile."""
    if directory.one(_PREDICTOR) != _DIFFERENCES or pixels.dtype.kind == "f":
        raise BadImage(
            name, f"predictor {directory.one(_PREDICTOR)} is not read with several channels in a pixel"
        )  # fmt: skip
    wide = directory.one(_TILE_WIDTH) or pixels.shape[1]
    parts = [pixels[:, left : left + wide] for left in range(0, pixels.shape[1], wide)]
    return np.concatenate([np.cumsum(part, axis=1, dtype=part.dtype) for part in parts], axis=1)
