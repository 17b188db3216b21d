"""A state's distinct shards, and the file in which a process keeps its own: what `tiers` writes to a
local disk.

A file is one header and the shards' bytes, each with a checksum; it holds data only, never code.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError

_MAGIC = b"vit_jax shards 1\n"
_PREFIX = len(_MAGIC) + 12  # and the header's length and checksum


class Layout:
    """The distinct shards of a state on a mesh, with the same numbers in all processes.

    Attributes:
      leaves: shapes, dtypes and shardings of the arrays, in the order of `jax.tree.leaves`.
      count: distinct shards of all arrays.
      shapes: of each shard, in order of their numbers.
      dtypes: of each shard, in order of their numbers.
      own: numbers of the shards on this process's devices, each with these devices' positions:
        (leaf, device).
      signature: a text that differs for a state of other arrays or another division into shards.
    """

    def __init__(self, like: dict):
        """Args: `like`: shapes, dtypes and shardings of the parts of a state, by name."""
        self.leaves, self.structure = jax.tree.flatten(like)
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[np.dtype] = []
        self.own: dict[int, list[tuple[int, jax.Device]]] = {}
        me, digest = jax.process_index(), hashlib.sha256()
        for i, (name, leaf) in enumerate(zip(patterns.names(like), self.leaves, strict=True)):
            starts = {
                device: tuple(part.start or 0 for part in index)
                for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
            }
            numbers = {
                start: len(self.shapes) + n for n, start in enumerate(sorted({*starts.values()}))
            }
            shape = leaf.sharding.shard_shape(leaf.shape)
            self.shapes += [shape] * len(numbers)
            self.dtypes += [jnp.dtype(leaf.dtype)] * len(numbers)
            for device, start in starts.items():
                if device.process_index == me:
                    self.own.setdefault(numbers[start], []).append((i, device))
            digest.update(json.dumps([name, leaf.shape, str(leaf.dtype), sorted(numbers)]).encode())
        self.signature, self.count = digest.hexdigest(), len(self.shapes)

    def bytes_of(self, number: int) -> int:
        """Bytes of a shard."""
        return int(np.prod(self.shapes[number], dtype=np.int64)) * self.dtypes[number].itemsize

    @property
    def own_bytes(self) -> int:
        """Bytes of the distinct shards on this process's devices."""
        return sum(map(self.bytes_of, self.own))

    def copy_own(self, parts: dict) -> dict[int, np.ndarray]:
        """This process's shards in its own memory, each once, by number. Waits for the devices."""
        shards = {}
        leaves = jax.tree.leaves(parts)
        on_device = [{s.device: s.data for s in leaf.addressable_shards} for leaf in leaves]
        for number, places in self.own.items():
            leaf, device = places[0]
            shards[number] = on_device[leaf][device]
            shards[number].copy_to_host_async()
        # On a CPU the host's view is the device's own memory, which the next step overwrites.
        return {n: np.asarray(x).copy() if _on_cpu(x) else np.asarray(x) for n, x in shards.items()}

    def arrays(self, shards: Mapping[int, np.ndarray]) -> dict:
        """The parts of a state from this process's shards, by number."""
        placed: list[dict] = [{} for _ in self.leaves]
        for number, positions in self.own.items():
            for leaf, device in positions:
                placed[leaf][device] = _put(shards[number], device)
        arrays = [
            jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, list(on_device.values())
            )
            for leaf, on_device in zip(self.leaves, placed, strict=True)
        ]
        return jax.tree.unflatten(self.structure, arrays)

    def gathered(self, shards: Mapping[int, np.ndarray], sent: set[int]) -> dict:
        """The parts of a state from the shards of several processes, exchanged by the devices.

        Each shard is sent by one device of one process, and the others add zeros to its bits.

        Args:
          shards: that this process has, by number.
          sent: those of them that this process sends; no other process sends the same.
        """
        placed: list[dict] = [{} for _ in self.leaves]
        for number, positions in self.own.items():
            for k, (leaf, device) in enumerate(positions):
                bits = f"uint{8 * self.dtypes[number].itemsize}"
                mine = k == 0 and number in sent
                shard = shards[number].view(bits) if mine else np.zeros(self.shapes[number], bits)
                placed[leaf][device] = _put(shard[None], device)
        apart = [_with_replicas_apart(leaf) for leaf in self.leaves]
        bits = [
            jax.make_array_from_single_device_arrays(shape, sharding, list(on_device.values()))
            for (shape, sharding), on_device in zip(apart, placed, strict=True)
        ]
        dtypes = [leaf.dtype for leaf in self.leaves]
        program = jax.jit(
            lambda bits: [_sum_of_bits(x, dtype) for x, dtype in zip(bits, dtypes, strict=True)],
            out_shardings=[leaf.sharding for leaf in self.leaves],
            donate_argnums=0,
        )
        return jax.tree.unflatten(self.structure, program(bits))


