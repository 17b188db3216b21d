"""Where arrays live: the mesh, and one table that says how each of them is sharded over it.

Mesh axes, outermost first: `replica` (each has a copy of the whole state), `data` (parameters are
replicated, optimizer state and averages are sharded), `fsdp` (parameters are sharded too), `tensor`
(heads and MLP width). The batch is sharded over all but `tensor`. A config knows the last three:
its `data` is replica x data. Models know none of this; what is computed with the mesh that is set
is in `compute.partitioning`, where a step computes its update in `training.zero`.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option

# XLA runs simulated CPU devices in one pool with a thread per core. Their collectives wait for each
# other in it, and with fewer threads than waiters they wait forever. NPROC, which XLA reads when the
# first device is used, makes the pool large enough.
if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
    os.environ.setdefault("NPROC", "64")

SIZES = ("data", "fsdp", "tensor")  # of `config.mesh`
AXES = ("replica", *SIZES)
BATCH = ("replica", "data", "fsdp")
# Optimizer state has this many shards at most. More would save little, and hardly any axis of a
# parameter is long enough: XLA scatters whole tiles of 16 rows only, else it sums up everywhere.
STATE_SHARDS = 16
# How the names of stacks in the state of an optimizer of matrices begin: arrays with an entry for each
# matrix, of which devices have whole ones.
MATRICES = "stack_"
# The last two axes of an array on a TPU are padded to multiples of these (gradients are bfloat16).
_TILE = (16, 128)

# (pattern, axis): the axis that tensor parallelism shards, counted from the end so that stacked and
# single layers read alike. These rules are for the layers that families share; a family with layers
# of its own declares theirs in `classifier.ClassifierConfig.tensor_rules`.
# Heads and MLP width: the products before and after need one all-reduce between them (Megatron-LM,
# arXiv 1909.08053 §3).
TENSOR_RULES = (
    (r".*attention/qkv/kernel", -2),
    (r".*attention/qkv/bias", -2),
    (r".*attention/out/kernel", -3),
    (r".*mlp/up/kernel", -1),
    (r".*mlp/up/bias", -1),
    (r".*mlp/down/kernel", -2),
)


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """How the devices are arranged; -1 takes what the others leave. The batch is sharded over data ×
    fsdp, optimizer state and averages over all three.
    """

    data: int = option(-1, "replicas of the parameters", minimum=-1)
    fsdp: int = option(
        1,
        "devices that parameters are sharded over, too; with data=-1, all where there are fewer",
        minimum=-1,
    )
    tensor: int = option(1, "devices that heads and MLP width are sharded over", minimum=-1)
    fsdp_min_size: int = option(
        2**16, "arrays with fewer elements are not sharded over data and fsdp", minimum=0
    )
    gradients: str = option(
        "float32",
        "GPUs: type in which gradients of kernels are added over devices; bfloat16 halves the traffic and rounds sums",
        choices=("float32", "bfloat16"),
    )


def make_mesh(sizes: Mapping[str, int], devices: list | None = None, *, copies: int = 1) -> Mesh:
    """A mesh over `devices`, by default all of them.

    Each slice of a multi-slice run is a `replica`, so that optimizer state is gathered within
    slices alone.

    Args:
      sizes: of `SIZES`, as `config.mesh` has them; one may be -1, which takes the rest. If `data` is,
        `fsdp` may be larger than the number of devices, and all of them take part in it: a recipe
        for a slice runs on a laptop.
      copies: how many copies of the whole state the devices must hold, if `data` is a multiple.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [sizes[axis] for axis in SIZES]
    known = math.prod(size for size in sizes if size != -1)
    text = " x ".join(f"{axis} {size}" for axis, size in zip(SIZES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(
            f"config.mesh: {text}: sizes are positive, and at most one is -1 (the rest)"
        )
    data, fsdp, tensor = sizes
    if data == -1 and fsdp * tensor > len(devices):
        sizes = [data, max(1, len(devices) // tensor), tensor]
        known = sizes[1] * tensor
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise ConfigError(
            f"config.mesh: {text} does not fit the {len(devices)} devices there are; "
            f"set sizes whose product is {len(devices)}, -1 being the rest"
        )
    data, *inner = sizes
    slices = {slice_of(device) for device in devices}
    replicas = _replicas(data, inner[0], max(copies, len(slices)))
    arranged = _arranged(tuple(sizes), devices).reshape(replicas, data // replicas, *inner)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _replicas(data: int, fsdp: int, at_least: int) -> int:
    """How many copies of the whole state the axis `data` of a config holds: the fewest that are a
    multiple of `at_least` and leave no more than `STATE_SHARDS` shards.
    """
    first = at_least if data % at_least == 0 else 1
    possible = [n for n in range(first, data + 1, first) if data % n == 0]
    return next((n for n in possible if data // n * fsdp <= STATE_SHARDS), data)


def sizes_of(mesh: Mesh) -> dict[str, int]:
    """The sizes of a mesh as `config.mesh` has them."""
    sizes = dict(mesh.shape)
    return {"data": sizes.pop("replica") * sizes.pop("data")} | sizes


def batch_shards(mesh: Mesh) -> int:
    """How many shards a batch has."""
    return math.prod(mesh.shape[axis] for axis in BATCH)


def slice_of(device: jax.Device) -> int:
    """Which slice of a multi-slice TPU run a device belongs to; 0 if there is only one."""
    return getattr(device, "slice_index", 0) or 0


def _arranged(sizes: tuple[int, ...], devices: list) -> np.ndarray:
    """Devices in the shape `sizes` (of `SIZES`), so that neighbours in the mesh are neighbours in the
    machine.

    Only `data` crosses slices: the network between them is slow, and gradients are all that `data`
    exchanges.
    """
    slices = len({slice_of(device) for device in devices})
    data, *inner = sizes
    try:
        if slices == 1:
            return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        if data % slices == 0:
            return mesh_utils.create_hybrid_device_mesh(
                (data // slices, *inner), (slices, 1, 1), devices, allow_split_physical_axes=True
            )
        why = f"data {data} is no multiple of the {slices} slices: fsdp or tensor cross the slow network between them"
    except (NotImplementedError, ValueError, AssertionError) as error:
        why = f"the devices do not lie in such a shape ({error})"
    logging.warning(
        "config.mesh: %s; devices are taken in their order, collectives may be slow", why
    )
    return np.array(sorted(devices, key=lambda d: (slice_of(d), d.id))).reshape(sizes)


def replica_mesh() -> Mesh:
    """All devices along `data`: for evaluating and predicting."""
    return make_mesh({"data": -1, "fsdp": 1, "tensor": 1})


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first axis sharded over all axes of `BATCH`."""
    return NamedSharding(mesh, P(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on each device."""
    return NamedSharding(mesh, P())


def shardings(
    tree: Any,
    mesh: Mesh,
    *,
    fsdp_min_size: int,
    tensor_rules: Sequence[tuple[str, int]] = (),
    over_data: bool = False,
):
    """How a tree of parameters, or a whole training state around one, lies on the mesh; arguments
    as of `specs`.

    Returns:
      The same tree of `NamedSharding`.
    """
    tree_of_specs = specs(
        tree,
        mesh.shape,
        fsdp_min_size=fsdp_min_size,
        tensor_rules=tensor_rules,
        over_data=over_data,
    )
    return jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), tree, tree_of_specs)


def specs(
    tree: Any,
    sizes: Mapping[str, int],
    *,
    fsdp_min_size: int,
    tensor_rules: Sequence[tuple[str, int]] = (),
    over_data: bool = False,
):
    """How a tree of arrays is sharded.

    Args:
      tree: arrays or `ShapeDtypeStruct`s. An array is sharded by the end of its path and its
        shape, so that optimizer state lies as its parameter does.
      sizes: of `AXES`.
      fsdp_min_size: arrays with fewer elements stay whole on every device.
      tensor_rules: as `TENSOR_RULES`, and before these.
      over_data: whether they are sharded over `data` too, as optimizer state is.

    Returns:
      The same tree of `PartitionSpec`.
    """
    rules = (*tensor_rules, *TENSOR_RULES)

    def spec(name: str, leaf) -> P:
        shape = leaf.shape
        whole = math.prod(sizes[axis] for axis in SIZES)
        if f"/{MATRICES}" in name and over_data and whole > 1 and shape[0] % whole == 0:
            return P(SIZES)
        # The stack of layers itself is never sharded: one layer would be on one device.
        free = range(int(patterns.is_stacked(name)), len(shape))
        axes: list[tuple[str, ...]] = [()] * len(shape)
        _over_tensor(axes, name, shape, sizes, rules)
        if math.prod(shape) >= fsdp_min_size:
            _over_fsdp(axes, shape, sizes, free)
            if over_data:
                _over_data(axes, shape, sizes, free)
        return P(*(entry[0] if len(entry) == 1 else entry or None for entry in axes))

    return patterns.map_named(spec, tree)


def _over_tensor(axes: list, name: str, shape, sizes, rules) -> None:
    """Adds `tensor` to the axis that the first rule that fits names."""
    if sizes["tensor"] == 1:
        return
    for pattern, axis in rules:
        fits = len(shape) >= -axis and shape[axis] % sizes["tensor"] == 0
        if fits and re.fullmatch(pattern, name):
            axes[axis] = ("tensor",)
            return


def _over_fsdp(axes: list, shape, sizes, free) -> None:
    """Adds `fsdp` to the largest axis without another that it divides."""
    if sizes["fsdp"] == 1:
        return
    divides = [i for i in free if not axes[i] and shape[i] % sizes["fsdp"] == 0]
    if divides:
        axes[max(divides, key=lambda i: shape[i])] = ("fsdp",)


def _over_data(axes: list, shape, sizes, free) -> None:
    """Adds `data` to the axis, sharded or not, that it divides and whose shards are the smallest on
    a TPU, with their padding.
    """
    if sizes["data"] == 1:
        return
    parts = [math.prod(sizes[axis] for axis in entry) for entry in axes]
    shard = [size // count for size, count in zip(shape, parts, strict=True)]

    def padded(axis: int) -> int:
        split = list(shard)
        split[axis] //= sizes["data"]
        outer_units = [1] * (len(split) - 2)
        tile = outer_units + [*_TILE][-len(split) :]
        tiles = [-(-size // unit) for size, unit in zip(split, tile, strict=True)]
        return math.prod(tiles) * math.prod(tile)

    divides = [i for i in free if shard[i] % sizes["data"] == 0]
    if divides:
        best = min(divides, key=padded)
        axes[best] = (*axes[best], "data")
