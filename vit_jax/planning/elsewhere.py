"""What a dry run finds out about devices that are not here: whether mesh and batch fit them, and what a plan says of
memory, time and cost.
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
      name: their topology.
      target: these devices, or as many simulated ones; `None` if there cannot be as many here.
      unchecked: what cannot be checked for them, a sentence each.
      price_per_chip_hour: to compute the cost.
    """

    name: str
    target: Target | None
    unchecked: list[str]
    price_per_chip_hour: float | None = None


def find_elsewhere(topology: str, slices: int = 1, price: float | None = None) -> Elsewhere:
    """The devices of a topology, as `target.find` takes it. Once JAX was used it cannot simulate more.

    Raises:
      ConfigError: there is no such topology.
    """
    if topology.partition(":")[0] not in (
        *chips.TPUS,
        *chips.GPUS,
    ):  # simulated, or none that is known
        return Elsewhere(topology, find(topology), [], price)
    count = _count_devices(topology, slices)
    try:
        return Elsewhere(topology, find(topology, slices=slices), [], price)
    except ConfigError as error:  # There is no compiler for them.
        unchecked = [f"memory, time and cost of the run: {error}"]
    try:
        return Elsewhere(topology, find(f"cpu:{count}"), unchecked, price)
    except ConfigError as error:
        unchecked.append(f"config.mesh and config.batch_size for {count} devices: {error}")
        return Elsewhere(topology, None, unchecked, price)


def _count_devices(topology: str, slices: int) -> int:
    if topology.partition(":")[0] in chips.GPUS:
        _, hosts, count = chips.check_gpus(topology, slices)
        return hosts * count
    tpu, shape = chips.check_slice(topology)
    return slices * chips.count_chips(shape) * tpu.devices_per_chip


def check_elsewhere(assembly: Assembly, devices: Elsewhere) -> dict | None:
    """The plan of a run on the devices; `None` where there can be none.

    Raises:
      ConfigError: the mesh, the batch or the step's memory does not fit them.
    """
    target = devices.target
    if target is None:
        return None
    check_batch(assembly.config, make_mesh(assembly.config, target.devices))
    if target.chip is None:
        return None
    logging.info("compiling the step for %s, which takes minutes of a large model …", devices.name)
    plan = make_plan(assembly, target, price_per_chip_hour=devices.price_per_chip_hour)
    if not plan["fits"]:
        raise ConfigError(f"the step does not fit {devices.name}:\n{report.text(plan)}")
    return plan


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
