"""What formats of PyTorch have in common: how layers keep their weights, and how files are read and written.

Weights of linear layers are (outputs, inputs), of convolutions (outputs, inputs, height, width).
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base import paths, patterns
from vit_jax.checkpoints.reading import CheckpointError
from vit_jax.interchange import rules, safetensors
from vit_jax.interchange.rules import Lazy, Rule, chain, joined, reshaped, transposed

WEIGHTS = "model.safetensors"
PICKLED = ("pytorch_model.bin",)
# Where a training script may have put the parameters in what it saved.
_WRAPPERS = ("state_dict", "model")
_PARALLEL = "module."


def linear(ours: str, theirs: str, first_layer: int = 0) -> list[Rule]:
    """A linear layer."""
    return [
        Rule(f"{ours}/kernel", f"{theirs}.weight", transposed(1, 0), first_layer),
        Rule(f"{ours}/bias", f"{theirs}.bias", first_layer=first_layer),
    ]


def norm(ours: str, theirs: str, first_layer: int = 0) -> list[Rule]:
    """A layer norm or group norm."""
    return [
        Rule(f"{ours}/scale", f"{theirs}.weight", first_layer=first_layer),
        Rule(f"{ours}/bias", f"{theirs}.bias", first_layer=first_layer),
    ]


def convolution(ours: str, theirs: str, first_layer: int = 0) -> Rule:
    """The kernel of a convolution."""
    return Rule(f"{ours}/kernel", f"{theirs}.weight", transposed(2, 3, 1, 0), first_layer)


def attention(ours: str, qkv: tuple[str, ...], out: str, width: int, heads: int) -> list[Rule]:
    """Attention whose queries, keys and values come from linear layers: one for all, or several one after the other.

    Args:
      ours: name of the `Attention`.
      qkv: the layers: one of (3D, D), or some that are together, such as a query's (D, D) and a (2D, D).
      out: the last layer.
      width: D.
      heads: their number; a head's channels follow each other.
    """
    size = width // heads
    parts = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[len(qkv)]
    together = joined(0, [part * width for part in parts])
    kernel = chain(
        together, transposed(1, 0), reshaped((width, 3, heads, size), (width, 3 * width))
    )
    bias = chain(together, reshaped((3, heads, size), (3 * width,)))
    out_kernel = chain(transposed(1, 0), reshaped((heads, size, width), (width, width)))
    return [
        Rule(f"{ours}/qkv/kernel", tuple(f"{name}.weight" for name in qkv), kernel),
        Rule(f"{ours}/qkv/bias", tuple(f"{name}.bias" for name in qkv), bias),
        Rule(f"{ours}/out/kernel", f"{out}.weight", out_kernel),
        Rule(f"{ours}/out/bias", f"{out}.bias"),
    ]


def begins_as_pickle(path) -> bool:
    """Whether the file may be what `torch.save` writes: a zip archive, or before 2020 a pickle."""
    with epath.Path(path).open("rb") as file:
        head = file.read(4)
    if head == b"PK\3\4":
        return epath.Path(path).suffix in (".pth", ".pt", ".bin", ".tar")
    return head[:1] == b"\x80"


def read(path) -> tuple[dict[str, Lazy], dict[str, str]]:
    """The tensors of a file, and what else its header says.

    Args:
      path: `.safetensors`, read tensor by tensor, or what `torch.save` wrote, held in memory.

    Raises:
      CheckpointError: it is damaged, or a pickle that holds more than tensors; no code of it is run.
    """
    if safetensors.begins_as_safetensors(path):
        return safetensors.read(path)
    return _read_pickle(epath.Path(path)), {}


def read_folder(folder: epath.Path) -> dict[str, Lazy]:
    """The tensors of a folder as Hugging Face lays it out: in one file or in several that an index names."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists():
        return read(folder / WEIGHTS)[0]
    if index.exists():
        tensors = {}
        for name in sorted(set(read_json(index).get("weight_map", {}).values())):
            tensors |= read(folder / name)[0]
        return tensors
    for name in PICKLED:
        if (folder / name).exists():
            return read(folder / name)[0]
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


def other_dtypes(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The types of the tensors that are not float32, by their names: what `layout['dtypes']` keeps."""
    return {name: np.dtype(t.dtype).name for name, t in tensors.items() if t.dtype != np.float32}


def write(
    path,
    table: Iterable[Rule],
    params: dict,
    dtypes: Mapping[str, str],
    metadata: Mapping[str, str],
) -> None:
    """Writes parameters as a `.safetensors` file, a tensor at a time.

    Raises:
      CheckpointError: the format has no place for a parameter, or the file cannot be written.
    """
    by_name = {rule.ours: rule for rule in table}
    tensors = rules.to_theirs(by_name.values(), params, dtypes=dtypes)
    shapes = rules.shapes([by_name[name] for name in patterns.names(params)], params)
    specs = {name: (shape, np.dtype(dtypes.get(name, "float32"))) for name, shape in shapes.items()}
    safetensors.write(path, tensors, specs, {"format": "pt"} | dict(metadata))


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


def _read_pickle(path: epath.Path) -> dict[str, Lazy]:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a PyTorch file; reading it needs torch, which vit_jax does not install: "
            "pip install torch, or save the weights as .safetensors"
        ) from error
    try:
        # weights_only: torch rebuilds tensors and plain containers, and refuses everything else before running it.
        with path.open("rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  torch raises what zip, pickle and its own code do
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} is not read: it is damaged, or a pickle with more than tensors in it, which could run code "
            f"({reason})"
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
            break
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
