"""What every device holds of a state: its marks, which copies are wrong, and how they are made right.

A device marks its own shards (`compute.digests`), in one program in which nothing travels but sums and
bounds of marks: XLA and JAX otherwise read one copy of an array and trust that the others are equal. Only
where something is wrong do hosts exchange the marks themselves, through the coordination service. What
follows from that for a run is in `audit`.
"""

import collections
import dataclasses
import json
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
      wrong: int32, how many devices hold something that differs from another copy, or from what they
        held before.
    """

    of_devices: jax.Array
    totals: jax.Array
    wrong: jax.Array


@dataclasses.dataclass(frozen=True)
class Fault:
    """An array of which a device holds wrong bits.

    Attributes:
      array: its name.
      device: its position in the mesh, as an index into `mesh.devices.flat`.
      certain: whether it is this device; else one of those that are named for the array.
      why: how that is known.
    """

    array: str
    device: int
    certain: bool
    why: str


@dataclasses.dataclass(frozen=True)
class Findings:
    """What an audit found.

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
        self.mesh, self.names = mesh, patterns.names(like)
        self._leaves, self._structure = jax.tree.flatten(like)
        # Along `tensor` GPUs compute sums by atomic additions, whose order is another on each of them.
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
        axes = self.mesh.axis_names

        def of_device(leaves, before, kept):
            marks = jnp.stack(
                [
                    digests.mark(x, shape=leaf.shape, starts=_starts(x, spec))
                    for x, leaf, spec in zip(leaves, self._leaves, specs, strict=True)
                ]
            )
            marks_now = marks[:, digests.DIGEST]
            earlier = before.reshape(marks.shape)[:, digests.DIGEST]
            wrong = jnp.any((marks_now != earlier).any(axis=1) & kept)
            for copied, members in _grouped(self._copied).items():
                # The smallest is what the largest of the complements leaves.
                both = jnp.stack([marks_now[members], ~marks_now[members]])
                largest, others = jax.lax.pmax(both, copied) if copied else both
                wrong |= jnp.any(largest != ~others)
            totals = jnp.zeros_like(marks)
            for sharded, members in _grouped(self._sharded).items():
                total = jax.lax.psum(marks[members], sharded) if sharded else marks[members]
                totals = totals.at[members].set(total)
            wrong = jax.lax.psum(wrong.astype(jnp.int32), axes)
            return marks.reshape(before.shape), totals, wrong

        whole, apart = P(), P(*axes)
        program = jax.shard_map(
            of_device,
            mesh=self.mesh,
            in_specs=(specs, apart, whole),
            out_specs=(apart, whole, whole),
            check_vma=False,
        )
        shardings = [leaf.sharding for leaf in self._leaves]
        place = lambda spec: jax.sharding.NamedSharding(self.mesh, spec)  # noqa: E731
        return jax.jit(program, in_shardings=(shardings, place(apart), place(whole)))

    def find(self, marks: Marks, before: jax.Array, kept: np.ndarray) -> Findings:
        """Which devices hold wrong bits; called by all processes, with the arguments of `mark`."""
        tables = (gather_table(x, self.mesh) for x in (marks.of_devices, before))
        now, earlier = (table[..., digests.DIGEST] for table in tables)
        flat = self.mesh.devices.size
        now, earlier = (x.reshape(flat, len(self.names), 2) for x in (now, earlier))
        unchanged = ~kept | (now == earlier).all(axis=-1)
        faults, senders = [], {}
        for index in range(len(self.names)):
            sets = self._sets(index)
            judgements = [_judge(now[of, index], unchanged[of, index]) for of in sets]
            if all(good is not None and right.all() for good, right in judgements):
                continue
            chosen = np.zeros(flat, bool)
            for of, (good, right) in zip(sets, judgements, strict=True):
                if good is not None:
                    chosen[of[good]] = True
                for device, is_right in zip(of, right, strict=True):
                    if not is_right:
                        certain = good is not None or not unchanged[device, index]
                        why = _why(unchanged[device, index], good is not None)
                        faults.append(Fault(self.names[index], int(device), bool(certain), why))
            whole = all(good is not None for good, _ in judgements)
            senders[index] = chosen.reshape(self.mesh.devices.shape) if whole else None
        return Findings(faults, senders)

    def heal(self, tree: Any, findings: Findings) -> Any:
        """The tree with the right bits in all copies of its faulty arrays, sent by a device that has them."""
        leaves = jax.tree.leaves(tree)
        for index, senders in findings.senders.items():
            leaves[index] = self._sent(index, leaves[index], senders)
        return jax.tree.unflatten(self._structure, leaves)

    def _sent(self, index: int, x: jax.Array, senders: np.ndarray) -> jax.Array:
        spec, copied, axes = x.sharding.spec, self._copied[index], self.mesh.axis_names

        def of_device(x, sends):
            words = f"uint{8 * x.dtype.itemsize}"
            bits = x.astype(words) if x.dtype == bool else jax.lax.bitcast_convert_type(x, words)
            # All but one add zeros.
            bits = jnp.where(sends.reshape(()), bits.astype(jnp.uint32), jnp.uint32(0))
            bits = (jax.lax.psum(bits, copied) if copied else bits).astype(words)
            return (
                bits.astype(bool)
                if x.dtype == bool
                else jax.lax.bitcast_convert_type(bits, x.dtype)
            )

        program = jax.shard_map(
            of_device, mesh=self.mesh, in_specs=(spec, P(*axes)), out_specs=spec, check_vma=False
        )
        place = jax.sharding.NamedSharding(self.mesh, P(*axes))
        sends = jax.make_array_from_callback(senders.shape, place, lambda part: senders[part])
        return jax.jit(program, out_shardings=x.sharding)(x, sends)

    def _sets(self, index: int) -> np.ndarray:
        """The devices that hold equal shards of an array, (sets, copies), by position."""
        shape, copied = self.mesh.devices.shape, self._copied[index]
        positions = np.arange(self.mesh.devices.size).reshape(shape)
        last = [self.mesh.axis_names.index(axis) for axis in copied]
        first = [i for i in range(len(shape)) if i not in last]
        copies = int(np.prod([shape[i] for i in last], dtype=np.int64))
        return positions.transpose(*first, *last).reshape(-1, copies)


