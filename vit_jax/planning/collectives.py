"""What devices exchange in a step: every collective of a compiled program."""

import collections
import dataclasses
import math
import re

from vit_jax.planning.hlo import Instruction, Program

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
      kind: one of `KINDS`.
      bytes: of the whole array on a device: gathered, before it is scattered, or reduced.
      group: devices that take part; slices, if it crosses them.
      times: how often it runs in a step; a fraction in a branch that is not always taken.
      crosses_slices: whether it goes over the slow network between slices.
      shapes: of the result.
      source: the path of the operation in the program, '' if unknown.
    """

    kind: str
    bytes: int
    group: int
    times: float
    crosses_slices: bool
    shapes: tuple
    source: str

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one run of it, by the ring algorithm."""
        if self.kind == "collective-permute":
            return self.bytes
        turns = 2 if self.kind == "all-reduce" else 1
        return turns * self.bytes * (self.group - 1) / self.group


def find(program: Program, *, slices: int = 1) -> list[Collective]:
    """Every collective of a step between more than one device.

    TPU programs hide them: an asynchronous one is worked on in pieces by the fusions it runs
    beside, and one that scatters what it reduces is an all-reduce within a fusion. Each is counted
    once, as what it does. Between slices they are transfers through the hosts.
    """
    found, seen = [], set()
    for name, times in program.runs.items():
        for step in program.computations[name]:
            for within, instruction in (("", step), *program.inside(step)):
                # The pieces of one operation have its channel.
                piece = (name, instruction.attribute("channel_id"))
                if "chain_id" in instruction.attributes:
                    if piece in seen:
                        continue
                    seen.add(piece)
                collective = _collective(instruction, times, within, slices)
                if collective and collective.group > 1:
                    found.append(collective)
    return found


def summary(found: list[Collective]) -> list[dict]:
    """Number and bytes of each kind in a step, by the size of the group: rows for a table or JSON,
    most bytes first.
    """
    rows: dict[tuple, dict] = collections.defaultdict(
        lambda: {"count": 0, "bytes": 0, "sent_bytes": 0}
    )
    for c in found:
        row = rows[c.kind, c.group, c.crosses_slices]
        row["count"] += c.times
        row["bytes"] += round(c.times * c.bytes)
        row["sent_bytes"] += round(c.times * c.sent)
    named = [
        {"kind": kind, "devices": group, "crosses_slices": crosses} | row
        for (kind, group, crosses), row in rows.items()
    ]
    return sorted(named, key=lambda row: (-row["bytes"], row["kind"], row["devices"]))


def _collective(
    instruction: Instruction, times: float, within: str, slices: int
) -> Collective | None:
    opcode, shapes = instruction.opcode, instruction.shapes
    common = {"times": times, "source": instruction.source}
    if opcode == "send":
        transfer = re.search(r'megascale_transfer_type="(\w+)"', instruction.attributes)
        if not transfer:
            return None
        kind = transfer[1].lower().replace("_", "-")
        kind = kind if kind in KINDS else "collective-permute"
        return Collective(
            kind, shapes[0].bytes, slices, crosses_slices=True, shapes=shapes[:1], **common
        )
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    if opcode.endswith("-start") and kind != "all-reduce":
        # Operands, results and, of a permutation, two counters.
        shapes = shapes[1:2] if kind == "collective-permute" else shapes[len(shapes) // 2 :]
    size = sum(shape.bytes for shape in shapes)
    group = 2 if kind == "collective-permute" else _group(instruction)
    if kind == "reduce-scatter":
        size *= group
    elif kind == "all-reduce" and within.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    return Collective(kind, size, group, crosses_slices=False, shapes=shapes, **common)


def _group(instruction: Instruction) -> int:
    """How many devices an operation's groups have."""
    text = instruction.attributes
    if lists := re.search(r"replica_groups=\{\{([\d,]*)\}", text):  # {{0,1},{2,3}}
        return lists[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", text):  # [2,4]<=[8]
        return int(counted[1])
    # mesh['a'=4,'b'=2] … {'a'}: a group is all devices along the named axes.
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    raise ValueError(
        f"{instruction.opcode} {instruction.name}: unknown replica_groups: {text[:200]}"
    )
