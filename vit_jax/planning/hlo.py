"""Reads the text of a compiled program: its instructions, and how often each runs in a step.

Knows XLA's HLO text, not what it means for a plan: that is next door, in `collectives.py`,
`cycles.py` and `kernels.py`.
"""

import collections
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterator, Mapping

from vit_jax.compute import conditionals

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
    r"\b(?:calls|called_computations|to_apply|branch_computations|true_computation|false_computation)"
    r"=\{?([^},]*(?:, %[^},]*)*)"
)
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
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
      root: whether it gives the result of its computation.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool = False

    @property
    def called(self) -> list[str]:
        """Computations that it runs as a part of itself; not those of a loop."""
        if self.opcode == "while":
            return []
        lists = _CALLS.findall(self.attributes)
        return [name.strip().lstrip("%") for names in lists for name in names.split(",")]

    @property
    def source(self) -> str:
        """The path of the operation in the Python program, '' if XLA made it up."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate of one run; `None` where it makes none."""
        match = _ESTIMATE.search(self.attributes)
        return int(match[1]) if match else None

    def attribute(self, name: str) -> str | None:
        """The word after `name=`."""
        match = re.search(rf'\b{name}"?[=:]"?([^,\s"}}]+)', self.attributes)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True)
class Conditional:
    """A place where a program runs one of several branches.

    Attributes:
      source: the path of the operation in the Python program.
      branches: how many there are.
      cycles: of one run, in the mean over the branches by how often each is counted.
      counted: how they are, in words.
      times: how often one of the branches runs in a step.
    """

    source: str
    branches: int
    cycles: float
    counted: str
    times: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      entry: name of the computation that runs first.
      computations: their instructions, by name.
      kernels: cycles of one run of what the compiler does not estimate, by the name of the
        instruction: hand-written kernels, and on GPUs everything, in nanoseconds.
    """

    entry: str
    computations: dict[str, list[Instruction]]
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def loops(self) -> Iterator[tuple[Instruction, str, int]]:
        """Each `while` with its body and how often that runs."""
        for instructions in self.computations.values():
            for instruction in instructions:
                if instruction.opcode == "while":
                    body = instruction.attribute("body").lstrip("%")
                    yield instruction, body, self._trips(instruction)

    @functools.cached_property
    def runs(self) -> dict[str, float]:
        """How often each computation that is a sequence of steps runs: the entry once, a loop's body
        once a turn. Branches of a conditional share its runs by `compute.conditionals`. What is called
        by an instruction is not here but in `inside`.
        """
        counts: dict[str, float] = collections.defaultdict(int)

        def visit(name: str, times: float) -> None:
            counts[name] += times
            for instruction in self.computations[name]:
                for called, share in self._steps_of(instruction):
                    visit(called, times * share)

        visit(self.entry, 1)
        return dict(counts)

    def conditionals(self) -> Iterator[Conditional]:
        """Every conditional of a step."""
        for instruction, times in self.steps():
            if instruction.opcode == "conditional":
                cycles, branches = self._branch_cycles(instruction), len(instruction.called)
                counted, shares = conditionals.shares(instruction.source, cycles)
                mean = sum(map(operator.mul, shares, cycles))
                yield Conditional(instruction.source, branches, mean, counted, times)

    def cycles(self, instruction: Instruction) -> int | None:
        """Of one run of an instruction by itself: the compiler's estimate, or of a kernel the count
        in `kernels`; `None` where there is neither.
        """
        return self.kernels.get(instruction.name, instruction.estimated_cycles)

    def steps(self) -> Iterator[tuple[Instruction, float]]:
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

    def _steps_of(self, instruction: Instruction) -> Iterator[tuple[str, float]]:
        """The computations that an instruction runs step by step, and how often each time it runs."""
        if instruction.opcode == "while":
            yield instruction.attribute("body").lstrip("%"), self._trips(instruction)
        elif instruction.opcode == "conditional":
            cycles = self._branch_cycles(instruction)
            _, shares = conditionals.shares(instruction.source, cycles)
            yield from ((b, s) for b, s in zip(instruction.called, shares, strict=True) if s)
        elif instruction.opcode in ("call", "async-start"):
            yield from ((name, 1) for name in instruction.called)

    def _branch_cycles(self, conditional: Instruction) -> list[float]:
        return [self._cycles_of(name) for name in conditional.called]

    def _cycles_of(self, name: str) -> float:
        """Of one run of a computation."""
        if name not in self._computed:
            self._computed[name] = sum(
                (self.cycles(instruction) or 0)
                + sum(
                    times * self._cycles_of(called) for called, times in self._steps_of(instruction)
                )
                for instruction in self.computations[name]
            )
        return self._computed[name]

    @functools.cached_property
    def _computed(self) -> dict[str, float]:
        return {}

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
    for line in _lines(text):
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


def _lines(text: str) -> Iterator[str]:
    """The lines of a program: an attribute of a kernel may have line breaks, and continues where a
    line begins neither with spaces nor a computation nor the end of one.
    """
    whole = ""
    for line in text.splitlines():
        if whole.startswith("  ") and not re.match(r"  |%|ENTRY |\}$|\}, execution_thread|$", line):
            whole += line
            continue
        yield whole
        whole = line
    yield whole


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
        root=line.startswith("ROOT "),
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced brackets: {text[:80]}")
