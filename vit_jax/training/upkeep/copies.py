"""The copies of a state on the devices: their marks, the search for wrong copies, and their correction.

Every device marks its own shards (`compute.digests`), because XLA and JAX would read one copy of an array and trust
that all copies are equal. The program exchanges only sums and bounds of marks between devices. If it finds a
difference, hosts exchange the marks themselves, through the coordination service. `audit` decides about the run.
"""

import collections
import dataclasses
import json
import math
import socket
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from vit_jax.base import patterns
from vit_jax.compute import digests
from vit_jax.devices import processes


@dataclasses.dataclass(frozen=True)
class Marks:
    """Marks of a state, on the devices.

    Attributes:
      of_devices: uint32 (*mesh, arrays, SUMS), of the shards that each device holds.
      totals: uint32 (arrays, SUMS), of the whole arrays.
      wrong: int32, the number of devices with bits that differ from another copy, or from their own bits before.
    """

    of_devices: jax.Array
    totals: jax.Array
    wrong: jax.Array


@dataclasses.dataclass(frozen=True)
class Fault:
    """Wrong bits of an array on a device.

    Attributes:
      array: the name of the array.
      device: the position of the device in the mesh, as an index into `mesh.devices.flat`.
      certain: whether it is this device; if not, it is one of the devices that are reported for the array.
      why: the evidence.
    """

    array: str
    device: int
    certain: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Findings:
    """The findings of an audit.

    Attributes:
      faults: of all devices.
      senders: for each faulty array bool (*mesh), one device of each set of equal shards that has the right
        bits; `None` where a set has none.
    """

    faults: list[Fault]
    senders: dict[int, np.ndarray | None]

    @property
    def curable(self) -> bool:
        """Whether the right bits are on a device, of all arrays."""
        return all(sender is not None for sender in self.senders.values())


