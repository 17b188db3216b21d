"""Looks for the fastest way to run a config on a target that fits its memory. What is learnt stays
the same: only mesh, remat and accumulation are tried, never the batch.
"""

import dataclasses
import math

from absl import logging
from ml_collections import ConfigDict

from vit_jax.base.errors import ConfigError
from vit_jax.compute import recompute
from vit_jax.planning import compiling, report
from vit_jax.planning.plan import make_assembly, make_plan
from vit_jax.planning.target import Target

# Above this, XLA may turn gathers of parameters into all-reduces of twice the bytes; and each
# further cut makes messages smaller.
LARGEST_FSDP = 64
MESHES = 2
SMALLEST_PASS = 4


@dataclasses.dataclass(frozen=True)
class Choice:
    """The settings that a plan was made with."""

    fsdp: int
    remat: str
    accumulate: int

    def options(self, config: ConfigDict) -> list[str]:
        """As command-line flags, those that differ from the config."""
        said = {
            "mesh.data": -1,
            "mesh.fsdp": self.fsdp,
            "model.remat": self.remat,
            "accumulate": self.accumulate,
        }
        now = {
            "mesh.data": config.mesh.data,
            "mesh.fsdp": config.mesh.fsdp,
            "model.remat": config.model.remat,
            "accumulate": config.accumulate,
        }
        return [f"--config.{name}={value}" for name, value in said.items() if now[name] != value]


def fit(
    config: ConfigDict, target: Target, *, price_per_chip_hour: float | None = None, **data
) -> dict:
    """Tries remat policies, meshes and accumulation.

    Every remat policy is compiled with the smallest fsdp at which the state leaves room. One that
    does not fit is tried again with as much accumulation as its excess asks for, as long as the
    last tries say that it can fit. The best of these is compiled with the next fsdp as well.

    Args:
      config, target, price_per_chip_hour: see `plan`.
      **data: `num_classes` and `examples` of `plan.make_assembly`.

    Returns:
      The fastest plan that fits, with `options`, the flags that make it, and `tried`, a line for
      each; if none fits, the one that lacks least.
    """
    tried: dict[Choice, dict] = {}

    def attempt(choice: Choice) -> dict | None:
        if choice not in tried:
            changed = _changed(config, choice)
            try:
                tried[choice] = make_plan(
                    make_assembly(changed, **data), target, price_per_chip_hour=price_per_chip_hour
                )
            except ConfigError:  # The batch cannot be cut in that many parts.
                return None
            logging.info("%s", report.summary_row(tried[choice]))
        return tried[choice]

    first, *others = _cuts(config, target, data)
    for remat in recompute.POLICIES:
        accumulate, refused = config.accumulate, []
        while accumulate:
            plan = attempt(Choice(first, remat, accumulate))
            if plan is None or plan["fits"]:
                break
            refused.append(plan)
            accumulate = _next_accumulate(refused)
    fitting = {choice: plan for choice, plan in tried.items() if plan["fits"]}
    for fsdp in others if fitting else ():
        attempt(dataclasses.replace(min(fitting, key=lambda c: _cost(fitting[c])), fsdp=fsdp))
    best = min(tried, key=lambda choice: _cost(tried[choice]))
    return tried[best] | {
        "options": best.options(config),
        "tried": [report.summary_row(plan) for plan in tried.values()],
    }


def _changed(config: ConfigDict, choice: Choice) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.mesh.data, config.mesh.fsdp = -1, choice.fsdp
    config.model.remat, config.accumulate = choice.remat, choice.accumulate
    return config


def _cuts(config: ConfigDict, target: Target, data: dict) -> list[int]:
    """The `MESHES` smallest values of fsdp with which the state takes at most half the memory."""
    devices = len(target.devices) // max(1, config.mesh.tensor) // target.slices
    possible = [2**i for i in range(int(math.log2(LARGEST_FSDP)) + 1) if devices % 2**i == 0]
    if target.tpu is None:
        return possible[:MESHES]
    room = target.tpu.hbm_gib * 2**30 / 2
    for i, fsdp in enumerate(possible):
        choice = Choice(fsdp, config.model.remat or "none", config.accumulate)
        step = compiling.prepare(make_assembly(_changed(config, choice), **data), target)
        if step.state_bytes() <= room:
            return possible[i : i + MESHES]
    return possible[-1:]


def _next_accumulate(refused: list[dict]) -> int | None:
    """The accumulation with which the batch should fit, by the memory of the last tries; `None` if
    there is none.

    Memory is taken to be a line over the images of a pass: through the last two tries, or through
    the state alone and the only one.
    """
    plan = refused[-1]
    passes, peak = plan["batch_per_pass"], plan["memory"]["peak"]
    fixed = plan["memory"]["state"]
    if len(refused) > 1:
        before = refused[-2]
        slope = (before["memory"]["peak"] - peak) / (before["batch_per_pass"] - passes)
        fixed = peak - slope * passes
    room = plan["memory"]["capacity"] - fixed
    if room <= 0 or peak <= fixed:
        return None
    factor = 2 ** max(1, math.ceil(math.log2((peak - fixed) / room)))
    # Fewer images a pass leave the matrix units idle.
    return plan["accumulate"] * factor if passes / factor >= SMALLEST_PASS else None


def _cost(plan: dict) -> tuple:
    if not plan["fits"]:
        return (1, plan["missing_bytes"])
    return (0, plan["seconds"]["expected"] if "seconds" in plan else plan["memory"]["peak"])
