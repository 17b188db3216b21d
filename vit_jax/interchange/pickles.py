"""What `torch.save` writes, read without running code, and without PyTorch.

A pickle is a program that names functions and calls them. Here only the names below mean anything:
those that make tensors, which become `LazyArray` arrays, and containers. Names that scripts leave beside
their tensors (`_HARMLESS`) stand for `Skipped`, which does nothing. Any other name is refused before
anything is called. Which of the tensors are a model's is not known here.
"""

import fnmatch
import io
import math
import struct
import threading
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from etils import epath

from vit_jax.base.errors import CheckpointError, reason
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.bounded_pickle import (
    MOST_PICKLED,
    Bounded,
    BoundedUnpickler,
    Dictionary,
    TooMuch,
)
from vit_jax.interchange.regular import check_regular

_ZIP = b"PK\3\4"
# The number that files from before 2020 begin with; after it come their version, the machine's sizes,
# the content, the names of its storages, and these.
_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
    "UntypedStorage": np.uint8,
}
_DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
}
# Patterns of what scripts save beside their tensors: options, versions, dates, losses.
_HARMLESS = (
    "__builtin__.*", "builtins.*",  # those that do something are in _REFUSED
    "_codecs.encode", "copy_reg._reconstructor", "copyreg._reconstructor",
    "argparse.Namespace", "functools.partial", "types.SimpleNamespace", "uuid.UUID", "decimal.Decimal",
    "fractions.Fraction", "datetime.*", "pathlib.*", "enum.*", "typing.*",
    "numpy.dtype", "numpy.ndarray", "numpy.dtypes.*", "numpy.*int*", "numpy.float*", "numpy.bool*",
    "numpy.complex*", "numpy.str_", "numpy.core.multiarray.*", "numpy._core.multiarray.*",
    "numpy.core.numeric.*", "numpy._core.numeric.*", "numpy.random.*", "numpy.ma.*",
    "torch.Size", "torch.device", "torch.dtype", "torch.layout", "torch.Generator", "torch.*_format",
    "torch.serialization._get_layout", "torch.storage.*", "torch.optim.*", "torch.amp.*",
    "torch.cuda.amp.*", "torch.torch_version.TorchVersion",
    "lightning.*.AttributeDict", "lightning_fabric.*.AttributeDict",
    "pytorch_lightning.*.AttributeDict", "pytorch_lightning.callbacks.*", "lightning.*.callbacks.*",
    "omegaconf.*", "antlr4.*", "yacs.config.CfgNode", "fvcore.common.config.CfgNode",
    "easydict.EasyDict", "addict.*", "ml_collections.*", "mmcv.utils.config.*", "mmengine.config.*",
    "mmengine.logging.*",
)  # fmt: skip
# What no options file needs: it runs code, or opens or imports something. Never called here, but a
# file that names one of them means no good.
_REFUSED = (
    "eval", "exec", "compile", "open", "input", "breakpoint", "exit", "quit", "help", "__import__",
    "getattr", "setattr", "delattr", "globals", "locals", "vars", "memoryview", "classmethod",
    "staticmethod", "super", "type", "map", "filter", "print",
)  # fmt: skip


def read(path: epath.Path, file: BinaryIO | None = None) -> Any:
    """The content of a file, every tensor of it a `LazyArray` array that is read when used.

    Args:
      path: of the file.
      file: the same, if it is open already; it stays open as long as a tensor may be read.

    Raises:
      CheckpointError: it is damaged, or holds more than tensors and harmless values; no code of it
        is run.
    """
    check_regular(path)
    file = file or path.open("rb")
    try:
        file.seek(0)
        zipped = file.read(len(_ZIP)) == _ZIP
        file.seek(0)
        return _read_archive(path, file) if zipped else _read_stream(path, file)
    except _Refused as error:
        raise CheckpointError(
            f"{path} is not read: it is a pickle with {error} in it, which could run code. Save the tensors alone, "
            "torch.save(model.state_dict(), …), or as .safetensors"
        ) from None
    except TooMuch:
        raise CheckpointError(
            f"{path} is not read: beside its tensors it holds more than {MOST_PICKLED:,} bytes of other values, such "
            "as a long history of losses. Save the tensors alone, torch.save(model.state_dict(), …), or as .safetensors"
        ) from None
    except CheckpointError:
        raise
    # A pickle that is damaged calls anything with anything.
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or no file of torch.save: {reason(error)} (an interrupted download?)"
        ) from error


