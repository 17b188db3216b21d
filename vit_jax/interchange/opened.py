"""What is at a path: named arrays, and the metadata beside them. Every format looks at the same
`Opened`, so that a file is opened once, however many look at it.
"""

import functools
import json
from collections.abc import Mapping

from etils import epath

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import npz, pytorch, safetensors
from vit_jax.models.conversions.rules import Lazy

CONFIG = "config.json"
_HEAD = 32  # bytes that tell containers apart


class Opened:
    """A file of arrays, or a folder as the hubs lay it out: config.json beside the weights. The
    weights of such a folder stand for it.

    Attributes:
      path: of the file or folder.
      head: the file's first bytes.
      container: 'folder', 'npz', 'safetensors' or 'pickle'; '' for none of these.
    """

    def __init__(self, path: epath.Path):
        if path.name == pytorch.WEIGHTS and (path.parent / CONFIG).exists():
            path = path.parent
        self.path = path
        self.head, self.container, self._file = b"", "folder", None
        if not path.is_dir():
            self._file = path.open("rb")
            self.head = self._file.read(_HEAD)
            self._file.seek(0)
            self.container = _container(self.head, path.suffix)

    @functools.cached_property
    def config(self) -> dict:
        """A folder's config.json; {} where there is none."""
        file = self.path / CONFIG
        found = self.container == "folder" and file.exists()
        return pytorch.read_json(file) if found else {}

    @property
    def tensors(self) -> dict[str, Lazy]:
        """The arrays by name, read when used; none where there is no container of arrays.

        Raises:
          CheckpointError: it is damaged, or a pickle that holds more than tensors.
        """
        return self._content[0]

    @functools.cached_property
    def said(self) -> dict:
        """The header that our code wrote into a `.safetensors` file."""
        text = self._content[1].get(pytorch.METADATA, "{}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{self.path} is damaged: {error}") from error

    @functools.cached_property
    def _content(self) -> tuple[dict[str, Lazy], Mapping[str, str]]:
        match self.container:
            case "folder":
                return (pytorch.read_folder(self.path) if self.config else {}), {}
            case "npz":
                return npz.read(self.path, self._file), {}
            case "safetensors":
                return safetensors.read(self.path, self._file)
            case "pickle":
                return pytorch.read_pickle(self.path, self._file), {}
        return {}, {}


def open_once(path: epath.Path) -> Opened:
    """What is at a path: the same object as before, if it was opened before and has not changed."""
    return _open(path, _mark(path))


def forget() -> None:
    """Closes files that are no longer used. Call it once the weights are on their devices: a run
    must not hold them twice.
    """
    _open.cache_clear()


@functools.lru_cache(maxsize=2)  # a checkpoint to start from and a teacher
def _open(path: epath.Path, mark: tuple) -> Opened:
    return Opened(path)


def _mark(path: epath.Path) -> tuple:
    """Changes when the file, or a folder's config.json or weights, are written anew."""
    names = (CONFIG, pytorch.WEIGHTS, pytorch.INDEX, *pytorch.PICKLED)
    files = [path / name for name in names] if path.is_dir() else [path]
    stats = [file.stat() for file in files if file.exists()]
    return tuple((stat.length, stat.mtime) for stat in stats)


def _container(head: bytes, suffix: str) -> str:
    if safetensors.begins_as_safetensors(head):
        return "safetensors"
    if pytorch.begins_as_pickle(head, suffix):
        return "pickle"
    return "npz" if head.startswith(npz.ZIP) else ""
