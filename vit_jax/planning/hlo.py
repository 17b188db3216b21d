"""Reads the text of a compiled program: its instructions, and how often each runs in a step.

Knows XLA's HLO text, not what it means for a plan: that is next door, in `collectives.py` and
`cycles.py`.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# Bytes of an element, by XLA's name of its type.
BYTES = {"pred": 1, "token": 0, "opaque": 0} | {
    f"{kind}{bits}": bits / 8
    for kind, sizes in {
        "s": (2, 4, 8, 16, 32, 64),
        "u": (2, 4, 8, 16, 32, 64),
        "f": (16, 32, 64),
        "bf": (16,),
        "c": (64, 128),
    }.items()
    for bits in sizes
}
# Computations that an instruction runs as a part of itself, as often as it runs.
_CALLS = re.compile(
    r"\b(?:calls|called_computations|to_apply|branch_computations)=\{?([^},]*(?:, %[^},]*)*)"
)
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^{}]*)\})?")
# A number in the layout: 0 and none are the device's large memory.
_SMALL_MEMORY = re.compile(r"S\([1-9]")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's type.

    Attributes:
      dtype: XLA's name of the element type.
      dims: lengths of the axes.
      layout: XLA's text: axes from minor to major, tiles, memory space.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        # Eight-bit floats have many names.
        return math.ceil(self.elements * BYTES.get(self.dtype, 1))

    @property
    def device_bytes(self) -> int:
        """Bytes in the device's large memory: padded to whole tiles, 0 if it lies elsewhere."""
        if _SMALL_MEMORY.search(self.layout):
            return 0
        tile = re.search(r"T\(([\d,]+)\)", self.layout)
        if not tile or not self.dims:
            return self.bytes
        order = [int(axis) for axis in self.layout.split(":")[0].split(",")]
        dims = [self.dims[axis] for axis in reversed(order)]
        sides = [int(side) for side in tile[1].split(",")][-len(dims) :]
        for i, side in enumerate(reversed(sides), 1):
            dims[-i] = math.ceil(dims[-i] / side) * side
        return math.ceil(math.prod(dims) * BYTES.get(self.dtype, 1))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      shapes: of the result, several for a tuple.
      opcode: e.g. `fusion`, `all-gather`.
      operands: names of the arguments.
      attributes: the text after the arguments.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> list[str]:
        """Computations that it runs as a part of itself; not those of a loop."""
        if self.opcode == "while":
            return []
        found = _CALLS.findall(self.attributes)
        return [name.strip().lstrip("%") for names in found for name in names.split(",")]

    @property
    def source(self) -> str:
        """The path of the operation in the Python program, '' if XLA made it up."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def attribute(self, name: str) -> str | None:
        """The word after `name=`."""
        found = re.search(rf'\b{name}"?[=:]"?([^,\s"}}]+)', self.attributes)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      entry: name of the computation that runs first.
      computations: their instructions, by name.
    """

    entry: str
    computations: dict[str, list[Instruction]]

    def loops(self) -> Iterator[tuple[Instruction, str, int]]:
        """Each `while` with its body and how often that runs."""
        for instructions in self.computations.values():
            for instruction in instructions:
                if instruction.opcode == "while":
                    body = instruction.attribute("body").lstrip("%")
                    yield instruction, body, self._trips(instruction)

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation that is a sequence of steps runs: the entry once, a loop's body
        once a turn. What is called by an instruction is not here but in `inside`.
        """
        counts: dict[str, int] = collections.defaultdict(int)

        def visit(name: str, times: int) -> None:
            counts[name] += times
            for instruction in self.computations[name]:
                if instruction.opcode == "while":
                    body = instruction.attribute("body").lstrip("%")
                    visit(body, times * self._trips(instruction))
                elif instruction.opcode in ("call", "async-start", "conditional"):
                    for called in instruction.called:
                        visit(called, times)

        visit(self.entry, 1)
        return dict(counts)

    def steps(self) -> Iterator[tuple[Instruction, int]]:
        """Every instruction that the device runs one after the other, and how often."""
        for name, times in self.runs.items():
            for instruction in self.computations[name]:
                yield instruction, times

    def inside(self, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """What an instruction is made of: (computation, instruction), at any depth."""
        for called in instruction.called:
            for inner in self.computations.get(called, ()):
                yield called, inner
                yield from self.inside(inner)

    def _trips(self, loop: Instruction) -> int:
        """How often a loop turns: as XLA noted, or the number its condition compares with. A loop
        that data ends (rejection sampling) counts once.
        """
        noted = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if noted:
            return int(noted[1])
        condition = self.computations[loop.attribute("condition").lstrip("%")]
        whole = [*condition, *(inner for i in condition for _, inner in self.inside(i))]
        bounds = [
            int(i.operands[0])
            for i in whole
            if i.opcode == "constant" and i.shapes[0].dtype in ("s32", "u32", "s64", "u64")
        ]
        return bounds[0] if len(bounds) == 1 and bounds[0] > 0 else 1


def parse(text: str) -> Program:
    """The program that `jax.stages.Compiled.as_text` prints."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY ")) and line.endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            current = computations.setdefault(name, [])
            if line.startswith("ENTRY "):
                entry = name
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            current.append(_instruction(line.strip()))
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program")
    return Program(entry, computations)


def shapes_in(text: str) -> tuple[Shape, ...]:
    """All array types in `text`: `f32[8,2]{1,0}` as ("f32", (8, 2))."""
    return tuple(
        Shape(dtype, tuple(int(d) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def _instruction(line: str) -> Instruction:
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    operands = re.sub(r"/\*.*?\*/", "", rest[len(opcode) + 1 : end])
    return Instruction(
        name=name.lstrip("%"),
        shapes=shapes_in(shape),
        opcode=opcode,
        operands=tuple(o.strip().lstrip("%") for o in operands.split(",") if o.strip()),
        attributes=rest[end + 1 :],
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced brackets: {text[:80]}")
