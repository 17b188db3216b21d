"""MessagePack with arrays: the bytes in which examples are stored, by `prepare` and in the cache."""

from typing import Any

import msgpack
import numpy as np

_ARRAY = 1  # MessagePack's code of an array: its type, shape and bytes


def pack(value: Any) -> bytes:
    """The stored form of numbers, texts, bytes, arrays, and of tuples, lists and maps of them."""
    return msgpack.packb(value, default=_pack_array)


def unpack(content: bytes) -> Any:
    """What `pack` made `content` of, with tuples for lists; arrays are read-only."""
    return msgpack.unpackb(content, use_list=False, ext_hook=_unpack_array)


def _pack_array(value: np.ndarray | np.generic):
    if isinstance(value, np.generic):
        return value.item()
    parts = value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    return msgpack.ExtType(_ARRAY, msgpack.packb(parts))


def _unpack_array(_, content: bytes) -> np.ndarray:
    dtype, shape, data = msgpack.unpackb(content, use_list=False)
    return np.frombuffer(data, dtype).reshape(shape)
