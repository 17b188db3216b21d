"""The container `.safetensors`: named arrays behind a JSON header, read and written one at a time.

What the names mean is not known here. The format (its size, the header, the numbers) is specified
in the README of huggingface/safetensors; the package of that name wants all tensors in memory to
write them.
"""

import json
import math
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO

import ml_dtypes
import numpy as np
from etils import epath

from vit_jax.base.errors import CheckpointError, reason
from vit_jax.base.lazy_array import LazyArray
from vit_jax.base.outputs import written_whole
from vit_jax.interchange.regular import check_regular

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# As the specification has it; also keeps a file of another kind from being read whole.
_MAX_HEADER = 100_000_000


def begins_as_safetensors(head: bytes) -> bool:
    """Whether a file's first bytes are the size of a header and its beginning."""
    return len(head) >= 9 and head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] <= _MAX_HEADER


def read(
    path: epath.PathLike, file: BinaryIO | None = None
) -> tuple[dict[str, LazyArray], dict[str, str]]:
    """Every array of the file by its name, read when used, and the file's metadata.

    Args:
      path: of the file.
      file: the same, if it is open already; it stays open as long as an array may be read.

    Raises:
      CheckpointError: the file is damaged, or of a type that NumPy does not know.
    """
    path = epath.Path(path)
    check_regular(path)
    file, turn = file or path.open("rb"), threading.Lock()
    try:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > min(_MAX_HEADER, path.stat().length):
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(file.read(size))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError(f"its metadata is no JSON object, but {type(metadata).__name__}")

        def read_bytes(begin: int, count: int) -> bytes:
            with turn:
                file.seek(8 + size + begin)
                return file.read(count)

        tensors = {name: _lazy(path, name, entry, read_bytes) for name, entry in header.items()}
        # Else a small file could stand for tensors of any size.
        if (
            sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
            > path.stat().length
        ):
            raise ValueError("its tensors overlap")
        end = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except Exception as error:  # noqa: BLE001  a damaged header may hold anything, nested to any depth
        raise CheckpointError(
            f"{path} is damaged or no safetensors file: {reason(error)}"
        ) from error
    if path.stat().length != end:
        raise CheckpointError(
            f"{path} is damaged: it has {path.stat().length} bytes, its header says {end}"
        )
    return tensors, metadata


def write(
    path: epath.PathLike,
    tensors: Iterable[tuple[str, np.ndarray]],
    specs: Mapping,
    metadata: Mapping[str, str],
) -> None:
    """Writes arrays one after the other; the file appears under its name when it is whole.

    Args:
      path: of the file.
      tensors: (name, array), in the order of `specs`.
      specs: name -> (shape, dtype), needed before the first array is.
      metadata: text to text.

    Raises:
      CheckpointError: it cannot be written.
    """
    path = epath.Path(path)
    header, end = {"__metadata__": dict(metadata)}, 0
    for name, (shape, dtype) in specs.items():
        begin, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": _NAMES[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial, partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for (name, array), (expected, (shape, dtype)) in zip(
                tensors, specs.items(), strict=True
            ):
                assert (name, array.shape, array.dtype) == (expected, tuple(shape), dtype)
                file.write(array.tobytes())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _lazy(path: epath.Path, name: str, entry: dict, read_bytes: Callable) -> LazyArray:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} is of type {entry['dtype']}, which is not supported")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name} has the shape {shape} and the place {begin} to {end}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {end - begin} bytes for shape {shape} of {dtype}")

    def load() -> np.ndarray:
        data = read_bytes(begin, end - begin)
        if len(data) != end - begin:
            raise CheckpointError(f"{path} is damaged: {name} is cut short")
        return np.frombuffer(data, dtype).reshape(shape)

    return LazyArray(shape, dtype, load)
