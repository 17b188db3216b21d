"""The files of PyTorch: pickles, and folders as the hubs lay them out. What tensors are called is
not known here.
"""

import contextlib
import dataclasses
import json
import re

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.base.outputs import ended_by_sigterm, partial_path
from vit_jax.interchange import pickles, safetensors, state_dicts

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLED = "pytorch_model.bin"
# What a folder's weights may be called, the first that is there.
NAMES = (WEIGHTS, INDEX, PICKLED, f"{PICKLED}.index.json")
SUFFIXES = (".pth", ".pt", ".bin", ".tar", ".ckpt")
_MOST_JSON = 2**26  # bytes
METADATA = "vit_jax"  # where we write what a file's tensors do not tell


def begins_as_pickle(head: bytes, suffix: str) -> bool:
    """Whether a file may be what `torch.save` writes: a zip archive, or before 2020 a pickle.

    Args:
      head: its first bytes.
      suffix: of its name.
    """
    return head[:1] == b"\x80" or head[:4] == b"PK\3\4" and suffix in SUFFIXES


def weights_of(folder: epath.Path) -> epath.Path:
    """The file of a folder as Hugging Face lays it out that holds the weights, or the index of those
    that do.
    """
    for name in NAMES:
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f"{folder} has a config.json, but no {WEIGHTS} nor {PICKLED}")


def read_weights(path: epath.Path, state_dict: str) -> tuple[dict[str, LazyArray], dict[str, str]]:
    """The tensors of one of the files `NAMES`, of an index those of its files; and its metadata.

    Args:
      state_dict: see `state_dicts.find_tensors`.
    """
    files, tensors, metadata = [path], {}, {}
    if path.name.endswith(".index.json"):
        files = [path.parent / name for name in _indexed(path)]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} is missing, which {path.name} names")
        if file.name.endswith(".safetensors"):
            content, metadata = safetensors.read(file)
            tensors |= state_dicts.without_wrappers(content)
        else:
            tensors |= state_dicts.find_tensors(pickles.read(file), file, state_dict)
    return tensors, metadata


def _indexed(path: epath.Path) -> list[str]:
    """The files beside it that an index names."""
    places_of = read_json(path).get("weight_map", {})
    names = list(places_of.values()) if isinstance(places_of, dict) else [places_of]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name):
            raise CheckpointError(f"{path} names {str(name)[:100]!r}, which is no file beside it")
    return sorted(set(names))


def read_json(path: epath.Path) -> dict:
    """A JSON object from a file.

    Raises:
      CheckpointError: it is none, or too large to be one that describes a checkpoint.
    """
    if path.stat().length > _MOST_JSON:
        raise CheckpointError(f"{path} has {path.stat().length:,} bytes, more than {_MOST_JSON:,}")
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def refuse_to_pickle(path: epath.Path) -> None:
    """Raises `CheckpointError` for the name of a pickle."""
    if path.suffix in SUFFIXES:
        raise CheckpointError(
            f"{path} is not written: pickles can run code. Name it .safetensors, which timm reads too"
        )


@dataclasses.dataclass
class NewFolder:
    """A folder that appears under its name when it is whole: `with NewFolder(path) as inside: …`.

    Not so in a bucket, where folders cannot be renamed; what is there after an error is removed.
    """

    path: epath.Path

    def __enter__(self) -> epath.Path:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise CheckpointError(f"{self.path} exists already: name a new folder")
        self._partial = self.path
        if not places.in_bucket(self.path):
            self._partial = partial_path(self.path)
        self._on_sigterm = contextlib.ExitStack()
        self._on_sigterm.enter_context(ended_by_sigterm())
        self._partial.mkdir(parents=True, exist_ok=True)
        return self._partial

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None and self._partial != self.path:
                if self.path.exists():
                    self.path.rmdir()
                self._partial.rename(self.path)
        finally:
            if self._partial.exists() and (kind or self._partial != self.path):
                self._partial.rmtree()
            self._on_sigterm.close()
