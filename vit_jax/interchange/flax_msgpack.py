"""The container of Flax: a tree of arrays in MessagePack, read by Flax itself. It holds trained parameters alone, or
beside the state of an optimizer. What the names mean is not known here.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgpack
import numpy as np
from etils import epath
from flax import serialization

from vit_jax.base.errors import CheckpointError, reason
from vit_jax.base.lazy_array import LazyArray

_MOST_BYTES = 2**34  # of a file, which is read whole
_MOST_ITEMS = 2**20  # of all maps and lists, each of which becomes an object
_MOST_DEPTH = 32
# How a map begins: of up to 15 items, or of more with a count of 2 or 4 bytes.
_COUNT_BYTES = {0xDE: 2, 0xDF: 4}
# Names of Flax's layers, to those of PyTorch's.
_PYTORCH = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def begins_as_msgpack(head: bytes) -> bool:
    """Whether a file may be a map in MessagePack whose first key is text."""
    if not head or not (0x81 <= head[0] <= 0x8F or head[0] in _COUNT_BYTES):
        return False
    key = head[1 + _COUNT_BYTES.get(head[0], 0) :][:1]
    return bool(key) and (0xA1 <= key[0] <= 0xBF or key[0] == 0xD9)


def read(path: epath.Path, file: BinaryIO) -> dict[str, LazyArray]:
    """Every array of the file by its name, joined by '/'; numbers, such as a step, are skipped.

    Args:
      path: for messages.
      file: opened for reading.

    Raises:
      CheckpointError: it is damaged, or so large or so deep that reading it would take too much.
    """
    content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise CheckpointError(
            f"{path} has more than {_MOST_BYTES:,} bytes: save its arrays as .npz"
        )
    try:
        _check_items(content)
        tree = serialization.msgpack_restore(content)
        return {name: _array(value) for name, value in _named(tree)}
    except CheckpointError:
        raise
    except Exception as error:  # both readers raise anything at a damaged file
        raise CheckpointError(
            f"{path} is damaged, or no MessagePack of Flax: {reason(error)} (an interrupted download?)"
        ) from error


def read_for_pytorch(path: epath.Path) -> dict[str, LazyArray]:
    """The arrays of `flax_model.msgpack`, which transformers wrote, by the names and in the layouts of its PyTorch
    files.
    """
    with path.open("rb") as file:
        arrays = read(path, file)
    return dict(_for_pytorch(name.removeprefix("params/"), x) for name, x in arrays.items())


def _check_items(content: bytes) -> None:
    """Raises `ValueError` for more items than any checkpoint has."""
    left = _MOST_ITEMS

    def count(items: Any) -> None:
        nonlocal left
        left -= len(items)
        if left < 0:
            raise ValueError(f"it has more than {_MOST_ITEMS:,} items beside its arrays")

    msgpack.unpackb(
        content, ext_hook=lambda code, data: None, object_pairs_hook=count, list_hook=count,
        raw=False, strict_map_key=False, max_array_len=_MOST_ITEMS, max_map_len=_MOST_ITEMS,
    )  # fmt: skip


def _named(tree: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a tree by their names."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} times")
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _named(value, f"{name}/{key}" if name else str(key), depth + 1)
    elif isinstance(tree, np.ndarray) and tree.dtype != object:
        yield name, tree


def _array(value: np.ndarray) -> LazyArray:
    return LazyArray(value.shape, value.dtype, lambda: value)


def _for_pytorch(name: str, array: LazyArray) -> tuple[str, LazyArray]:
    """A name of Flax's with its array, as PyTorch has them."""
    *path, last = name.split("/")
    named = ".".join([*path, _PYTORCH.get(last, last)])
    axes = {2: (1, 0), 4: (3, 2, 0, 1)}.get(len(array.shape)) if last == "kernel" else None
    if axes is None:
        return named, array
    shape = tuple(array.shape[axis] for axis in axes)
    return named, LazyArray(shape, array.dtype, lambda: array.read().transpose(axes))
