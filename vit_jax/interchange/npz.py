"""The container `.npz`: named arrays in a zip archive, read one at a time, and never by unpickling.

What the names mean is not known here.
"""

import io
import math
import threading
import zipfile
from collections.abc import Iterable
from typing import BinaryIO

import ml_dtypes
import numpy as np
from etils import epath

from vit_jax.base.errors import CheckpointError, reason
from vit_jax.base.lazy_array import LazyArray
from vit_jax.base.outputs import written_whole

SUFFIX = ".npy"
_MOST_HEADER = 2**16  # bytes of an array's header, which may be compressed
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read(path: epath.PathLike, file: BinaryIO) -> dict[str, LazyArray]:
    """Every array of the file by its name, read when used; `|V2` is bfloat16. {} for a zip archive
    of something else.

    Args:
      path: for messages.
      file: opened for reading; it stays open as long as an array may be read.

    Raises:
      CheckpointError: the file is damaged, or an array holds Python objects.
    """
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # noqa: BLE001  zipfile raises anything at a damaged archive
        raise CheckpointError(
            f"{path} begins as a zip archive (.npz or PyTorch), but is cut short or damaged: "
            f"{reason(error)}"
        ) from error
    members = archive.namelist()
    if not all(member.endswith(SUFFIX) for member in members):
        return {}
    turn = threading.Lock()
    return {member.removesuffix(SUFFIX): _lazy(path, archive, member, turn) for member in members}


def write(path: epath.PathLike, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes arrays one after the other; the file appears under its name when it is whole.

    Raises:
      CheckpointError: it cannot be written.
    """
    path = epath.Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            written_whole(path) as partial,
            partial.open("wb") as file,
            zipfile.ZipFile(file, "w", allowZip64=True) as archive,
        ):
            for name, array in arrays:
                if array.dtype == ml_dtypes.bfloat16:
                    array = array.view("V2")
                with archive.open(name + SUFFIX, "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _lazy(
    path: epath.PathLike, archive: zipfile.ZipFile, member: str, turn: threading.Lock
) -> LazyArray:
    try:
        with archive.open(member) as compressed:
            file = io.BytesIO(compressed.read(_MOST_HEADER))
        version = np.lib.format.read_magic(file)
        shape, _, dtype = _HEADERS[version](file)
        size = archive.getinfo(member).file_size - file.tell()
    except Exception as error:  # noqa: BLE001  NumPy reads a header as Python code: anything may come
        raise CheckpointError(
            f"{path} is damaged or no NumPy archive: {member}: {reason(error)}"
        ) from error
    if dtype.hasobject:
        raise CheckpointError(
            f"{path} is not read: {member} holds pickled Python objects, which could run "
            "code, not numbers"
        )
    if min(shape, default=0) < 0 or size != dtype.itemsize * math.prod(shape):
        raise CheckpointError(
            f"{path} is damaged: {member} has {size} bytes for shape {shape} of {dtype}"
        )
    is_bfloat16 = dtype == np.dtype("V2")

    def load() -> np.ndarray:
        try:
            with turn, archive.open(member) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # noqa: BLE001  see above
            raise CheckpointError(f"{path} is damaged: {member}: {reason(error)}") from error
        return array.view(ml_dtypes.bfloat16) if is_bfloat16 else array

    return LazyArray(shape, np.dtype(ml_dtypes.bfloat16) if is_bfloat16 else dtype, load)
