"""Tensors that timm's ViTs keep otherwise than our blocks: fewer heads of keys and values than of queries (Sapiens 2),
one layer of attention and MLP together (ViTs with parallel blocks), and several attentions and MLPs side by side. Here
they become those of a plain ViT.

Each head of keys and values is repeated for its queries, so that a model computes the same. Trained on, its heads may
become different ones, and it is written with all of them. A scale that attention and MLP share becomes one of each.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions.contract import Shapes

_PARALLEL = ("in_proj.weight", "attn_out_proj.weight", "mlp_out_proj.weight")
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
}


def is_parallel(shapes: Shapes) -> bool:
    """Whether the blocks are timm's parallel ones."""
    return {f"blocks.0.{name}" for name in _PARALLEL} <= shapes.keys()


def as_plain(tensors: Mapping[str, Any], take: Callable[[Any, slice], Any]) -> dict[str, Any]:
    """Tensors of parallel blocks under the names of a plain block.

    Args:
      tensors: by timm's names: arrays, or their shapes.
      take: some rows of one.
    """
    plain = {}
    for name, tensor in tensors.items():
        block, number, rest = ([*name.split(".", 2), "", ""])[:3]
        at = f"{block}.{number}."
        if block != "blocks":
            plain[name] = tensor
        elif rest in ("in_proj.weight", "in_proj.bias"):
            width, kind = tensors[f"{at}attn_out_proj.weight"], rest.rpartition(".")[2]
            hidden = _rows(tensor) - 3 * _rows(width)
            plain[f"{at}mlp.fc1.{kind}"] = take(tensor, slice(hidden))
            plain[f"{at}attn.qkv.{kind}"] = take(tensor, slice(hidden, None))
        elif rest == "ls.gamma":
            plain |= {f"{at}ls{i}.gamma": tensor for i in (1, 2)}
        else:
            plain[at + _RENAMED.get(rest, rest)] = tensor
    return plain


def names_of_branch(number: int) -> tuple[tuple[str, str], ...]:
    """How names in a block of timm's branch of this number begin, and those of a plain block."""
    attention, mlp = f"attns.{number}.", f"ffns.{number}."
    return (
        (f"{attention}norm.", "norm1."),
        (f"{attention}attn.", "attn."),
        (f"{attention}ls.", "ls1."),
        (f"{mlp}norm.", "norm2."),
        (f"{mlp}mlp.", "mlp."),
        (f"{mlp}ls.", "ls2."),
    )


def with_first_branch(shapes: Shapes) -> Shapes:
    """Shapes of blocks with branches: those of the first under the names of a plain block, the others as they are."""
    result = {}
    for name, shape in shapes.items():
        block, number, rest = ([*name.split(".", 2), "", ""])[:3]
        for theirs, plain in names_of_branch(0) if block == "blocks" else ():
            if rest.startswith(theirs):
                name = f"{block}.{number}.{plain}{rest.removeprefix(theirs)}"
        result[name] = shape
    return result


def rows_of_shape(shape: tuple[int, ...], rows: slice) -> tuple[int, ...]:
    """The shape of some rows of a tensor; see `as_plain`."""
    return (len(range(*rows.indices(shape[0]))), *shape[1:])


def rows_of_array(array: LazyArray, rows: slice) -> LazyArray:
    """Some rows of a tensor; see `as_plain`."""
    shape = rows_of_shape(tuple(array.shape), rows)
    return LazyArray(shape, array.dtype, lambda: np.asarray(array)[rows])


def _rows(tensor) -> int:
    return (tensor if isinstance(tensor, tuple) else tensor.shape)[0]


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
