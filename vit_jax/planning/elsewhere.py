"""What a dry run finds out about devices that are not here: whether mesh and batch fit them and, of TPUs, what a plan
says of memory, time and cost.
"""

import dataclasses

from absl import logging

from vit_jax.base.errors import ConfigError
from vit_jax.devices import chips
from vit_jax.planning import report
from vit_jax.planning.plan import make_plan
from vit_jax.planning.target import Target, find
from vit_jax.training.assembly import Assembly, make_mesh
from vit_jax.training.guards import check_batch


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """The devices that will train.

    Attributes:
      topology: as `target.find` takes it; `cpu:N` for N devices of another kind.
      slices: how many of them.
      price_per_chip_hour: to compute the cost.
    """

    topology: str
    slices: int = 1
    price_per_chip_hour: float | None = None


def check_elsewhere(assembly: Assembly, devices: Elsewhere) -> tuple[dict | None, list[str]]:
    """The plan of a run, where there can be one, and what could not be checked.

    Raises:
      ConfigError: there is no such topology; the mesh, the batch or the step's memory does not fit it.
    """
    target, unchecked = _find(devices)
    if target is None:
        return None, unchecked
    check_batch(assembly.config, make_mesh(assembly.config, target.devices))
    if target.tpu is None:
        return None, unchecked
    logging.info("compiling the step for %s, which takes a minute or so …", devices.topology)
    plan = make_plan(assembly, target, price_per_chip_hour=devices.price_per_chip_hour)
    if not plan["fits"]:
        raise ConfigError(f"the step does not fit {devices.topology}:\n{report.text(plan)}")
    return plan, unchecked


def _find(devices: Elsewhere) -> tuple[Target | None, list[str]]:
    """The devices, or as many simulated ones where the TPU compiler is missing; and what is not checked then."""
    kind, _, _ = devices.topology.partition(":")
    if kind == "cpu":
        return find(devices.topology), []
    tpu, shape = chips.check_slice(devices.topology)
    try:
        return find(devices.topology, slices=devices.slices), []
    except ConfigError as error:
        unchecked = [f"memory, time and cost of the run: {error}"]
    count = devices.slices * chips.count_chips(shape) * tpu.devices_per_chip
    try:
        return dataclasses.replace(find(f"cpu:{count}"), slices=devices.slices), unchecked
    except (ConfigError, RuntimeError) as error:  # JAX was used already, with fewer devices.
        return None, [*unchecked, f"config.mesh and config.batch_size for {count} devices: {error}"]


def plan_lines(plan: dict) -> list[str]:
    """Memory, length and cost of a run, a line each."""
    memory, run = plan["memory"], plan.get("run")
    lines = [
        f"memory of a device: {report.size_text(memory['peak'])} of {report.size_text(memory['capacity'])}"
    ]
    if "local_disk_bytes" in plan:
        size = report.size_text(plan["local_disk_bytes"])
        lines.append(f"config.checkpoint.local: {size} on each host")
    if run is not None:
        chips_of_run = f"{plan['chips']:,} chips of {plan['hosts']} hosts"
        lines.append(
            f"time: {report.range_text(run['hours'])} hours on {chips_of_run}, "
            f"{report.range_text(run['chip_hours'])} chip-hours"
            + (f", cost {report.range_text(run['cost'])}" if "cost" in run else "")
        )
    return lines
