"""What devices exchange in a step: every collective of a compiled program."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

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
      crosses_slices: whether it goes over the slow network: between slices, or beyond NVLink.
      shapes: of the result.
      source: the path of the operation in the program, '' if unknown.
      islands: of GPUs that NVLink joins, how many take part.
    """

    kind: str
    bytes: int
    group: int
    times: float
    crosses_slices: bool
    shapes: tuple
    source: str
    islands: int = 1

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one run of it, by the ring algorithm."""
        if self.kind == "collective-permute":
            return self.bytes
        turns = 2 if self.kind == "all-reduce" else 1
        return turns * self.bytes * (self.group - 1) / self.group


def find(program: Program, *, slices: int = 1, islands: Sequence[int] = ()) -> list[Collective]:
    """Every collective of a step between more than one device.

    Args:
      program: a compiled one.
      slices: of TPUs.
      islands: of GPUs, the number of each device's island, in the order of the program's devices.

    TPU programs hide them: an asynchronous one is worked on in pieces by the fusions it runs
    beside, and one that scatters what it reduces is an all-reduce within a fusion. Each is counted
    once, as what it does. Between slices they are transfers through the hosts.
    """
    collectives, seen = [], set()
    for name, times in program.runs.items():
        for step in program.computations[name]:
            for within, instruction in (("", step), *program.inside(step)):
                # The pieces of one operation have its channel.
                piece = (name, instruction.attribute("channel_id"))
                if "chain_id" in instruction.attributes:
                    if piece in seen:
                        continue
                    seen.add(piece)
                collective = _collective(instruction, times, within, slices, islands)
                if collective and collective.group > 1:
                    collectives.append(collective)
    return collectives


def summary(collectives: list[Collective]) -> list[dict]:
    """Number and bytes of each kind in a step, by the size of the group: rows for a table or JSON,
    most bytes first.
    """
    rows: dict[tuple, dict] = collections.defaultdict(
        lambda: {"count": 0, "bytes": 0, "sent_bytes": 0}
    )
    for c in collectives:
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
    instruction: Instruction, times: float, within: str, slices: int, islands: Sequence[int]
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
    permutes = kind == "collective-permute"
    if opcode.endswith("-start") and kind != "all-reduce":
        # Operands, results and, of a permutation, counters.
        count = len(instruction.operands)
        shapes = shapes[count : 2 * count] if permutes else shapes[len(shapes) // 2 :]
    size = sum(shape.bytes for shape in shapes)
    groups = _pairs(instruction) if permutes else [_first_group(instruction)]
    group = 2 if permutes else len(groups[0])
    if kind == "reduce-scatter":
        size *= group
    elif kind == "all-reduce" and within.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    spans = [len({islands[i] for i in members}) for members in groups] if islands else []
    spanned = max(spans, default=1)
    return Collective(
        kind, size, group, crosses_slices=spanned > 1, shapes=shapes, islands=spanned, **common
    )


def _pairs(instruction: Instruction) -> list[list[int]]:
    """Which device sends to which in a permutation."""
    pairs = instruction.attributes.partition("source_target_pairs={")[2].partition("}}")[0]
    return [[int(source), int(to)] for source, to in re.findall(r"\{(\d+),(\d+)", pairs)]


def _first_group(instruction: Instruction) -> list[int]:
    """The devices of an operation's first group; the others are as large."""
    text = instruction.attributes
    if lists := re.search(r"replica_groups=\{\{([\d,]*)\}", text):  # {{0,1},{2,3}}
        return [int(i) for i in lists[1].split(",")]
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=(\[[\d,]*\]\S*)", text):
        return _numbered(counted[2])[: int(counted[1])]  # [4,2]<=[2,4]T(1,0)
    # mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}: a group is all devices along the named axes.
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        ids = _numbered(mesh[2]) if "(" in mesh[2] else range(math.prod(sizes.values()))
        steps = []
        # 'a':(2)4 is the part of an axis that has 2 such parts outside of it.
        for axis, outside, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[3]):
            size = int(part or sizes[axis])
            inside = sizes[axis] // (int(outside or 1) * size)
            stride = math.prod(list(sizes.values())[list(sizes).index(axis) + 1 :]) * inside
            steps.append([i * stride for i in range(size)])
        return [ids[sum(place)] for place in itertools.product(*steps)]
    raise ValueError(
        f"{instruction.opcode} {instruction.name}: unknown replica_groups: {text[:200]}"
    )


def _numbered(text: str) -> list[int]:
    """Devices in the order of `[2,4]T(1,0)`: numbered by rows, then transposed."""
    dims, order = re.search(r"\[([\d,]*)\](?:T\(([\d,]*)\))?", text).groups()
    numbers = np.arange(math.prod(map(int, dims.split(",")))).reshape([*map(int, dims.split(","))])
    return (numbers.transpose([*map(int, order.split(","))]) if order else numbers).ravel().tolist()
