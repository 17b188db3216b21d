"""What accelerators can do and how they are sold. Vendors' figures, each with its source; a figure
without a source is `None`.

Nothing here touches a device or needs a package, so that `vit_jax launch` answers at once.
Compiling for a chip that is not there is `planning/target.py`.
"""

import dataclasses
import itertools
import math
import re

from vit_jax.base.errors import ConfigError

# Dense bfloat16 peak in FLOP/s of one JAX device, as the vendors publish it:
# - TPUs: cloud.google.com/tpu/docs; one TensorCore of v2 and v3 is a device, so half a chip.
# - NVIDIA's data sheets, half of the figure with sparsity where that alone is printed. Compared in November 2026 with
#   copies of the sheets and with tables that quote them: A100 312; H100 989.4, PCIe 1,513 sparse; H200 as H100; A10
#   125; A40 149.7; L4 242 sparse; L40 181.05; L40S 362.05; B200 and B300 36 PFLOPS sparse for eight (HGX); GB200
#   2,500, by a higher clock than B200's; GB300 180 PFLOPS dense for 72. B200 to GB300 are within 6 % of cores x units x
#   clock in XLA's tables.
# - No second source was found for A10G (70, AWS's sheet) and H100 NVL (1,671 sparse). GH200, RTX (sums in float32,
#   white papers of their architectures) and AMD's MI300X were not compared.
# CUDA's names of the devices: as nvidia-smi prints them.
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
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "NVIDIA GB300": 2500e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 503.8e12,
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

    @property
    def cores(self) -> int:
        """Of a device, which divide the programs of a kernel among them."""
        return 2 if self.device_kind in ("TPU v4", "TPU v5") else 1

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
        cubes.sort(key=math.prod)
        names = ["x".join(map(str, cube)) for cube in cubes]
        return [*self.small, *names]


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


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
      device_kind: as JAX calls its devices.
      capability: CUDA's compute capability, (major, minor).
      cores: streaming multiprocessors.
      units_per_core: of a core, for float32.
      clock: Hz.
      memory: bytes.
      hbm_rate: bytes/s.
      cache: bytes of the second level.
      shared: bytes of fast memory of a core, and the most that a block of threads may ask for.
      nvlink_rate: bytes/s that a GPU can send to others over NVLink, one direction.
      network_rate: bytes/s that a GPU can send to GPUs beyond NVLink.
      per_host: GPUs of a host, at most.
      per_nvlink: GPUs that NVLink joins, at most.
    """

    device_kind: str
    capability: tuple[int, int]
    cores: int
    units_per_core: int
    clock: float
    memory: int
    hbm_rate: float
    cache: int
    shared: tuple[int, int]
    nvlink_rate: float
    network_rate: float
    per_host: int = 8
    per_nvlink: int = 8

    @property
    def peak(self) -> float:
        """FLOP/s of a GPU."""
        return PEAK_BFLOAT16[self.device_kind]

    def target_config(self) -> str:
        """What XLA must know of a GPU that is not there, as text of its `GpuTargetConfigProto`."""
        major, minor = self.capability
        # Instructions of one generation alone, as Hopper's and Blackwell's products of matrices.
        extension = "ACCELERATED_FEATURES" if major in (9, 10) else "NONE"
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.device_kind}"
            dnn_version_info {{ major: 9 minor: 10 }}
            gpu_device_info {{
              cuda_compute_capability {{
                major: {major} minor: {minor} feature_extension: {extension}
              }}
              core_count: {self.cores} fpus_per_core: {self.units_per_core}
              clock_rate_ghz: {self.clock / 1e9:g}
              device_memory_size: {self.memory} memory_bandwidth: {self.hbm_rate:.0f}
              l2_cache_size: {self.cache}
              shared_memory_per_core: {self.shared[0]} shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared[1]}
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            }}
        """


_AMPERE = (167936, 166912)
_HOPPER = (233472, 232448)  # Blackwell's data center GPUs as Hopper's

# What XLA compiles by, up to `shared`: OpenXLA's own tables, xla/backends/gpu/target_config/specs; all eight compared
# in November 2026, equal. NVLink (half of the bidirectional figure: 600 GB/s of A100, 900 of Hopper, 1,800 of
# Blackwell): NVIDIA's data sheets. Network: an adapter for each GPU in NVIDIA's own systems: 200 Gbit/s in DGX A100
# (ConnectX-6), 400 in DGX H100, H200 and B200 (ConnectX-7, docs.nvidia.com/dgx), 800 in DGX B300 and GB300 NVL72
# (ConnectX-8); GB200 NVL72 has ConnectX-7 too. Rented machines may have less.
GPUS = {
    "a100-40gb": Gpu(
        "NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 1.41e9, 42331013120, 1.5552e12, 41943040, _AMPERE, 300e9, 25e9,
    ),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41e9, 85100068864, 2.03904e12, 41943040, _AMPERE, 300e9, 25e9,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98e9, 84942979072, 3.35232e12, 52428800, _HOPPER, 450e9, 50e9,
    ),
    "h200": Gpu(
        "NVIDIA H200", (9, 0), 132, 128, 1.98e9, 151397597184, 4.8e12, 52428800, _HOPPER, 450e9, 50e9
    ),
    "b200": Gpu(
        "NVIDIA B200", (10, 0), 148, 128, 1.965e9, 191514411008, 7.67232e12, 132644864, _HOPPER, 900e9, 50e9,
    ),
    "gb200": Gpu(
        "NVIDIA GB200", (10, 0), 152, 128, 2.062e9, 197897748480, 7.928064e12, 135528448, _HOPPER, 900e9, 50e9, 4, 72,
    ),
    "b300": Gpu(
        "NVIDIA B300 SXM6 AC", (10, 3), 158, 128, 1.965e9, 297021865984, 7.936e12, 135528448, _HOPPER, 900e9, 100e9,
    ),
    "gb300": Gpu(
        "NVIDIA GB300", (10, 3), 152, 128, 2.07e9, 297021079552, 7.928064e12, 135528448, _HOPPER, 900e9, 100e9, 4, 72,
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


def check_gpus(name: str, slices: int = 1) -> tuple[Gpu, int, int]:
    """The kind, hosts and GPUs of each host of `KIND:GPUS` or `KIND:HOSTSxGPUS`, e.g. `h100:8x8`.

    Raises:
      ConfigError: the shape is none of these, a host has fewer GPUs, or there are several slices.
    """
    kind, _, shape = name.partition(":")
    gpu = GPUS[kind]
    match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", shape)
    if not match:
        raise ConfigError(
            f"--topology={name}: must be {kind}:GPUS or {kind}:HOSTSxGPUS, e.g. {kind}:{gpu.per_host} or"
            f" {kind}:8x{gpu.per_host}"
        )
    hosts = int(match[1] or 1)
    count = int(match[2])
    if slices != 1:
        raise ConfigError(
            f"--slices={slices} is for TPUs: set --topology={kind}:HOSTSxGPUS, e.g. {kind}:{slices}x{count}"
        )
    if count > gpu.per_host:
        whole = math.ceil(hosts * count / gpu.per_host)
        raise ConfigError(
            f"--topology={name}: a host has at most {gpu.per_host} {kind} GPUs: set {kind}:{whole}x{gpu.per_host}"
        )
    return gpu, hosts, count


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