class Skipped:
    """Stands for a value that nobody here needs: takes any arguments, state and items, and keeps none."""

    def __new__(cls, *_, **__):
        return super().__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, _):
        pass

    def __setitem__(self, _, __):
        pass

    def __call__(self, *_, **__):
        return self

    def append(self, _):
        """An item of a list."""

    def extend(self, _):
        """Items of a list."""

    def add(self, _):
        """An item of a set."""


class _Refused(Exception):
    """A name that could run code."""


class _Fixed:
    """What a pickle cannot change: it would set attributes through this method."""

    def __setstate__(self, _):
        raise ValueError("it changes what rebuilds its tensors")


class _Mapping(dict, _Fixed):
    """A dictionary that is made with any arguments, such as a default's factory."""

    def __init__(self, *_):
        super().__init__()


class _Type(_Fixed):
    """The type of a storage or tensor, by its name in torch."""

    def __init__(self, dtype: Any):
        self.dtype = np.dtype(dtype)


class _Call(_Fixed):
    """A function that a pickle may call."""

    def __init__(self, function: Callable):
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class _Storage(_Fixed):
    """A row of numbers in the file.

    Attributes:
      dtype: of the numbers.
      count: how many there are.
      read: (first, count) -> that many of them, as bytes.
    """

    def __init__(self, dtype: np.dtype, count: int, read: Callable[[int, int], bytes]):
        self.dtype, self.count, self.read = dtype, count, read


class _Unpickler(BoundedUnpickler):
    """Knows tensors and containers, and refuses whatever is not harmless."""

    def __init__(self, file: Bounded, path: epath.Path, storage: Callable[..., _Storage]):
        super().__init__(file, encoding="latin1")  # what Python 2 wrote
        self._path, self._storage = path, storage

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        full = f"{module}.{name}"
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _Type(_STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return _Type(_DTYPES[name])
        if full in _CONTAINERS:
            return _CONTAINERS[full]
        if full in _REBUILD:
            return _REBUILD[full]
        builtin = module in ("builtins", "__builtin__")
        if builtin and name in _REFUSED or not any(fnmatch.fnmatchcase(full, p) for p in _HARMLESS):
            raise _Refused(full)
        return Skipped

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage, which lies elsewhere in the file."""
        kind, type_, key, _, count, *view = pid
        if kind != "storage" or not isinstance(type_, _Type) or any(view):
            raise _Refused(f"a reference to {pid!r}")
        return self._storage(str(key), type_.dtype, int(count))


def _tensor(storage: _Storage, offset: int, size: tuple, strides: tuple, *_: Any) -> LazyArray:
    """torch._utils._rebuild_tensor and its successors."""
    return _view(storage, storage.dtype, offset, size, strides)


def _typed_tensor(
    storage: _Storage, offset: int, size: tuple, strides: tuple, _: Any, __: Any, type_: _Type, *___: Any
) -> LazyArray:  # fmt: skip
    """torch._utils._rebuild_tensor_v3: the storage is bytes, the tensor has a type."""
    return _view(storage, type_.dtype, offset, size, strides)


def _view(
    storage: _Storage, dtype: np.dtype, offset: int, size: tuple, strides: tuple
) -> LazyArray:
    size, strides = tuple(map(int, size)), tuple(map(int, strides))
    within = storage.count * storage.dtype.itemsize // dtype.itemsize
    last = offset + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
    if min((0, offset, *size, *strides)) < 0 or (math.prod(size) and last >= within):
        raise ValueError(f"a tensor of {size} does not fit into its {within} numbers")

    def read() -> np.ndarray:
        if not math.prod(size):
            return np.zeros(size, dtype)
        count = (last - offset + 1) * dtype.itemsize
        content = storage.read(offset * dtype.itemsize, count)
        if len(content) != count:  # strides would lead beyond it
            raise CheckpointError(f"a tensor of {size} is cut short: the file is damaged")
        array = np.frombuffer(content, dtype)
        steps = [step * dtype.itemsize for step in strides]
        return np.lib.stride_tricks.as_strided(array, size, steps, writeable=False)

    return LazyArray(size, dtype, read)


def _first(value: Any, *_: Any) -> Any:
    """A parameter is its tensor."""
    return value


def _called(function: Callable, _: Any, arguments: tuple, *__: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor with attributes, or of a class of its own."""
    return function(*arguments) if isinstance(function, _Call) else Skipped()


_CONTAINERS = {
    "collections.OrderedDict": Dictionary,
    "collections.defaultdict": _Mapping,
    "collections.Counter": _Mapping,
    "collections.deque": Skipped,
    "builtins.dict": Dictionary,
    "__builtin__.dict": Dictionary,
}
_REBUILD = {
    "torch._utils._rebuild_tensor": _Call(_tensor),
    "torch._utils._rebuild_tensor_v2": _Call(_tensor),
    "torch._utils._rebuild_tensor_v3": _Call(_typed_tensor),
    "torch._utils._rebuild_parameter": _Call(_first),
    "torch._utils._rebuild_parameter_with_state": _Call(_first),
    "torch._tensor._rebuild_from_type_v2": _Call(_called),
    "torch._tensor._rebuild_from_type": _Call(_called),
    "torch.Tensor": Skipped,
    "torch.nn.parameter.Parameter": Skipped,
}


def _read_archive(path: epath.Path, file: BinaryIO) -> Any:
    """A zip archive, as torch writes it since 2020: `data.pkl`, and a member for each storage."""
    archive, turn = zipfile.ZipFile(file), threading.Lock()
    names = set(archive.namelist())
    main = next((name for name in names if name.split("/")[-1] == "data.pkl"), None)
    if main is None:
        raise CheckpointError(f"{path} is a zip archive, but not one of torch.save or NumPy")
    root = main.removesuffix("data.pkl")
    if f"{root}constants.pkl" in names:
        raise CheckpointError(
            f"{path} is a program of TorchScript: save its tensors, torch.save(model.state_dict(), …)"
        )
    if f"{root}byteorder" in names and _start_of(archive, f"{root}byteorder", 8) != b"little":
        raise CheckpointError(f"{path} was written by a big-endian machine, which is not supported")

    def storage(key: str, dtype: np.dtype, count: int) -> _Storage:
        member = f"{root}data/{key}"
        if archive.getinfo(member).compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member} is compressed, as torch.save never does")
        if archive.getinfo(member).file_size < count * dtype.itemsize:
            raise ValueError(f"{member} is shorter than its {count} numbers of {dtype}")

        def read(first: int, size: int) -> bytes:
            try:
                with turn, archive.open(member) as bits:
                    bits.seek(first)
                    return bits.read(size)
            except Exception as error:  # noqa: BLE001  zipfile raises anything at a damaged archive
                raise CheckpointError(f"{path} is damaged: {reason(error)}") from error

        return _Storage(dtype, count, read)

    pickled = io.BytesIO(_start_of(archive, main, MOST_PICKLED + 1))
    return _Unpickler(Bounded(pickled), path, storage).load()