def _put(shard: np.ndarray, device: jax.Device) -> jax.Array:
    return jax.device_put(shard, device, may_alias=False)  # Training overwrites it.


def _on_cpu(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "cpu"


def _with_replicas_apart(leaf) -> tuple[tuple[int, ...], jax.sharding.NamedSharding]:
    """Shape and sharding of an array in which each replica of `leaf` is an element of a new first
    axis.
    """
    mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
    used = {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    replicas = tuple(axis for axis in mesh.axis_names if axis not in used)
    count = int(np.prod([mesh.shape[axis] for axis in replicas], dtype=np.int64))
    apart = jax.sharding.PartitionSpec(replicas, *spec)
    return (count, *leaf.shape), jax.sharding.NamedSharding(mesh, apart)


def _sum_of_bits(bits: jax.Array, dtype) -> jax.Array:
    total = jnp.sum(bits.astype(jnp.uint32), axis=0, dtype=jnp.uint32).astype(bits.dtype)
    if dtype == jnp.bool_:
        return total.astype(bool)
    return jax.lax.bitcast_convert_type(total, dtype)


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """A whole file of shards.

    Attributes:
      path: of the file.
      header: what its writer noted of it.
      shards: (offset, bytes, checksum) of each shard, by number.
    """

    path: pathlib.Path
    header: dict
    shards: dict[int, tuple[int, int, int]]


def write_shards(path: pathlib.Path, header: dict, shards: Mapping[int, np.ndarray]) -> None:
    """Writes a file that appears under its name when it is whole.

    Raises:
      OSError: it cannot be written; nothing is left behind.
    """
    table, offset = {}, 0
    for number, array in shards.items():
        table[number] = (offset, array.nbytes, zlib.crc32(_as_bytes(array)))
        offset += array.nbytes
    text = json.dumps(header | {"shards": table}).encode()
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "wb") as file:
            file.write(
                _MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")
            )
            file.write(text)
            for array in shards.values():
                file.write(_as_bytes(array))
            file.flush()
            os.fsync(file.fileno())  # else the name may reach the disk before the content
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def open_shards(path: pathlib.Path) -> ShardFile:
    """A file's header; the shards themselves are not read yet.

    Raises:
      CheckpointError: the file is damaged or no such file.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(_PREFIX)
            length = int.from_bytes(start[len(_MAGIC) : -4], "little")
            size = path.stat().st_size
            whole = start.startswith(_MAGIC) and length <= size
            text = file.read(length) if whole else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not whole or zlib.crc32(text) != int.from_bytes(start[-4:], "little"):
        raise CheckpointError(f"{path} is damaged: its header is not the one that was written")
    header = json.loads(text)
    first = _PREFIX + length
    shards = {
        int(number): (first + offset, count, checksum)
        for number, (offset, count, checksum) in header.pop("shards").items()
    }
    if size != first + sum(count for _, count, _ in shards.values()):
        raise CheckpointError(
            f"{path} is damaged: it has {size} bytes, not those that were written"
        )
    return ShardFile(path, header, shards)


def read_shard(file: ShardFile, number: int, layout: Layout) -> np.ndarray:
    """A shard of a file, verified by its checksum.

    Raises:
      CheckpointError: its bytes are not those that were written.
    """
    offset, count, checksum = file.shards[number]
    try:
        content = np.fromfile(file.path, np.uint8, count, offset=offset)
    except OSError as error:
        raise CheckpointError(f"{file.path} cannot be read: {error.strerror}") from error
    if content.nbytes != count or zlib.crc32(content) != checksum:
        raise CheckpointError(f"{file.path} is damaged: the bytes of a shard have changed")
    return content.view(layout.dtypes[number]).reshape(layout.shapes[number])


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
