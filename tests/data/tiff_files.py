"""Writes small TIFF files of kinds that OpenCV and Pillow do not write; little-endian, one strip."""

import struct
import zlib

import numpy as np


def tiff(pixels, *, tags=None, separate=False, differences=False, deflate=False):
    """(H, W, C) of any number type -> the bytes of a file.

    Args:
      tags: further ones, tag -> number, or other values of those that are written.
      separate: one plane after the other.
      differences: each sample less the one before it (predictor 2).
    """
    height, width, channels = pixels.shape
    data = np.ascontiguousarray(np.moveaxis(pixels, 2, 0) if separate else pixels)
    if differences:
        axis = 2 if separate else 1
        data = np.diff(
            data, axis=axis, prepend=np.zeros_like(data[:, :, :1] if separate else data[:, :1])
        )
    planes = list(data) if separate else [data]
    strips = [zlib.compress(p.tobytes()) if deflate else p.tobytes() for p in planes]
    places = np.cumsum([8, *map(len, strips)]).tolist()
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    values = {
        256: width, 257: height, 258: [8 * pixels.itemsize] * channels, 259: 8 if deflate else 1,
        262: 1, 273: places[:-1], 277: channels, 278: height, 279: [len(s) for s in strips],
        284: 2 if separate else 1, 317: 2 if differences else 1, 339: [kind] * channels,
    } | (tags or {})  # fmt: skip
    at = places[-1] + places[-1] % 2
    extra_at, extra, entries = at + 2 + 12 * len(values) + 4, b"", []
    for tag, value in sorted(values.items()):
        numbers = value if isinstance(value, list) else [value]
        packed = struct.pack(f"<{len(numbers)}I", *numbers)
        if len(numbers) > 1:
            packed, extra = struct.pack("<I", extra_at + len(extra)), extra + packed
        entries.append(struct.pack("<HHI", tag, 4, len(numbers)) + packed)
    body = b"".join([b"II*\0", struct.pack("<I", at), *strips, bytes(at - places[-1])])
    return body + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4) + extra
