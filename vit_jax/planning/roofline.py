"""What each kernel of a compiled GPU program costs at least: bytes and operations counted in the
program, and the time of them at published rates, which takes the place of a TPU compiler's cycles.

A fusion reads its operands once and writes its results once. Of an operand that it only slices, the
slices count; of a result that it updates in place, the update. Nothing is known of caches, of tiles
that do not fit, of what overlaps.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from vit_jax.devices.chips import Gpu
from vit_jax.planning.hlo import Instruction, Program, Shape

# What kernels do. `stack copies` write to, or read from, what a loop stacks up; `fills` write a constant.
PARTS = (
    "matrix products", "attention", "stack copies", "fills", "transposes", "other copies",
    "elementwise and reductions",
)  # fmt: skip
# Of the published rates, what kernels reached in a step of ViT-B/16 on an H100, and what each costs beside
# (docs/notes/2026-11-26-first-gpus.md). Attention's share grows from 9 % to 18 % at 577 tokens.
USUAL_PRODUCTS, USUAL_ATTENTION, USUAL_MEMORY = 0.68, 0.12, 0.70
LAUNCH_SECONDS = 2e-6

# Instructions that run other computations step by step.
_SEQUENCES = ("while", "conditional", "call", "async-start")
# Instructions that are no kernels. Collectives are counted in `collectives.py`.
_NO_KERNELS = {
    *_SEQUENCES, "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "opt-barrier",
    "partition-id", "replica-id", "domain", "add-dependency", "send", "recv", "infeed", "outfeed",
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
}  # fmt: skip
_ENDS = ("-done", "-update")  # of asynchronous instructions, whose start counts
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota", "reshape"}
_STACKING = {"dynamic-slice", "dynamic-update-slice"}
_MOVES = {
    *_STACKING, "slice", "pad", "concatenate", "copy", "transpose", "broadcast", "reverse", "convert",
}  # fmt: skip
_CONTRACTED = {
    "dot": re.compile(r"lhs_contracting_dims=\{([\d,]*)\}"),
    "custom-call": re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]'),
}
_SLICES = {"dynamic-slice", "slice", "gather"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One run of a kernel.

    Attributes:
      part: one of `PARTS`.
      bytes: read and written.
      flops: of its products.
      floor, usual: seconds.
    """

    part: str
    bytes: int
    flops: int
    floor: float
    usual: float


def kernels_of(program: Program, gpu: Gpu) -> dict[str, Kernel]:
    """The kernels of a program, by the name of their instruction."""
    every = [i for instructions in program.computations.values() for i in instructions]
    shapes = {instruction.name: instruction.shapes for instruction in every}
    within = {name for i in every if i.opcode not in _SEQUENCES for name in i.called}
    return {
        instruction.name: _kernel(program, instruction, shapes, gpu)
        for name, instructions in program.computations.items()
        if name not in within
        for instruction in instructions
        if _is_kernel(instruction)
    }


def weigh(program: Program, kernels: Mapping[str, Kernel]) -> Program:
    """The program with nanoseconds for cycles: by them the branches of conditionals are weighed."""
    return dataclasses.replace(
        program, kernels={name: round(1e9 * kernel.usual) for name, kernel in kernels.items()}
    )


def count_parts(program: Program, kernels: Mapping[str, Kernel]) -> dict[str, dict]:
    """{part: {"kernels", "bytes", "flops", "floor", "usual"}} of a step on one device."""
    totals = {
        part: dict.fromkeys(("kernels", "bytes", "flops", "floor", "usual"), 0) for part in PARTS
    }
    for instruction, times in program.steps():
        if kernel := kernels.get(instruction.name):
            row = totals[kernel.part]
            row["kernels"] += times
            for name in ("bytes", "flops", "floor", "usual"):
                row[name] += times * getattr(kernel, name)
    for row in totals.values():
        row |= {name: round(row[name]) for name in ("kernels", "bytes", "flops")}
    return totals


def sum_of(counted: Mapping[str, dict], name: str) -> float:
    """The sum of a column of `count_parts`."""
    return sum(row[name] for row in counted.values())


