"""Tensors that timm's ViTs keep otherwise than our blocks: fewer heads of keys and values than of queries (Sapiens 2),
one first or last layer of attention and MLP together (ViTs with parallel blocks), and several attentions and MLPs side
by side. Here they become those of a plain ViT.

Each head of keys and values is repeated for its queries, so that a model computes the same. Trained on, its heads may
become different ones, and it is written with all of them. A scale that attention and MLP share becomes one of each.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions.contract import Shapes
from vit_jax.models.zoo.differential import LAMBDAS

_IN = "in_proj.weight"
# Names of a parallel block, and those of a plain one.
_RENAMED = {
    "in_norm.weight": "norm1.weight",
    "in_norm.bias": "norm1.bias",
    "q_norm.weight": "attn.q_norm.weight",
    "q_norm.bias": "attn.q_norm.bias",
    "k_norm.weight": "attn.k_norm.weight",
    "k_norm.bias": "attn.k_norm.bias",
    "attn_out_proj.weight": "attn.proj.weight",
    "attn_out_proj.bias": "attn.proj.bias",
    "mlp_out_proj.weight": "mlp.fc2.weight",
    "mlp_out_proj.bias": "mlp.fc2.bias",
    "mlp_bias": "mlp.fc1.bias",
    "sub_norm.weight": "attn.sub_norm.weight",
    **{name: f"attn.{name}" for name in LAMBDAS},
}


def is_parallel(shapes: Shapes) -> bool:
    """Whether the blocks are timm's parallel ones."""
    return f"blocks.0.{_IN}" in shapes


def as_plain(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of parallel blocks, arrays or shapes by timm's names, under the names of a plain block. The bias of one
    last layer for both becomes attention's, and the MLP's is zero.
    """
    plain = {}
    for name, tensor in tensors.items():
        block, number, rest = ([*name.split(".", 2), "", ""])[:3]
        at = f"{block}.{number}."
        if block != "blocks":
            plain[name] = tensor
        elif rest in ("in_proj.weight", "in_proj.bias"):
            kind, width = rest.rpartition(".")[2], _shape(tensors[at + _IN])[1]
            hidden = _rows(tensor) - 3 * width
            plain[f"{at}mlp.fc1.{kind}"] = _taken(tensor, slice(hidden))
            plain[f"{at}attn.qkv.{kind}"] = _taken(tensor, slice(hidden, None))
        elif rest == "out_proj.weight":
            width = _rows(tensor)
            plain[f"{at}attn.proj.weight"] = _taken(tensor, slice(None), slice(width))
            plain[f"{at}mlp.fc2.weight"] = _taken(tensor, slice(None), slice(width, None))
        elif rest == "out_proj.bias":
            plain[f"{at}attn.proj.bias"] = tensor
            plain[f"{at}mlp.fc2.bias"] = _zeros(tensor)
        elif rest == "ls.gamma":
            plain |= {f"{at}ls{i}.gamma": tensor for i in (1, 2)}
        else:
            plain[at + _RENAMED.get(rest, rest)] = tensor
    return plain


def names_of_branch(number: int) -> tuple[tuple[str, str], ...]:
    """What the parts of a branch of this number are called in timm's blocks, and what in a plain block."""
    attention, mlp = f"attns.{number}", f"ffns.{number}"
    return (
        (f"{attention}.norm", "norm1"),
        (f"{attention}.attn", "attn"),
        (f"{attention}.ls", "ls1"),
        (f"{mlp}.norm", "norm2"),
        (f"{mlp}.mlp", "mlp"),
        (f"{mlp}.ls", "ls2"),
    )


def with_first_branch(shapes: Shapes) -> Shapes:
    """Shapes of blocks with branches: those of the first under the names of a plain block, the others as they are."""
    result = {}
    for name, shape in shapes.items():
        block, number, rest = ([*name.split(".", 2), "", ""])[:3]
        for theirs, plain in names_of_branch(0) if block == "blocks" else ():
            if rest.startswith(f"{theirs}."):
                name = f"{block}.{number}.{plain}{rest.removeprefix(theirs)}"
        result[name] = shape
    return result


def _taken(tensor, *slices: slice):
    """Some rows, and columns, of an array, or the shape of these."""
    before = _shape(tensor)
    taken = [len(range(*part.indices(n))) for part, n in zip(slices, before, strict=False)]
    shape = (*taken, *before[len(slices) :])
    if isinstance(tensor, tuple):
        return shape
    return LazyArray(shape, tensor.dtype, lambda: np.asarray(tensor)[slices])


def _zeros(tensor):
    """Zeros in place of an array, or its shape."""
    if isinstance(tensor, tuple):
        return tensor
    return LazyArray(tensor.shape, tensor.dtype, lambda: np.zeros_like(np.asarray(tensor)))


def _shape(tensor) -> tuple[int, ...]:
    return tensor if isinstance(tensor, tuple) else tuple(tensor.shape)


def _rows(tensor) -> int:
    return _shape(tensor)[0]


def with_all_heads(tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Tensors with a head of keys and values for each of queries.

    Raises:
      CheckpointError: the number of channels of a head is not known, or does not fit.
    """
    result = dict(tensors)
    for name in tensors:
        at, _, last = name.rpartition(".attn.")
        if last.split(".")[0] not in ("k_proj", "v_proj"):
            continue
        queries = _rows(tensors[f"{at}.attn.q_proj.weight"])
        rows = _rows(tensors[name])
        if rows == queries:
            continue
        norm = tensors.get(f"{at}.attn.q_norm.weight")
        if norm is None or rows % _rows(norm) or queries % rows:
            raise CheckpointError(
                f"{name} has {rows} rows, and queries have {queries}: fewer heads of keys and values than of queries "
                "are read where norms of queries say how many channels a head has"
            )
        result[name] = _repeated(tensors[name], _rows(norm), queries // rows)
    return result


def _repeated(array: LazyArray, channels: int, times: int) -> LazyArray:
    """Each head (C, …) of a tensor (heads * C, …) so many times."""
    shape = (array.shape[0] * times, *array.shape[1:])

    def read() -> np.ndarray:
        heads = np.asarray(array).reshape(-1, channels, *array.shape[1:])
        return np.repeat(heads, times, axis=0).reshape(shape)

    return LazyArray(shape, array.dtype, read)