def _start_of(archive: zipfile.ZipFile, member: str, size: int) -> bytes:
    """Up to `size` bytes of a member, which may be compressed."""
    with archive.open(member) as content:
        return content.read(size)


def _read_stream(path: epath.Path, file: BinaryIO) -> Any:
    """Several pickles one after the other, as torch wrote them before 2020, then the storages."""
    storages: dict[str, _Storage] = {}
    places: dict[str, int] = {}
    turn = threading.Lock()

    def storage(key: str, dtype: np.dtype, count: int) -> _Storage:
        def read(first: int, size: int) -> bytes:
            with turn:
                file.seek(places[key] + first)
                return file.read(size)

        return storages.setdefault(key, _Storage(dtype, count, read))

    bounded = Bounded(file)

    def load() -> Any:
        return _Unpickler(bounded, path, storage).load()

    if load() != _MAGIC:
        raise CheckpointError(
            f"{path} is a pickle of other Python objects, not a file of torch.save: save its arrays as .npz or "
            ".safetensors"
        )
    load(), load()
    content, keys, place = load(), load(), file.tell()
    for key in keys:
        file.seek(place)
        (count,) = struct.unpack("<q", file.read(8))
        size = count * storages[key].dtype.itemsize
        if count < storages[key].count:
            raise ValueError(f"storage {key} has {count} of its {storages[key].count} numbers")
        places[key], place = place + 8, place + 8 + size
    file.seek(0, io.SEEK_END)
    if file.tell() < place:
        raise ValueError(f"it has {file.tell()} bytes of {place}")
    return content
