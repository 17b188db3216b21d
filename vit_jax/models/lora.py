"""Low-rank adapters (LoRA, arXiv 2106.09685) of the dense layers of any model.

An adapter is two matrices, A and B, whose product is added to a frozen kernel: W + A B, and B is zero at first.
Models compute with the sums and do not know of them. Query, key and value have an adapter each, although their
kernels are one parameter, `qkv/kernel`: they are called `attention/query`, `attention/key` and `attention/value`,
other layers by their own names: `mlp/up`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import classifier

if TYPE_CHECKING:
    from vit_jax.base.lazy_array import LazyArray

ADAPTERS = "adapters"  # their name among the parameters that are trained
A, B = "lora_a", "lora_b"
SLOTS = {"query": 0, "key": 1, "value": 2}


@dataclasses.dataclass(frozen=True)
class Target:
    """A layer that can have an adapter.

    Attributes:
      kernel: the name of its parameter.
      slot: which of the three kernels of `qkv/kernel` it is; `None`: the parameter is one kernel.
      a, b: shapes of the two matrices of rank 1, A (*layers, *inputs, 1) and B (*layers, 1, *outputs).
    """

    kernel: str
    slot: int | None
    a: tuple[int, ...]
    b: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Adapters:
    """What is trained of a model with adapters; all else is its base.

    Attributes:
      rank: columns of A and rows of B.
      targets: patterns of the layers that have one.
      also: patterns of the parameters that are trained beside the adapters.
    """

    rank: int
    targets: tuple[str, ...]
    also: tuple[str, ...]

    def split(self, params: dict) -> tuple[dict, dict]:
        """The parameters of a model (or their shapes) as the base, which is frozen, and what is trained of it."""
        # Heads, which a model need not have.
        if classifier.without_exits(self.also) != classifier.without_exits([classifier.HEADS]):
            patterns.check_patterns(self.also, patterns.names(params), "config.lora.also")
        trained = set(patterns.matching(self.also, patterns.names(params)))
        return _select(params, lambda name: name not in trained), _select(
            params, trained.__contains__
        )

    def chosen(self, params: dict) -> dict[str, Target]:
        """The layers that have an adapter, by name.

        Raises:
          ConfigError: a pattern matches none.
        """
        base, _ = self.split(params)
        possible = dict(targets(base))
        where = "config.lora.lora_targets"
        if not self.targets:
            raise ConfigError(
                f"{where} is empty: name layers, such as {next(iter(possible), 'none')}"
            )
        patterns.check_patterns(self.targets, list(possible), where)
        return {name: possible[name] for name in patterns.matching(self.targets, possible)}

    def check_rank(self, params: dict) -> None:
        """Raises `ConfigError` if the rank is higher than that of a layer which has an adapter."""
        for name, target in self.chosen(params).items():
            layers = int(patterns.is_stacked(name))
            most = min(math.prod(target.a[layers:]), math.prod(target.b[layers:]))
            if self.rank > most:
                raise ConfigError(
                    f"config.lora.lora_rank = {self.rank} must be at most {most}, the rank of {name}: set e.g. 8"
                )

    def init(self, params: dict, key: jax.Array) -> dict:
        """New adapters for a model with these parameters (or shapes): A is uniform, as in a new layer, B is zero."""
        adapters: dict = {}
        for number, (name, target) in enumerate(self.chosen(params).items()):
            shape = (*target.a[:-1], self.rank)
            layers = int(patterns.is_stacked(name))
            bound = 1 / math.sqrt(math.prod(target.a[layers:]))
            draw = jax.random.uniform(
                jax.random.fold_in(key, number), shape, minval=-bound, maxval=bound
            )
            zeros = jnp.zeros((*target.b[:layers], self.rank, *target.b[layers + 1 :]))
            place(adapters, name, {A: draw, B: zeros})
        return adapters

    def trained_like(self, params: dict) -> dict:
        """Shapes and dtypes of what is trained of a model with parameters like `params`."""
        adapters = jax.eval_shape(lambda: self.init(params, jax.random.key(0)))
        return self.split(params)[1] | {ADAPTERS: adapters}


def whole(base: dict | None, trained: dict) -> dict:
    """All parameters of a model: the base with the products of its adapters added, and what else is trained.

    Args:
      base: from `Adapters.split`; `None`: all parameters are trained, there are no adapters.
      trained: what is trained, with adapters under `ADAPTERS`.
    """
    if base is None:
        return trained
    rest = {name: tree for name, tree in trained.items() if name != ADAPTERS}
    return patterns.union(adapted(base, trained[ADAPTERS], _in_jax), rest)


def adapted(base: dict, adapters: dict, add: Callable) -> dict:
    """`base` with `add(kernel, A, B, slot)` in place of each kernel that has an adapter."""
    tree = dict(base)
    for name, node in adapters.items():
        if A in node:
            slot = None if name in tree else SLOTS[name]
            layer = name if slot is None else "qkv"
            kernel = add(tree[layer]["kernel"], node[A], node[B], slot)
            tree[layer] = tree[layer] | {"kernel": kernel}
        else:
            key = next(key for key in tree if str(key) == name)
            tree[key] = adapted(tree[key], node, add)
    return tree


def add_product(kernel: Any, a: Any, b: Any, slot: int | None, matmul: Callable) -> Any:
    """kernel + A B, of NumPy arrays or JAX's.

    Args:
      kernel: (*layers, *inputs, *outputs), or (*layers, *inputs, 3, *outputs) if there is a slot.
      a: (*layers, *inputs, R).
      b: (*layers, R, *outputs).
      slot: see `Target`.
      matmul: the product of stacked matrices.
    """
    shape = kernel.shape if slot is None else (*kernel.shape[:-3], *kernel.shape[-2:])
    layers = shape[: a.ndim + b.ndim - 2 - len(shape)]
    rank = a.shape[-1]
    product = matmul(a.reshape(*layers, -1, rank), b.reshape(*layers, rank, -1)).reshape(shape)
    if slot is None:
        return kernel + product
    # Not `at[].add`: NumPy has none, and a product with three numbers is sharded as it is.
    mask = np.asarray([number == slot for number in SLOTS.values()], kernel.dtype)
    return kernel + product[..., None, :, :] * mask[:, None, None]


def add_lazily(kernel: Any, a: Any, b: Any, slot: int | None) -> "LazyArray":
    """As `add_product`, of arrays that are read when used."""
    from vit_jax.base.lazy_array import LazyArray

    def read() -> np.ndarray:
        return add_product(*map(np.asarray, (kernel, a, b)), slot, np.matmul)

    return LazyArray(tuple(kernel.shape), kernel.dtype, read)


@functools.partial(jax.jit, static_argnames="slot")
def _in_jax(kernel: jax.Array, a: jax.Array, b: jax.Array, slot: int | None) -> jax.Array:
    matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return add_product(kernel, a, b, slot, matmul)


def targets(params: dict) -> Iterator[tuple[str, Target]]:
    """The layers that can have an adapter: kernels with two axes, or three of which the heads are one."""
    for name, leaf in patterns.named(params).items():
        layer, _, last = name.rpartition("/")
        stacked = int(patterns.is_stacked(name))
        layers, shape = leaf.shape[:stacked], leaf.shape[stacked:]
        if last != "kernel":
            continue
        parent, _, own = layer.rpartition("/")
        if own == "qkv" and len(shape) == 4 and shape[1] == len(SLOTS):
            for which, slot in SLOTS.items():
                a, b = (*layers, shape[0], 1), (*layers, 1, *shape[2:])
                yield f"{parent}/{which}".lstrip("/"), Target(name, slot, a, b)
        elif len(shape) in (2, 3):
            inputs = len(shape) - 1 if layer.endswith("attention/out") else 1
            a, b = (*layers, *shape[:inputs], 1), (*layers, 1, *shape[inputs:])
            yield layer, Target(name, None, a, b)


def adapted_layer(name: str) -> str:
    """The name of a parameter, or for a matrix of an adapter its name below the layer that it adapts.

    >>> adapted_layer("adapters/encoder/layers/mlp/up/lora_a")
    'encoder/layers/mlp/up/lora_a'
    """
    return name.removeprefix(f"{ADAPTERS}/")


def kernel_names(name: str) -> tuple[str, ...]:
    """The names that the kernel of an adapter can have; a model has one of them. Other parameters give none.

    >>> kernel_names("adapters/attention/query/lora_b")
    ('attention/query/kernel', 'attention/qkv/kernel')
    """
    layer, _, matrix = name.rpartition("/")
    if not name.startswith(f"{ADAPTERS}/") or matrix not in (A, B):
        return ()
    layer = adapted_layer(layer)
    parent, _, own = layer.rpartition("/")
    if own not in SLOTS:
        return (f"{layer}/kernel",)
    return f"{layer}/kernel", f"{parent}/qkv/kernel".lstrip("/")


def place(tree: dict, name: str, node: dict) -> None:
    """Puts the matrices of a layer into a nested dict of adapters."""
    *path, last = name.split("/")
    for key in path:
        tree = tree.setdefault(key, {})
    tree[last] = node


def _select(tree: dict, wanted: Callable[[str], bool], prefix: str = "") -> dict:
    """The leaves whose names are wanted; no empty dicts."""
    selected = {}
    for key, part in tree.items():
        name = f"{prefix}{key}"
        if not isinstance(part, dict):
            if wanted(name):
                selected[key] = part
        elif part := _select(part, wanted, f"{name}/"):
            selected[key] = part
    return selected