def gather_table(table: jax.Array, mesh: jax.sharding.Mesh) -> np.ndarray:
    """A table of which every device has its own part, (*mesh, rows, columns) of uint32, in every process."""
    mine = {}
    for shard in table.addressable_shards:
        position = ",".join(str(part.start or 0) for part in shard.index[: mesh.devices.ndim])
        mine[position] = np.asarray(shard.data).tobytes().hex()
    whole = np.zeros(table.shape, np.uint32)
    for posted in processes.gather("table of all devices", json.dumps(mine)):
        for position, text in json.loads(posted).items():
            values = np.frombuffer(bytes.fromhex(text), np.uint32)
            whole[tuple(map(int, position.split(",")))] = values.reshape(table.shape[-2:])
    return whole


def hosts() -> list[str]:
    """The host of each process; called by all of them."""
    return processes.gather("hosts", socket.gethostname())


def _judge(digests: np.ndarray, unchanged: np.ndarray) -> tuple[int | None, np.ndarray]:
    """One copy that is right, if that can be known, and which are.

    Those that are still what they were decide, by their majority.

    Args:
      digests: uint32 (copies, 2).
      unchanged: bool (copies,), whether each is what its device held before.
    """
    votes = collections.Counter(map(tuple, digests[unchanged].tolist()))
    (best, count), *_ = votes.most_common(1) or [(None, 0)]
    if 2 * count <= unchanged.sum():
        return None, np.zeros(len(digests), bool)
    right = unchanged & (digests == np.array(best)).all(axis=1)
    return int(np.argmax(right)), right


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
    entries = [*spec, *[None] * (x.ndim - len(spec))]
    return [
        jax.lax.axis_index(entry) * size if entry else 0
        for entry, size in zip(entries, x.shape, strict=True)
    ]