def largest_kernels(program: Program, kernels: Mapping[str, Kernel], number: int) -> list[dict]:
    """The kernels that usually take longest in a step, a row for each."""
    rows = []
    for instruction, times in program.steps():
        if kernel := kernels.get(instruction.name):
            row = {
                "name": instruction.name,
                "part": kernel.part,
                "seconds": times * kernel.usual,
                "times": times,
                "bytes": kernel.bytes,
                "flops": kernel.flops,
                "shapes": [f"{s.dtype}{list(s.dims)}" for s in instruction.shapes],
                "source": instruction.source,
            }
            rows.append(row)
    return sorted(rows, key=lambda row: -row["seconds"])[:number]


def _is_kernel(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode == "custom-call":
        return _target(instruction) not in ("AllocateBuffer", "Sharding")
    return opcode.removesuffix("-start") not in _NO_KERNELS and not opcode.endswith(_ENDS)


def _kernel(
    program: Program, instruction: Instruction, shapes: Mapping[str, tuple], gpu: Gpu
) -> Kernel:
    operands = [shape for name in instruction.operands for shape in shapes.get(name, ())]
    moved = sum(shape.bytes for shape in operands) + _bytes(instruction)
    part, flops, seconds = "elementwise and reductions", 0, 0.0
    if instruction.opcode == "fusion":
        body = _Body(program.computations[instruction.called[0]])
        moved, part = body.bytes_read() + body.bytes_written(), _part(instruction, body)
        # Calls of cuBLAS are in fusions where they read a slice of what layers have stacked.
        products = [i for _, i in program.inside(instruction) if i.opcode in _CONTRACTED]
    else:
        products = [instruction]
        if instruction.opcode in ("copy", "copy-start"):
            moved = 2 * instruction.shapes[0].bytes
            part = "transposes" if _reorders(instruction, shapes) else "other copies"
    for product in products:
        inputs = [shape for name in product.operands for shape in shapes.get(name, ())]
        operations = _product_flops(product, inputs)
        if operations:
            part = "matrix products"
            flops += operations
            seconds += operations / _product_rate(product, inputs[0], gpu)
    share = USUAL_PRODUCTS
    if instruction.opcode == "custom-call" and "fmha" in _target(instruction):
        part, share = "attention", USUAL_ATTENTION
        flops = _attention_flops(instruction, operands)
        seconds = flops / gpu.peak
    memory = moved / gpu.hbm_rate
    usual = max(seconds / share, memory / USUAL_MEMORY) + LAUNCH_SECONDS
    return Kernel(part, moved, flops, max(seconds, memory), usual)


class _Body:
    """The computation of a fusion."""

    def __init__(self, instructions: list[Instruction]):
        self.instructions = instructions
        self.by_name = {i.name: i for i in instructions}
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in instructions:
            for name in instruction.operands:
                self.users[name].append(instruction)
        root = next(i for i in instructions if i.root)
        roots = map(self.by_name.get, root.operands) if root.opcode == "tuple" else [root]
        self.outputs = [self._origin(output) for output in roots]
        # Arrays that are updated where they lie.
        updated = [o for o in self.outputs if o.opcode == "dynamic-update-slice"]
        targets = {self._origin(self.by_name[o.operands[0]]).name for o in updated}
        self.in_place = {t for t in targets if self.by_name[t].opcode == "parameter"}

    def bytes_written(self) -> int:
        return sum(
            self._bytes(o.operands[1]) if o.opcode == "dynamic-update-slice" else _bytes(o)
            for o in self.outputs
        )

    def bytes_read(self) -> int:
        parameters = [i for i in self.instructions if i.opcode == "parameter"]
        return sum(min(_bytes(p), self._read(p, p.name in self.in_place)) for p in parameters)

    def reorders(self) -> bool:
        """Whether it writes an array in another order than it is read."""
        shapes = {i.name: i.shapes for i in self.instructions}
        return any(_reorders(i, shapes) for i in self.instructions)

    def only_updates(self) -> bool:
        """Whether all that it writes are parts of arrays that lie elsewhere."""
        return all(o.opcode == "dynamic-update-slice" for o in self.outputs)

    def reads_arrays(self) -> bool:
        return any(i.opcode == "parameter" and i.shapes[0].elements > 1 for i in self.instructions)

    def operations(self) -> set[str]:
        """Kinds of what is done to arrays of more than one number."""
        return {
            i.opcode
            for i in self.instructions
            if i.opcode not in _FREE and any(shape.elements > 1 for shape in i.shapes)
        }

    def _read(self, instruction: Instruction, updated: bool) -> int:
        """Bytes that all uses of an array read of it together."""
        read = 0
        for user in self.users[instruction.name]:
            if user.opcode in _SLICES:
                read += _bytes(user)
            elif user.opcode == "bitcast":
                read += self._read(user, updated)
            elif not (updated and user.opcode == "dynamic-update-slice"):
                return _bytes(instruction)
        return read

    def _origin(self, instruction: Instruction) -> Instruction:
        while instruction.opcode == "bitcast":
            instruction = self.by_name[instruction.operands[0]]
        return instruction

    def _bytes(self, name: str) -> int:
        return _bytes(self.by_name[name])


def _bytes(instruction: Instruction) -> int:
    """Of what it gives, less the workspace of cuBLAS and cuDNN."""
    workspace = ("s8", "u8") if instruction.opcode == "custom-call" else ()
    return sum(shape.bytes for shape in instruction.shapes if shape.dtype not in workspace)


def _part(instruction: Instruction, body: _Body) -> str:
    """What a fusion without products does."""
    operations = body.operations()
    moves = operations and operations <= _MOVES
    # A fusion is named after the operation that decides how it is compiled.
    if body.reorders() and (moves or "transpose" in instruction.name):
        return "transposes"
    if body.only_updates() or (moves and operations & _STACKING):
        return "stack copies"
    if not moves:
        return "elementwise and reductions"
    return "other copies" if body.reads_arrays() else "fills"


def _reorders(instruction: Instruction, shapes: Mapping[str, tuple]) -> bool:
    """Whether an instruction writes an array in another order than it is read."""
    if instruction.opcode == "transpose":
        return True
    if instruction.opcode not in ("copy", "copy-start"):
        return False
    sources = shapes.get(instruction.operands[0], ())
    return bool(sources) and _order(sources[0]) != _order(instruction.shapes[0])


def _order(shape: Shape) -> list[int]:
    """Axes that are longer than 1, from minor to major."""
    order = shape.layout.partition(":")[0]
    axes = map(int, order.split(",")) if order else reversed(range(len(shape.dims)))
    return [axis for axis in axes if shape.dims[axis] > 1]


def _target(instruction: Instruction) -> str:
    return instruction.attribute("custom_call_target") or ""


def _product_flops(instruction: Instruction, operands: list[Shape]) -> int:
    """Operations of a product or convolution, 0 for any other instruction."""
    if instruction.opcode == "custom-call" and _target(instruction).startswith("__cudnn$conv"):
        return _convolution_flops(instruction, operands)
    return dot_flops(instruction, operands[0]) if operands else 0


def dot_flops(instruction: Instruction, left: Shape) -> int:
    """Operations of a product, written as a `dot` or a call of a library, whose first operand is `left`; 0 for any
    other instruction.
    """
    pattern = _CONTRACTED.get(instruction.opcode)
    if not (contracted := pattern and pattern.search(instruction.attributes)):
        return 0
    axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
    return 2 * instruction.shapes[0].elements * math.prod(left.dims[axis] for axis in axes)


def _convolution_flops(instruction: Instruction, operands: list[Shape]) -> int:
    """Of the forward pass, or of one of the two products of the backward pass, which are as many."""
    kind = _target(instruction)
    result = instruction.shapes[0]
    if "BackwardFilter" in kind:
        output, kernel = operands[1], result
    elif "BackwardInput" in kind:
        output, kernel = operands[0], operands[1]
    else:
        output, kernel = result, operands[1]
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    return 2 * output.elements * kernel.elements // kernel.dims[labels[1].index("o")]


def _product_rate(instruction: Instruction, operand: Shape, gpu: Gpu) -> float:
    """FLOP/s of a product by the type of its operands: twice as many bits, half the rate. float32 is
    rounded to TF32 unless the highest precision is asked for, which needs the vector units.
    """
    size = operand.bytes / max(operand.elements, 1)
    if size >= 4 and "operand_precision={highest" in instruction.attributes:
        return 2 * gpu.cores * gpu.units_per_core * gpu.clock
    return gpu.peak * 2 / size


def _attention_flops(instruction: Instruction, operands: list[Shape]) -> int:
    """Of cuDNN's attention: two products forward; five backward, which computes the weights again."""
    (batch, queries, heads, size), (_, keys, *_) = operands[0].dims, operands[1].dims
    products = 5 if "Backward" in _target(instruction) else 2
    return 2 * products * batch * heads * queries * keys * size
