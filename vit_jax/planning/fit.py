"""Looks for the fastest way to run a config on a target that fits its memory. What is learned stays
the same: only mesh, remat, accumulation and, for GPUs, unrolling are tried, never the batch.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from absl import logging
from ml_collections import ConfigDict

from vit_jax.base.errors import ConfigError
from vit_jax.compute import recompute
from vit_jax.planning import compiling, report
from vit_jax.planning.plan import make_assembly, make_plan
from vit_jax.planning.target import Target

SMALLEST_PASS = 4
# Values of `unroll` to try for GPUs, one layer at a time and all. The compiler for TPUs needs minutes for
# unrolled layers.
_UNROLL_ON_GPUS = (1, 0)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The settings that a plan was made with."""

    fsdp: int
    remat: str
    accumulate: int
    unroll: int | None = None  # the family's own

    def options(self, config: ConfigDict) -> list[str]:
        """As command-line flags, those that differ from the config."""
        changed = {
            "mesh.data": -1,
            "mesh.fsdp": self.fsdp,
            "model.remat": self.remat,
            "accumulate": self.accumulate,
            "model.unroll": self.unroll,
        }
        now = {
            "mesh.data": config.mesh.data,
            "mesh.fsdp": config.mesh.fsdp,
            "model.remat": config.model.remat,
            "accumulate": config.accumulate,
            "model.unroll": config.model.unroll,
        }
        return [f"--config.{name}={value}" for name, value in changed.items() if now[name] != value]


def fit(
    config: ConfigDict, target: Target, *, price_per_chip_hour: float | None = None, **data
) -> dict:
    """Compiles the config with the choices of `search`.

    Args:
      config, target, price_per_chip_hour: see `plan`.
      **data: `num_classes` and `examples` of `plan.make_assembly`.

    Returns:
      The fastest plan that fits, with `options`, the flags that make it, and `tried`, a line for
      each; if none fits, the one that lacks least.
    """

    def attempt(choice: Choice) -> dict | None:
        try:
            assembly = make_assembly(_changed(config, choice), **data)
            plan = make_plan(assembly, target, price_per_chip_hour=price_per_chip_hour)
        except ConfigError:  # The batch cannot be split into that many parts.
            return None
        logging.info("%s", report.summary_row(plan))
        return plan

    unrolls = _UNROLL_ON_GPUS if target.gpu else (config.model.unroll,)
    tried = search(attempt, _fsdp_sizes(config, target, data), config.accumulate, unrolls)
    if not tried:  # The config itself is wrong, and says why.
        return make_plan(
            make_assembly(config, **data), target, price_per_chip_hour=price_per_chip_hour
        )
    best = best_of(tried)
    return tried[best] | {
        "options": best.options(config),
        "tried": [report.summary_row(plan) for plan in tried.values()],
    }


def search(
    attempt: Callable[[Choice], dict | None],
    fsdp_sizes: list[int],
    accumulate: int,
    unrolls: Sequence[int | None] = (None,),
) -> dict[Choice, dict]:
    """Plans of the choices worth trying.

    1. Every remat policy with the first fsdp, and every unroll. One that does not fit is tried again with as much
       accumulation as its excess asks for, as long as the last tries say that it can fit.
    2. The best of these with larger fsdp, until two in a row are slower: between faster meshes may
       lie a slower one.
    3. The other policies with the fsdp that was found, if it is another.

    Args:
      attempt: makes a plan; `None` if the batch does not allow the choice.
      fsdp_sizes: to try, smallest first.
      accumulate: of the config.
      unrolls: to try.
    """
    tried: dict[Choice, dict] = {}

    def plan_of(choice: Choice) -> dict | None:
        if choice not in tried:
            plan = attempt(choice)
            if plan is None:
                return None
            tried[choice] = plan
        return tried[choice]

    def try_policies(fsdp: int) -> None:
        for remat, unroll in itertools.product(recompute.POLICIES, unrolls):
            parts, refused = accumulate, []
            while parts:
                plan = plan_of(Choice(fsdp, remat, parts, unroll))
                if plan is None or plan["fits"]:
                    break
                refused.append(plan)
                parts = _next_accumulate(refused)

    first, *larger = fsdp_sizes
    try_policies(first)
    slower = 0
    for fsdp in larger:
        if slower == 2 or not tried or not tried[best_of(tried)]["fits"]:
            break
        choice = dataclasses.replace(best_of(tried), fsdp=fsdp)
        plan_of(choice)
        slower = 0 if best_of(tried) == choice else slower + 1
    if tried and best_of(tried).fsdp != first:
        try_policies(best_of(tried).fsdp)
    return tried


def best_of(tried: dict[Choice, dict]) -> Choice:
    """The fastest that fits, or the one that lacks least."""
    return min(tried, key=lambda choice: _cost(tried[choice]))


def _changed(config: ConfigDict, choice: Choice) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.mesh.data, config.mesh.fsdp = -1, choice.fsdp
    config.model.remat, config.accumulate = choice.remat, choice.accumulate
    config.model.unroll = choice.unroll
    return config


def _fsdp_sizes(config: ConfigDict, target: Target, data: dict) -> list[int]:
    """Values of fsdp to try: powers of two within a slice, from the first with which the state takes
    at most half of the memory.
    """
    devices = len(target.devices) // max(1, config.mesh.tensor) // target.slices
    possible = [2**i for i in range(devices.bit_length()) if devices % 2**i == 0]
    if target.capacity is None:
        return possible
    room = target.capacity / 2
    for i, fsdp in enumerate(possible):
        choice = Choice(fsdp, config.model.remat, config.accumulate, config.model.unroll)
        step = compiling.prepare(make_assembly(_changed(config, choice), **data), target)
        if step.state_bytes() <= room:
            return possible[i:]
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
