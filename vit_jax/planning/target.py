"""The devices to plan for: a TPU slice that is not here, or simulated CPU devices."""

import dataclasses
import os
import re

import jax

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.devices import chips, libtpu, meshes


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for.

    Attributes:
      name: as the user says it, e.g. `v5p:8x8x16`.
      slices: how many of them.
      tpu: what a chip can do; `None` for simulated devices.
      devices: JAX's, of all slices.
    """

    name: str
    slices: int
    tpu: chips.Tpu | None
    devices: list

    @property
    def chips(self) -> int:
        return len(self.devices) // (self.tpu.devices_per_chip if self.tpu else 1)

    @property
    def hosts(self) -> int:
        return len({(meshes.slice_of(d), d.process_index) for d in self.devices})


def find(name: str, *, slices: int = 1) -> Target:
    """The devices called `name`.

    Args:
      name: `KIND:SHAPE` with a kind of `chips.TPUS`, e.g. `v5e:16x16`, or `cpu:N`.
      slices: of that shape, joined by the data center's network.

    Raises:
      ConfigError: there is no such topology, or the TPU compiler is not installed.
    """
    # With the TPU compiler installed, JAX would look for TPUs and wait for them.
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    kind, _, shape = name.partition(":")
    if kind == "cpu":
        return _simulated(name, shape, slices)
    if kind not in chips.TPUS:
        known = (*chips.TPUS, "cpu")
        raise ConfigError(
            f"--topology={name}: unknown kind {kind!r}{nearest(kind, known)}. Kinds are"
            f" {', '.join(known)}; e.g. v5e:4x4, v5p:4x4x8, cpu:8"
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
            f"--topology={kind}:{shape} needs the TPU compiler: pip install 'vit_jax[plan]', which brings the"
            f" libtpu of jax {jax.__version__} ({str(error).splitlines()[0]})"
        ) from error


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
