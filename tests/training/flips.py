"""Bits that flip in the memory of one device: what audits are for, made on simulated devices."""

import ctypes

import jax
import numpy as np

from vit_jax.base import patterns
from vit_jax.training.upkeep import audit


def flip(x: jax.Array, device: jax.Device, word: int, bit: int) -> bool:
    """Flips a bit of one device's shard where it lies; whether this process has that device. The shards of CPUs are
    the host's memory.

    Args:
      word, bit: of the shard, modulo its size.
    """
    for shard in x.addressable_shards:
        if shard.device == device:
            size = x.dtype.itemsize
            byte = word % max(shard.data.size, 1) * size + (
                0 if x.dtype == bool else bit // 8 % size
            )
            address = shard.data.unsafe_buffer_pointer() + byte
            memory = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8))
            memory[0] ^= 1 if x.dtype == bool else 1 << bit % 8
            return True
    return False


class Flips:
    """Flips a random bit after some steps, in the array and on the device that the seed and the step say.

    Attributes:
      made: (step, array, device) of each.
    """

    def __init__(self, steps, *, seed: int = 0, only: str = "", after_use: bool = False):
        """Takes when and where.

        Args:
          steps: of the run; each is met once, also where it is repeated.
          only: prefix of the names of the arrays that are hit.
          after_use: whether bits flip before marks are taken, as within a step, and not after.
        """
        self._left, self._seed, self._only, self._after_use = set(steps), seed, only, after_use
        self.made: list[tuple[int, str, int]] = []

    def install(self, replace=setattr) -> None:
        """Lets bits flip in the runs of this process.

        Args:
          replace: as `setattr`, such as pytest's `monkeypatch.setattr`.
        """
        after = audit.Audit.after

        def flipping(audited, step, state):
            if not self._after_use:
                after(audited, step, state)
            if step in self._left:
                self._left.discard(step)
                jax.block_until_ready((state, audited._taken.marks.totals))
                self._flip(step, audited._copies.mesh, audit._tree(state))
            if self._after_use:
                after(audited, step, state)

        replace(audit.Audit, "after", flipping)

    def _flip(self, step: int, mesh, tree: dict) -> None:
        rng = np.random.default_rng((self._seed, step))
        arrays = {
            n: x for n, x in patterns.named(tree).items() if n.startswith(self._only) and x.size
        }
        name = sorted(arrays)[rng.integers(len(arrays))]
        position = int(rng.integers(mesh.devices.size))
        device = mesh.devices.flat[position]
        flip(arrays[name], device, int(rng.integers(2**31)), int(rng.integers(32)))
        self.made.append((step, name, device.id))
