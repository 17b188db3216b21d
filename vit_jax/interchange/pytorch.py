"""The files of PyTorch: pickles, and folders as the hubs lay them out. What tensors are called is
not known here.
"""

import argparse
import dataclasses
import json
import os
from typing import BinaryIO

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import paths
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import safetensors
from vit_jax.models.conversions.rules import Lazy

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLED = ("pytorch_model.bin",)
SUFFIXES = (".pth", ".pt", ".bin", ".tar")
METADATA = "vit_jax"  # where we write what a file's tensors do not tell
# Where a training script may have put the parameters in what it saved. Averaged ones come first:
# those are what it evaluates.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")
# Other types that scripts save; none of them runs code when it is rebuilt.
_HARMLESS = [argparse.Namespace]
_PARALLEL = "module."


def begins_as_pickle(head: bytes, suffix: str) -> bool:
    """Whether a file may be what `torch.save` writes: a zip archive, or before 2020 a pickle.

    Args:
      head: its first bytes.
      suffix: of its name.
    """
    return head[:1] == b"\x80" or head[:4] == b"PK\3\4" and suffix in SUFFIXES


def read_folder(folder: epath.Path) -> dict[str, Lazy]:
    """The tensors of a folder as Hugging Face lays it out: in one file or in several that an index names."""
    if (folder / WEIGHTS).exists():
        return safetensors.read(folder / WEIGHTS)[0]
    if (folder / INDEX).exists():
        tensors = {}
        for name in sorted(set(read_json(folder / INDEX).get("weight_map", {}).values())):
            tensors |= safetensors.read(folder / name)[0]
        return tensors
    for name in PICKLED:
        if (folder / name).exists():
            return read_pickle(folder / name)
    raise CheckpointError(
        f"{folder} has a config.json, but no {WEIGHTS} nor {' nor '.join(PICKLED)}"
    )


def read_json(path: epath.Path) -> dict:
    """A JSON object from a file.

    Raises:
      CheckpointError: it is none.
    """
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
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
        if not paths.in_bucket(self.path):
            self._partial = self.path.parent / f".{self.path.name}.partial-{os.getpid()}"
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


def read_pickle(path: epath.Path, file: BinaryIO | None = None) -> dict[str, Lazy]:
    """The tensors of what `torch.save` wrote, held in memory. Where a training script saved both
    the weights and their average, the average is read.

    Args:
      path: of the file.
      file: the same, if it is open already; closed when it is read.

    Raises:
      CheckpointError: it is damaged, or holds more than tensors; no code of it is run.
    """
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a PyTorch file; reading it needs torch, which vit_jax does not install: "
            "pip install torch, or save the weights as .safetensors"
        ) from error
    try:
        # weights_only: torch rebuilds tensors and plain containers, and refuses everything else before running it.
        with file or path.open("rb") as file, torch.serialization.safe_globals(_HARMLESS):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises what zip, pickle and its own code do
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} is not read: it is damaged, or a pickle with more than tensors in it, which could run code "
            f"({reason})"
        ) from error
    if isinstance(content, dict):
        found = [name for name in _WRAPPERS if isinstance(content.get(name), dict)]
        if len(found) > 1:
            logging.info("%s holds %s: %s are read", path, " and ".join(found), found[0])
        content = content[found[0]] if found else content
    if not isinstance(content, dict) or not all(
        isinstance(t, torch.Tensor) for t in content.values()
    ):
        raise CheckpointError(f"{path} holds no state dict: a dictionary of tensors by name")

    def lazy(tensor) -> Lazy:
        bfloat16 = tensor.dtype == torch.bfloat16
        dtype = np.dtype(
            safetensors.DTYPES["BF16"] if bfloat16 else str(tensor.dtype).removeprefix("torch.")
        )

        def load() -> np.ndarray:
            tensor_ = tensor.contiguous()
            return tensor_.view(torch.uint16).numpy().view(dtype) if bfloat16 else tensor_.numpy()

        return Lazy(tuple(tensor.shape), dtype, load)

    return {name.removeprefix(_PARALLEL): lazy(tensor) for name, tensor in content.items()}
