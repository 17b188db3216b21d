"""What the operations of a train step take by their schedules, beside the compiler's estimates:

    python -m tests.planning.schedule CONFIG TOPOLOGY [FIELD=VALUE …]     some minutes

`plan` counts kernels by their bundles and everything else by the compiler's estimate, which charges a pass
over bfloat16 as one over float32, and one over the fast memory as one over the large. Here both are counted
by bundles, one a cycle, times the turns of an operation's loop over windows; an operation that has to wait
for the large memory takes as long as its bytes at the published rate, and one of products at least as long as
these at the matrix units' peak, which bundles do not see. This is a bound from below: nothing starts up, nothing
waits for two things.
"""

import ast
import dataclasses
import json
import math
import os
import pathlib
import re
import sys
import tempfile

from vit_jax.planning import compiling, hlo, kernels, plan, target, tpu_roofline
from vit_jax.recipes.user_files import load_config

LARGEST = 40
# How often the code of an instruction runs, along each axis of its result.
_WINDOW = re.compile(r'"iteration_bounds":\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Row:
    """An operation in a step.

    Attributes:
      instruction: of the program.
      times: how often it runs.
      estimated: the compiler's cycles of one run; of a kernel those of its bundles.
      scheduled: bundles of one run; `None` if no schedule was written.
      waiting: cycles in which its bytes pass through the large memory.
      products: cycles of its products at the matrix units' peak.
    """

    instruction: hlo.Instruction
    times: float
    estimated: int
    scheduled: int | None
    waiting: float
    products: float

    @property
    def cycles(self) -> float:
        """Of one run, at least."""
        known = self.estimated if self.scheduled is None else self.scheduled
        return max(known, self.waiting, self.products)


def read_bundles(folder: pathlib.Path) -> dict[str, int]:
    """Bundles of the code of each instruction, by its name."""
    found = {}
    for path in folder.glob("*-schedule-analysis_final_bundles.txt"):
        name = re.match(r"\d+-(.*)-\d+-schedule", path.name)[1]
        # Code that the scheduler does not touch has no count.
        if counted := re.search(r"total scheduled bundles:\s+(\d+)", path.read_text()):
            found[name] = int(counted[1])
    return found


def count(
    program: hlo.Program,
    bundles: dict[str, int],
    programs: dict[str, int],
    *,
    rate: float,
    peak: float,
) -> list[Row]:
    """A row for each operation that takes cycles.

    Args:
      program: a compiled one.
      bundles: of `read_bundles`; the compiler schedules equal operations once, under the name of one.
      programs: of `kernels.grids`.
      rate: bytes a cycle of the large memory.
      peak: operations a cycle of the matrix units.
    """

    def alike(instruction):
        window = _WINDOW.search(instruction.attributes)
        return instruction.shapes, instruction.estimated_cycles, window and window[0]

    instructions = [i for lines in program.computations.values() for i in lines]
    shapes = {i.name: i.shapes for i in instructions}
    equal = {alike(i): bundles[i.name] for i in instructions if i.name in bundles}
    rows = []
    for instruction, times in program.steps():
        kernel = instruction.name.partition(".")[0]
        code = bundles.get(instruction.name, equal.get(alike(instruction)))
        if kernel in programs:
            scheduled = estimated = code * programs[kernel]
        elif not (estimated := instruction.estimated_cycles):
            continue
        else:
            window = _WINDOW.search(instruction.attributes)
            turns = ast.literal_eval(f"[{window[1]}]") if window else []
            scheduled = None if code is None else code * math.prod(map(int, turns))
        waiting = tpu_roofline.large_bytes(program, instruction, shapes) / rate
        products = tpu_roofline.product_flops(program, instruction, shapes) / peak
        rows.append(Row(instruction, times, estimated, scheduled, waiting, products))
    return rows


def main(spec: str, topology: str, *changes: str) -> None:
    """Prints both counts of the whole step and of its largest operations."""
    config = load_config(spec)
    for change in changes:
        field, _, value = change.partition("=")
        *sections, name = field.split(".")
        section = config
        for one in sections:
            section = section[one]
        section[name] = type(section[name])(value)
    with tempfile.TemporaryDirectory() as folder:
        # Read when the compiler is loaded, which nothing did yet.
        os.environ["LIBTPU_INIT_ARGS"] = kernels.SCHEDULES.format(folder)
        where = target.find(topology)
        assembly = plan.make_assembly(config)
        step = compiling.prepare(assembly, where)
        program = compiling.compile(step).program
        bundles = read_bundles(pathlib.Path(folder))
    clock = where.tpu.clock
    devices = where.tpu.devices_per_chip * clock
    rates = {"rate": where.tpu.hbm_rate / devices, "peak": where.tpu.peak / devices}
    rows = count(program, bundles, step.grids, **rates)
    whole = {"estimated": 0.0, "at least": 0.0}
    for row in rows:
        whole["estimated"] += row.times * row.estimated
        whole["at least"] += row.times * row.cycles
    least = assembly.step_flops / where.tpu.peak / where.chips
    for name, cycles in whole.items():
        print(f"{name}: {1e3 * cycles / clock:.1f} ms, {least * clock / cycles:.0%} of the peak")
    for row in sorted(rows, key=lambda row: -row.times * row.cycles)[:LARGEST]:
        of_step = [1e3 * row.times * cycles / clock for cycles in (row.estimated, row.cycles)]
        print(
            json.dumps([round(ms, 3) for ms in of_step]),
            row.instruction.name,
            row.instruction.source,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
