"""What accelerators can do and how they are sold. Vendors' figures, each with its source; a figure
without a source is `None`.

Nothing here touches a device or needs a package, so that `vit_jax launch` answers at once.
Compiling for a chip that is not there is `planning/target.py`.
"""

import dataclasses
import itertools
import math

from vit_jax.base.errors import ConfigError

# Dense bfloat16 peak in FLOP/s of one JAX device, as the vendors publish it:
# cloud.google.com/tpu/docs (one TensorCore of v2 and v3 is a device, so half a chip); NVIDIA's data
# sheets, half of the figure with sparsity where that alone is printed (B200: HGX B200, Blackwell
# data sheet; GB200: the superchip's by its two GPUs; L4: 242); AMD's of the MI300X.
PEAK_BFLOAT16 = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,  # Two devices a chip.
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L4": 121e12,
    "AMD Instinct MI300X": 1307.4e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s; `None` for an unknown device, for which no MFU
    is reported.
    """
    return PEAK_BFLOAT16.get(device_kind)


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A kind of TPU, in figures of a chip unless stated otherwise.

    Attributes:
      device_kind: as JAX calls its devices.
      dimensions: of the torus that the chips form.
      small: the shapes on offer that are smaller than a cube of 4 × 4 × 4, or all of them.
      max_chips: of the largest slice; 0 where `small` lists all.
      devices_per_chip: JAX's devices.
      hbm_gib: memory that a program can use, of one device, GiB.
      hbm_rate: bytes/s.
      ici_rate: bytes/s that a chip can send to its neighbours, all links together, one direction.
      dcn_rate: bytes/s that a chip can send to other slices; `None` if not published.
      clock: Hz, to turn the compiler's cycles into time.
      clock_basis: where the clock is from.
      gke: accelerator label of GKE's nodes.
      vm: what the accelerator type of a TPU VM begins with; '' if it is sold on GKE only.
      vm_runtime: software version of a TPU VM.
      vm_cores_per_chip: what the number in the accelerator type counts.
    """

    device_kind: str
    dimensions: int
    small: tuple[str, ...]
    max_chips: int
    devices_per_chip: int
    hbm_gib: float
    hbm_rate: float
    ici_rate: float
    dcn_rate: float | None
    clock: float
    clock_basis: str
    gke: str
    vm: str
    vm_runtime: str
    vm_cores_per_chip: int

    @property
    def peak(self) -> float:
        """FLOP/s of a chip."""
        return PEAK_BFLOAT16[self.device_kind] * self.devices_per_chip

    def shapes(self) -> list[str]:
        """Every slice on offer, smallest first."""
        if not self.max_chips:
            return list(self.small)
        sides = range(4, self.max_chips // 16 + 1, 4)
        cubes = [
            cube
            for cube in itertools.combinations_with_replacement(sides, 3)
            # No source mentions longer slices.
            if math.prod(cube) <= self.max_chips and cube[-1] <= 24
        ]
        return [*self.small, *("x".join(map(str, c)) for c in sorted(cubes, key=math.prod))]


_SMALL_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_FROM_PEAK = "peak / (matrix units x their size x 2)"

# Shapes, memory rate, ICI (half of the bidirectional figure) and DCN: cloud.google.com/tpu/docs,
# pages v4, v5e, v5p, v6e, tpu7x, read in 2026. v4's ICI: six links of 50 GB/s (arXiv 2304.01433
# Table 4). DCN of v5e and v6e: the pod's 6.4 and 25.6 Tbit/s over 256 chips; v5p 50, tpu7x 100
# Gbit/s a chip.
# Usable memory: what libtpu 0.0.42.1 says a program that is too large exceeds.
# Clocks follow from the peak: of v4, v5e, v5p with their 8, 4, 8 units of 128 x 128 a chip (the
# same pages). For v6e and tpu7x no page gives units that explain the peak; the compiler counts with
# four of 256 x 256 a device.
# Names of types, labels and runtimes: cloud.google.com/tpu/docs and .../kubernetes-engine/docs, 2026.
TPUS = {
    "v4": Tpu(
        "TPU v4", 3, _SMALL_3D, 4096, 1, 30.75, 1.2e12, 300e9, None, 1.05e9, _FROM_PEAK,
        "tpu-v4-podslice", "v4", "tpu-ubuntu2204-base", 2,
    ),
    "v5e": Tpu(
        "TPU v5 lite", 2, _SMALL_2D, 0, 1, 15.75, 819e9, 200e9, 3.125e9, 1.5e9, _FROM_PEAK,
        "tpu-v5-lite-podslice", "v5litepod", "v2-alpha-tpuv5-lite", 1,
    ),
    "v5p": Tpu(
        "TPU v5", 3, _SMALL_3D, 6144, 1, 95.74, 2.765e12, 600e9, 6.25e9, 1.75e9, _FROM_PEAK,
        "tpu-v5p-slice", "v5p", "v2-alpha-tpuv5", 2,
    ),
    "v6e": Tpu(
        "TPU v6 lite", 2, _SMALL_2D, 0, 1, 31.25, 1.638e12, 400e9, 12.5e9, 1.75e9,
        "inferred: peak / (four matrix units of 256 x 256 x 2), as the compiler counts",
        "tpu-v6e-slice", "v6e", "v2-alpha-tpuv6e", 1,
    ),
    "tpu7x": Tpu(
        "TPU7x", 3, _SMALL_3D, 9216, 2, 94.75, 7.38e12, 600e9, 12.5e9, 2.2e9,
        "inferred: peak / (four matrix units of 256 x 256 x 2 a device), as the compiler counts",
        "tpu7x", "", "", 0,
    ),
}  # fmt: skip


def count_chips(shape: str) -> int:
    """Chips of a slice, by its shape: 32 of '4x8'."""
    return math.prod(map(int, shape.split("x")))


def check_slice(name: str) -> tuple[Tpu, str]:
    """The kind and the shape of a slice called `KIND:SHAPE`, e.g. `v5e:16x16`.

    Raises:
      ConfigError: no such slice is sold.
    """
    kind, _, shape = name.partition(":")
    if kind not in TPUS:
        raise ConfigError(
            f"--topology={name}: unknown kind {kind!r}; kinds are {', '.join(TPUS)}, e.g. v5e:4x4"
        )
    shapes = TPUS[kind].shapes()
    if shape not in shapes:
        raise ConfigError(
            f"--topology={name}: {kind} has no slice {shape!r}; it has: {', '.join(shapes)}"
        )
    return TPUS[kind], shape


def check_vm_slice(name: str) -> tuple[Tpu, str, bool]:
    """A slice of TPU VMs called `KIND:SHAPE`: its kind, its accelerator type (v5litepod-64 of v5e:8x8), and whether
    that names no other shape.

    Raises:
      ConfigError: no such slice is sold as TPU VMs.
    """
    tpu, shape = check_slice(name)
    if not tpu.vm:
        raise ConfigError(f"--topology={name}: is sold on GKE only: use 'vit_jax launch gke'")
    count = count_chips(shape)
    alone = [count_chips(other) for other in tpu.shapes()].count(count) == 1
    return tpu, f"{tpu.vm}-{count * tpu.vm_cores_per_chip}", alone