class Copies:
    """The copies of the arrays of a state on a mesh."""

    def __init__(self, like: Any, mesh: jax.sharding.Mesh):
        """Args: `like`: a tree of shapes, dtypes and shardings, all on `mesh`."""
        self.mesh = mesh
        self.names = patterns.names(like)
        self._leaves, self._structure = jax.tree.flatten(like)
        # Along `tensor` GPUs compute sums by atomic additions, in a different order on each GPU.
        gpu = mesh.devices.flat[0].platform == "gpu"
        compared = [axis for axis in mesh.axis_names if not (gpu and axis == "tensor")]
        self._sharded = [_axes_of(leaf.sharding.spec) for leaf in self._leaves]
        self._copied = [
            tuple(axis for axis in compared if axis not in axes) for axes in self._sharded
        ]
        self.program = self._make_program()
        shape = (*mesh.devices.shape, len(self.names), digests.SUMS)
        self.none = jax.jit(
            lambda: jnp.zeros(shape, jnp.uint32),
            out_shardings=jax.sharding.NamedSharding(mesh, P(*mesh.axis_names)),
        )

    def mark(self, tree: Any, before: jax.Array, kept: np.ndarray) -> Marks:
        """The marks of a tree; does not wait for the devices.

        Args:
          tree: the arrays.
          before: marks of devices that they are compared with.
          kept: bool (arrays,), which arrays must not have changed since `before`.
        """
        return Marks(*self.program(jax.tree.leaves(tree), before, kept))

    def _make_program(self):
        specs = [leaf.sharding.spec for leaf in self._leaves]
        whole = P()
        apart = P(*self.mesh.axis_names)
        program = jax.shard_map(
            self._mark_shards,
            mesh=self.mesh,
            in_specs=(specs, apart, whole),
            out_specs=(apart, whole, whole),
            check_vma=False,
        )
        shardings = [leaf.sharding for leaf in self._leaves]
        of_marks = jax.sharding.NamedSharding(self.mesh, apart)
        of_kept = jax.sharding.NamedSharding(self.mesh, whole)
        return jax.jit(program, in_shardings=(shardings, of_marks, of_kept))

    def _mark_shards(self, leaves: Sequence[jax.Array], before: jax.Array, kept: jax.Array):
        """The fields of `Marks`, from the shards of a device; inside `shard_map`."""
        marks = self._marks_of(leaves)
        now = marks[:, digests.DIGEST]
        earlier = before.reshape(marks.shape)[:, digests.DIGEST]
        wrong = jnp.any((now != earlier).any(axis=1) & kept)
        for copied, members in _grouped(self._copied).items():
            wrong |= _differ(now[members], copied)
        totals = jnp.zeros_like(marks)
        for sharded, members in _grouped(self._sharded).items():
            total = _sum_over(sharded, marks[members])
            totals = totals.at[members].set(total)
        wrong = jax.lax.psum(wrong.astype(jnp.int32), self.mesh.axis_names)
        return marks.reshape(before.shape), totals, wrong

    def _marks_of(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The marks of a device's shards of all arrays, (arrays, SUMS); inside `shard_map`."""
        marks = []
        for x, leaf in zip(leaves, self._leaves, strict=True):
            starts = _starts(x, leaf.sharding.spec)
            marks.append(digests.mark(x, shape=leaf.shape, starts=starts))
        return jnp.stack(marks)

    def find(self, marks: Marks, before: jax.Array, kept: np.ndarray) -> Findings:
        """Which devices hold wrong bits; called by all processes, with the arguments of `mark`."""
        now = self._gathered_digests(marks.of_devices)
        earlier = self._gathered_digests(before)
        unchanged = ~kept | (now == earlier).all(axis=-1)
        faults = []
        senders = {}
        for index, name in enumerate(self.names):
            sets = self._sets(index)
            of_array = unchanged[:, index]
            judgements = [_judge(now[copies, index], of_array[copies]) for copies in sets]
            if all(good is not None and right.all() for good, right in judgements):
                continue
            for copies, (good, right) in zip(sets, judgements, strict=True):
                for device in copies[~right]:
                    faults.append(_fault(name, device, of_array[device], good is not None))
            senders[index] = self._senders(sets, [good for good, _ in judgements])
        return Findings(faults, senders)

    def _gathered_digests(self, table: jax.Array) -> np.ndarray:
        """The digests of the marks of all devices, (devices, arrays, 2), in every process."""
        marks = gather_table(table, self.mesh)
        of_devices = marks.reshape(self.mesh.devices.size, *marks.shape[-2:])
        return of_devices[..., digests.DIGEST]

    def _senders(self, sets: np.ndarray, good: Sequence[int | None]) -> np.ndarray | None:
        """One device of each set that has the right bits, bool (*mesh); `None` if a set has none.

        Args:
          sets: from `_sets`.
          good: the position of a right copy in each set.
        """
        if None in good:
            return None
        chosen = np.zeros(self.mesh.devices.size, bool)
        for copies, position in zip(sets, good, strict=True):
            chosen[copies[position]] = True
        return chosen.reshape(self.mesh.devices.shape)

    def heal(self, tree: Any, findings: Findings) -> Any:
        """The tree with the right bits in all copies of its faulty arrays, sent by a device that has them."""
        leaves = jax.tree.leaves(tree)
        for index, senders in findings.senders.items():
            leaves[index] = self._sent(index, leaves[index], senders)
        return jax.tree.unflatten(self._structure, leaves)

    def _sent(self, index: int, x: jax.Array, senders: np.ndarray) -> jax.Array:
        copied = self._copied[index]

        def of_device(x, sends):
            words = f"uint{8 * x.dtype.itemsize}"
            is_bool = x.dtype == bool
            bits = x.astype(words) if is_bool else jax.lax.bitcast_convert_type(x, words)
            words_of_sum = bits.astype(jnp.uint32)
            # All but one add zeros.
            sent = jnp.where(sends.reshape(()), words_of_sum, jnp.uint32(0))
            bits = _sum_over(copied, sent).astype(words)
            return bits.astype(bool) if is_bool else jax.lax.bitcast_convert_type(bits, x.dtype)

        spec = x.sharding.spec
        apart = P(*self.mesh.axis_names)
        program = jax.shard_map(
            of_device, mesh=self.mesh, in_specs=(spec, apart), out_specs=spec, check_vma=False
        )
        sharding = jax.sharding.NamedSharding(self.mesh, apart)
        sends = jax.make_array_from_callback(senders.shape, sharding, lambda part: senders[part])
        return jax.jit(program, out_shardings=x.sharding)(x, sends)

    def _sets(self, index: int) -> np.ndarray:
        """The devices that hold equal shards of an array, (sets, copies), by position."""
        shape = self.mesh.devices.shape
        positions = np.arange(self.mesh.devices.size).reshape(shape)
        last = [self.mesh.axis_names.index(axis) for axis in self._copied[index]]
        first = [i for i in range(len(shape)) if i not in last]
        copies = math.prod(shape[i] for i in last)
        return positions.transpose(*first, *last).reshape(-1, copies)


def gather_table(table: jax.Array, mesh: jax.sharding.Mesh) -> np.ndarray:
    """A table with a part on every device, (*mesh, rows, columns) of uint32, gathered in every process."""
    mine = {}
    for shard in table.addressable_shards:
        in_mesh = shard.index[: mesh.devices.ndim]
        position = ",".join(str(part.start or 0) for part in in_mesh)
        mine[position] = np.asarray(shard.data).tobytes().hex()
    whole = np.zeros(table.shape, np.uint32)
    for posted in processes.gather("table of all devices", json.dumps(mine)):
        for position, text in json.loads(posted).items():
            values = np.frombuffer(bytes.fromhex(text), np.uint32)
            in_mesh = tuple(map(int, position.split(",")))
            whole[in_mesh] = values.reshape(table.shape[-2:])
    return whole


def hosts() -> list[str]:
    """The host of each process; called by all of them."""
    return processes.gather("hosts", socket.gethostname())


def _judge(digests: np.ndarray, unchanged: np.ndarray) -> tuple[int | None, np.ndarray]:
    """The position of a right copy, or `None` if it is not known, and a mask of all right copies, bool (copies,).

    The majority of the copies that have not changed decides.

    Args:
      digests: uint32 (copies, 2).
      unchanged: bool (copies,), whether the bits of each copy are the same as before.
    """
    no_majority = (None, np.zeros(len(digests), bool))
    votes = collections.Counter(map(tuple, digests[unchanged].tolist()))
    if not votes:
        return no_majority
    best, count = votes.most_common(1)[0]
    if 2 * count <= unchanged.sum():
        return no_majority
    right = unchanged & (digests == np.array(best)).all(axis=1)
    return int(np.argmax(right)), right


def _fault(array: str, device: int, unchanged: bool, majority: bool) -> Fault:
    """The fault of a device with a wrong copy of an array.

    Args:
      unchanged: whether the bits of the copy are the same as before.
      majority: whether most of the copies agree.
    """
    certain = majority or not unchanged
    return Fault(array, int(device), bool(certain), _why(unchanged, majority))


def _differ(digests_of_copies: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Whether copies along axes of the mesh have different digests; inside `shard_map`."""
    # The complement of the largest complement is the smallest digest.
    both = jnp.stack([digests_of_copies, ~digests_of_copies])
    largest, largest_complement = jax.lax.pmax(both, axes) if axes else both
    return jnp.any(largest != ~largest_complement)


def _sum_over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The sum over axes of the mesh, or `x` itself if there are none; inside `shard_map`."""
    return jax.lax.psum(x, axes) if axes else x


def _why(unchanged: bool, majority: bool) -> str:
    if not unchanged:
        return "they are not those that it held before"
    return "most copies have others" if majority else "its copies differ, and none has a majority"


def _axes_of(spec: P) -> tuple[str, ...]:
    """The axes of the mesh that an array is sharded over, in their order."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return tuple(axis for entry in entries for axis in entry if axis is not None)


def _grouped(keys: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], np.ndarray]:
    """The positions of equal elements, by element."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return {key: np.array(members) for key, members in groups.items()}


def _starts(x: jax.Array, spec: P) -> list:
    """Where a device's shard of an array begins; inside `shard_map`."""
    unsharded = [None] * (x.ndim - len(spec))
    entries = [*spec, *unsharded]
    return [
        jax.lax.axis_index(entry) * size if entry else 0
        for entry, size in zip(entries, x.shape, strict=True)
    ]
