"""What is at a path: named arrays, and the metadata beside them. Every format looks at the same
`CheckpointFile`, so that a file is opened once, however many look at it.
"""

import functools
import json
import os
from collections.abc import Mapping

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.base.lazy_table import LazyTable
from vit_jax.interchange import pickles, pytorch, safetensors, state_dicts
from vit_jax.interchange.regular import check_regular
from vit_jax.interchange.state_dicts import Selection

WHOLE = Selection()
CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"
_HEAD = 32  # bytes that tell containers apart
_ZIP = b"PK\3\4"  # how an `.npz` begins
# Containers that only some formats have.
_CONTAINERS = LazyTable(
    {"npz": "vit_jax.interchange.npz", "msgpack": "vit_jax.interchange.flax_msgpack"}
)
FLAX = "flax_model.msgpack"  # of a folder of transformers before its version 5


class CheckpointFile:
    """A file of arrays, or a folder as the hubs lay it out: config.json beside the weights. The
    weights of such a folder stand for it.

    Args:
      path: of the file or folder.
      selection: which of its tensors are read.

    Attributes:
      path: of the file or folder.
      head: the file's first bytes.
      container: 'folder', 'npz', 'msgpack', 'safetensors' or 'pickle'; '' for none of these.
    """

    def __init__(self, path: epath.Path, selection: Selection = WHOLE):
        self._selection = selection
        self._weights = None
        if path.name in pytorch.NAMES and (path.parent / CONFIG).exists():
            self._weights, path = path, path.parent
        self.path = path
        self.head, self.container, self._file = b"", "folder", None
        if not path.is_dir():
            self._file = path.open("rb")
            self.head = self._file.read(_HEAD)
            self._file.seek(0)
            self.container = _container(self.head, path.suffix)
        if selection.state_dict and not self._has_several():
            raise ConfigError(
                f"{path}#state_dict={selection.state_dict} has no effect: only files of PyTorch (.pth, .bin, …) hold "
                "several sets of tensors; remove '#state_dict=…'"
            )

        if selection != WHOLE and not self._has_tensors():
            raise ConfigError(
                f"{path}: #prefix=… and #ignore=… have no effect, since it is no file of tensors: remove them"
            )

    def _has_tensors(self) -> bool:
        """Whether it is a file of tensors, or a folder with one."""
        return bool(self.config if self.container == "folder" else self.container)

    def _has_several(self) -> bool:
        """Whether there may be several state dicts in it."""
        if self.container != "folder":
            return self.container == "pickle"
        if self._has_flax_weights():
            return False
        weights = self._weights or (pytorch.weights_of(self.path) if self.config else self.path)
        return weights.suffix not in ("", ".safetensors") and "safetensors" not in weights.name

    @functools.cached_property
    def config(self) -> dict:
        """A folder's config.json; {} where there is none."""
        file = self.path / CONFIG
        exists = self.container == "folder" and file.exists()
        return pytorch.read_json(file) if exists else {}

    @property
    def tensors(self) -> dict[str, LazyArray]:
        """The arrays by name, read when used; none where there is no container of arrays.

        Raises:
          CheckpointError: it is damaged, or a pickle that holds more than tensors.
        """
        return self._content[0]

    @functools.cached_property
    def prefixes(self) -> list[str]:
        """What may stand before all names of the model, see `state_dicts.prefixes`."""
        pytorch_file = self.container in ("safetensors", "pickle")
        return state_dicts.prefixes(self.tensors) if pytorch_file else [""]

    @functools.cached_property
    def header(self) -> dict:
        """The header that our code wrote into a `.safetensors` file."""
        text = self._content[1].get(pytorch.METADATA, "{}")
        try:
            header = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.path} is damaged: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path} is damaged: its metadata holds no JSON object")
        return header

    @functools.cached_property
    def _content(self) -> tuple[dict[str, LazyArray], Mapping[str, str]]:
        tensors, metadata = self._whole_content()
        return self._selection.of(tensors, self.path), metadata

    def _whole_content(self) -> tuple[dict[str, LazyArray], Mapping[str, str]]:
        state_dict = self._selection.state_dict
        match self.container:
            case "folder":
                if not self.config:
                    return {}, {}
                if self._has_flax_weights():
                    return _CONTAINERS["msgpack"].read_for_pytorch(self.path / FLAX), {}
                weights = self._weights or pytorch.weights_of(self.path)
                return pytorch.read_weights(weights, state_dict)
            case "npz" | "msgpack":
                return _CONTAINERS[self.container].read(self.path, self._file), {}
            case "safetensors":
                tensors, metadata = safetensors.read(self.path, self._file)
                return state_dicts.without_wrappers(tensors), metadata
            case "pickle":
                content = pickles.read(self.path, self._file)
                return state_dicts.find_tensors(content, self.path, state_dict), {}
        return {}, {}

    def _has_flax_weights(self) -> bool:
        """Whether the weights of a folder are Flax's alone."""
        others = any((self.path / name).exists() for name in pytorch.NAMES)
        return not others and (self.path / FLAX).exists()


def open_once(path: epath.Path, selection: Selection = WHOLE) -> CheckpointFile:
    """What is at a path: the same object as before, if it was opened before and has not changed."""
    return _open(path, selection, _mark(path))


def forget() -> None:
    """Closes files that are no longer used. Call it once the weights are on their devices: a run
    must not hold them twice.
    """
    _open.cache_clear()


@functools.lru_cache(maxsize=2)  # a checkpoint to start from and a teacher
def _open(path: epath.Path, selection: Selection, mark: tuple) -> CheckpointFile:
    return CheckpointFile(path, selection)


def _mark(path: epath.Path) -> tuple:
    """Changes when the file, or a folder's config.json or weights, are written again: on a local disk also within a
    second, and with files of the same length.
    """
    names = (CONFIG, FLAX, *pytorch.NAMES)
    files = [path / name for name in names] if path.is_dir() else [path]
    if not places.in_bucket(path):
        for file in path.glob("*.json"):
            check_regular(file)
    return tuple(_stat(file) for file in files if file.exists())


def _stat(file: epath.Path) -> tuple:
    if places.in_bucket(file):
        status = file.stat()
        return status.length, status.mtime
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _container(head: bytes, suffix: str) -> str:
    if safetensors.begins_as_safetensors(head):
        return "safetensors"
    if pytorch.begins_as_pickle(head, suffix):
        return "pickle"
    if head.startswith(_ZIP):
        return "npz"
    return "msgpack" if _CONTAINERS["msgpack"].begins_as_msgpack(head) else ""
