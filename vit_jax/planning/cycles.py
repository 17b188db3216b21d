"""Where the time of a compiled TPU program goes, by the compiler's own estimate of each operation and
the bundles of hand-written kernels (`kernels.py`).

Blind to what overlaps and to waiting for other devices and for memory.
"""

import collections
import re

from vit_jax.planning.hlo import Instruction, Program

_MOVES = ("copy", "transpose", "reshape", "slice", "concatenate", "pad", "bitcast", "broadcast")
# What attention's operations are called: its scope, its contractions over queries (q) and keys (n).
_ATTENTION = re.compile(r"attention|softmax|\bbhqn\b|->bhqn|bhqn,")
PARTS = ("matrix products", "attention", "data movement", "elementwise and reductions")


def count(program: Program, *, tokens: int | None = None) -> dict[str, dict[str, int]]:
    """Estimated cycles of a step on one device: {"all", "loops"} by part of `PARTS`.

    Args:
      tokens: of the model, to know attention by its weights (…, tokens, tokens).
    """
    cycles_by_part = {
        where: collections.Counter(dict.fromkeys(PARTS, 0)) for where in ("all", "loops")
    }
    for instruction, times in program.steps():
        if cycles := program.cycles(instruction):
            part = _part(program, instruction, tokens)
            cycles_by_part["all"][part] += times * cycles
            if times > 1:
                cycles_by_part["loops"][part] += times * cycles
    return {
        where: {part: round(cycles) for part, cycles in counts.items()}
        for where, counts in cycles_by_part.items()
    }


def largest(program: Program, number: int) -> list[dict]:
    """The operations that take the most cycles in a step, a row for each."""
    rows = []
    for instruction, times in program.steps():
        if cycles := program.cycles(instruction):
            row = {
                "name": instruction.name,
                "cycles": round(times * cycles),
                "times": times,
                "shapes": [f"{s.dtype}{list(s.dims)}" for s in instruction.shapes],
                "source": instruction.source,
            }
            rows.append(row)
    return sorted(rows, key=lambda row: -row["cycles"])[:number]


def conditionals(program: Program) -> list[dict]:
    """How branches were counted, a row for each conditional that takes cycles, most cycles first."""
    rows = []
    for conditional in program.conditionals():
        if conditional.cycles:
            row = {
                "branches": conditional.branches,
                "counted": conditional.counted,
                "times": conditional.times,
                "cycles": round(conditional.times * conditional.cycles),
                "source": conditional.source,
            }
            rows.append(row)
    return sorted(rows, key=lambda row: -row["cycles"])


def _part(program: Program, instruction: Instruction, tokens: int | None) -> str:
    inside = [inner for _, inner in program.inside(instruction)]
    shapes = [shape for part in (instruction, *inside) for shape in part.shapes]
    if _ATTENTION.search(instruction.source) or (
        tokens and any(shape.dims.count(tokens) >= 2 for shape in shapes)
    ):
        return "attention"
    if any(part.opcode in ("convolution", "dot") for part in (instruction, *inside)):
        return "matrix products"
    kind = instruction.name if instruction.opcode == "fusion" else instruction.opcode
    # A fusion is named after what it does: bitcast_dynamic-update-slice_fusion.
    words = [re.sub(r"dynamic-(update-)?", "", word) for word in re.split(r"[_.]", kind)]
    moves = [word for word in words if word and word != "fusion" and not word.isdigit()]
    if moves and all(word in (*_MOVES, "convert") for word in moves) and moves != ["convert"]:
        return "data movement"
    return "elementwise and reductions"
