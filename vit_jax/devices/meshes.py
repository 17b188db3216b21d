"""Where arrays live: the mesh, and one table that says how each of them is cut over it.

Mesh axes, outermost first: `data` (replicas), `fsdp` (parameters and optimizer state cut, batch
too), `tensor` (heads and MLP width). Models know none of this; what is computed with the mesh that is
set is in `compute.partitioning`.
"""

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

# XLA runs simulated CPU devices in one pool with a thread per core. Their collectives wait for each
# other in it, and with fewer threads than waiters they wait for ever. NPROC, which XLA reads when the
# first device is used, makes the pool large enough.
if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
    os.environ.setdefault("NPROC", "64")

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

# (pattern, axis): the axis that tensor parallelism cuts, counted from the end so that stacked and
# single layers read alike. These rules are for the layers that families share; a family with layers
# of its own declares theirs in `classifier.Options.tensor_rules`.
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


def make_mesh(sizes: Mapping[str, int], devices: list | None = None) -> Mesh:
    """A mesh over `devices`, by default all of them.

    Args:
      sizes: of `AXES`, as `config.mesh` has them; one may be -1, which takes the rest.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [sizes[axis] for axis in AXES]
    known = math.prod(size for size in sizes if size != -1)
    text = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(
            f"config.mesh: {text}: sizes are positive, and at most one is -1 (the rest)"
        )
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        raise ConfigError(
            f"config.mesh: {text} does not fit the {len(devices)} devices there are; "
            f"set sizes whose product is {len(devices)}, -1 being the rest"
        )
    return Mesh(_arranged(tuple(sizes), devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def slice_of(device: jax.Device) -> int:
    """Which slice of a multi-slice TPU run a device belongs to; 0 if there is only one."""
    return getattr(device, "slice_index", 0) or 0


def _arranged(sizes: tuple[int, ...], devices: list) -> np.ndarray:
    """Devices in the shape `sizes`, so that neighbours in the mesh are neighbours in the machine.

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
    """The first axis cut over all replicas."""
    return NamedSharding(mesh, P(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on each device."""
    return NamedSharding(mesh, P())


def shardings(
    tree: Any, mesh: Mesh, *, fsdp_min_size: int, tensor_rules: Sequence[tuple[str, int]] = ()
):
    """How a tree of parameters, or a whole training state around one, lies on the mesh.

    Args:
      tree: arrays or `ShapeDtypeStruct`s. An array is laid out by the end of its path and its
        shape, so that optimizer state lies as its parameter does.
      fsdp_min_size: arrays with fewer elements stay whole on every replica.
      tensor_rules: as `TENSOR_RULES`, and before these.

    Returns:
      The same tree of `NamedSharding`.
    """
    sizes, rules = dict(mesh.shape), (*tensor_rules, *TENSOR_RULES)

    def place(name: str, leaf) -> NamedSharding:
        return NamedSharding(mesh, _spec(name, leaf.shape, sizes, fsdp_min_size, rules))

    return patterns.map_named(place, tree)


def _spec(
    name: str,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    fsdp_min_size: int,
    tensor_rules: Sequence[tuple[str, int]],
) -> P:
    """Tensor parallelism by name, then FSDP on the largest axis left that divides."""
    axes: list[str | None] = [None] * len(shape)
    if sizes["tensor"] > 1:
        for pattern, axis in tensor_rules:
            fits = len(shape) >= -axis and shape[axis] % sizes["tensor"] == 0
            if fits and re.fullmatch(pattern, name):
                axes[axis] = "tensor"
                break
    if sizes["fsdp"] > 1 and math.prod(shape) >= fsdp_min_size:
        # Cutting the stack of layers itself would gather one layer from one device: never cut that
        # axis.
        first = int(patterns.is_stacked(name))
        free = [i for i in range(first, len(shape)) if axes[i] is None]
        free = [i for i in free if shape[i] % sizes["fsdp"] == 0]
        if free:
            axes[max(free, key=lambda i: shape[i])] = "fsdp"
    return P(*axes)
