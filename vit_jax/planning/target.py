"""The devices to plan for: a TPU slice or GPUs that are not here, or simulated CPU devices."""

import dataclasses
import importlib.metadata
import os
import re
import shutil
import sysconfig

import jax

from vit_jax.base.errors import ConfigError
from vit_jax.base.install import pip_install
from vit_jax.base.schema import nearest
from vit_jax.devices import chips, gpus, libtpu, meshes

# The packages that compile for NVIDIA GPUs, one for each version of CUDA, and what one of them takes
# on disk with CUDA's own.
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_CUDA_GB = 4.4


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: as the user says it, e.g. `v5p:8x8x16` or `h100:8`.
      slices: how many of them.
      tpu: what a chip can do; `None` for others.
      devices: JAX's, of all slices.
      gpu: what a GPU can do; `None` for others.
    """

    name: str
    slices: int
    tpu: chips.Tpu | None
    devices: list
    gpu: chips.Gpu | None = None

    @property
    def chip(self) -> chips.Tpu | chips.Gpu | None:
        """What a chip can do; `None` for simulated devices."""
        return self.tpu or self.gpu

    @property
    def chips(self) -> int:
        return len(self.devices) // (self.tpu.devices_per_chip if self.tpu else 1)

    @property
    def capacity(self) -> int | None:
        """Bytes of a device's memory that a program can use; `None` for simulated devices."""
        if self.gpu:
            return round(gpus.MEMORY_SHARE * self.gpu.memory)
        return round(self.tpu.hbm_gib * 2**30) if self.tpu else None

    @property
    def hosts(self) -> int:
        return len({(meshes.slice_of(d), d.process_index) for d in self.devices})


def find(name: str, *, slices: int = 1) -> Target:
    """The devices called `name`.

    Args:
      name: `KIND:SHAPE` with a kind of `chips.TPUS`, e.g. `v5e:16x16`; of `chips.GPUS`, e.g. `h100:8`
        for GPUs of a host or `h100:8x8` for HOSTSxGPUS; or `cpu:N`.
      slices: of that shape, joined by the data center's network.

    Raises:
      ConfigError: there is no such topology, or the compiler for it is not installed.
    """
    # With the TPU compiler installed, JAX would look for TPUs and wait for them.
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    kind, _, shape = name.partition(":")
    if kind == "cpu":
        return _simulated(name, shape, slices)
    if kind in chips.GPUS:
        gpu, hosts, count = chips.check_gpus(name, slices)
        return Target(name, 1, None, _gpu_devices(gpu, hosts, count), gpu)
    if kind not in chips.TPUS:
        known = (*chips.TPUS, *chips.GPUS, "cpu")
        raise ConfigError(
            f"--topology={name}: unknown kind {kind!r}{nearest(kind, known) or '.'} Kinds are"
            f" {', '.join(known)}; e.g. v5e:4x4, v5p:4x4x8, h100:8, h100:8x8, cpu:8"
        )
    tpu, shape = chips.check_slice(name)
    if slices < 1:
        raise ConfigError(f"--slices={slices}: at least 1")
    return Target(name, slices, tpu, _tpu_devices(kind, shape, slices))


def _tpu_devices(kind: str, shape: str, slices: int) -> list:
    from jax.experimental import topologies as jax_topologies

    libtpu.expect_no_tpu()
    options = {"num_slices": slices} if slices > 1 else {}
    if kind == "v4":
        options["chip_config_name"] = "megacore"  # One device a chip, as on the machine.
    if kind in ("v5e", "v6e"):
        options["chips_per_host_bounds"] = (1, 1, 1) if shape == "1x1" else (2, 2, 1)
    try:
        return jax_topologies.get_topology_desc(
            platform="tpu", topology_name=f"{kind}:{shape}", **options
        ).devices
    except (RuntimeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(
            f"--topology={kind}:{shape} needs the TPU compiler: {pip_install('plan')}, which brings"
            f" the libtpu of jax {jax.__version__} ({str(error).splitlines()[0]})"
        ) from error


def _gpu_devices(gpu: chips.Gpu, hosts: int, count: int) -> list:
    from jax.experimental import topologies as jax_topologies

    _check_cuda_plugin()
    try:
        return jax_topologies.get_topology_desc(
            platform="cuda", target_config=gpu.target_config(), topology=f"1x{hosts}x{count}"
        ).devices
    except NotImplementedError as error:  # It was loaded to look for GPUs, found none, and gave up.
        raise ConfigError(
            "JAX has its compiler for CUDA, but cannot load it: set JAX_PLATFORMS=cpu"
        ) from error


def _check_cuda_plugin() -> None:
    """Raises `ConfigError` where JAX's compiler for NVIDIA GPUs is not installed, or is not this JAX's."""
    installed = {name: _version(name) for name in _CUDA_PLUGINS if _version(name)}
    if not installed:
        free = shutil.disk_usage(sysconfig.get_path("purelib")).free / 1e9
        room = "" if free > _CUDA_GB else f", and only {free:.1f} GB are free there"
        raise ConfigError(
            f"GPUs are planned with JAX's compiler for CUDA: {pip_install('plan-gpu')} (no GPU and no"
            f" driver are needed; it takes {_CUDA_GB} GB of {sysconfig.get_path('purelib')}{room})"
        )
    name, version = next(iter(installed.items()))
    needed = _version("jaxlib")
    if version != needed:
        raise ConfigError(
            f"{name} {version} does not fit jaxlib {needed}, which needs its own: pip install {name}=={needed}"
            f" {name.replace('plugin', 'pjrt')}=={needed}"
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _simulated(name: str, count: str, slices: int) -> Target:
    if not re.fullmatch(r"[1-9]\d*", count) or slices != 1:
        raise ConfigError(f"--topology={name}: set cpu:N for N simulated devices, and no --slices")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", int(count))
    devices = jax.devices("cpu")
    if len(devices) < int(count):
        raise ConfigError(
            f"--topology={name}: XLA_FLAGS allow {len(devices)} simulated devices:"
            f" --xla_force_host_platform_device_count={count}"
        )
    return Target(name, 1, None, devices[: int(count)])
