"""What each operation of a compiled TPU program costs at least: its products at the matrix units' peak, its
bytes at the large memory's rate, a kernel's bundles one a cycle; beside the compiler's estimate.

Neither sees waiting, what a product loses to tiles that it does not fill, or vector units that are
busier than the matrix units. Bytes that are moved beside other operations (copy-start) are not here.
"""

import math
import re
from collections.abc import Iterator

from vit_jax.planning import roofline
from vit_jax.planning.hlo import Instruction, Program, Shape
from vit_jax.planning.target import Target

_SIDE = re.compile(r"(\w+)=([\dx_-]+)")


def rooflines(program: Program, target: Target) -> list[dict]:
    """{"name", "source", "times", "estimated", "products", "bytes", "kernel", "floor"} of every operation
    that takes cycles, most estimated first; the last five are seconds of a step.

    Args:
      program: a compiled one, its kernels counted.
      target: TPUs.
    """
    tpu = target.tpu
    peak, rate = tpu.peak / tpu.devices_per_chip, tpu.hbm_rate / tpu.devices_per_chip
    shapes = {i.name: i.shapes for lines in program.computations.values() for i in lines}
    table = []
    for instruction, times in program.steps():
        if not (cycles := program.cycles(instruction)):
            continue
        kernel = cycles if instruction.name in program.kernels else 0
        bounds = {
            "products": product_flops(program, instruction, shapes) / peak,
            "bytes": large_bytes(program, instruction, shapes) / rate,
            "kernel": kernel / tpu.clock,
        }
        seconds = {"estimated": cycles / tpu.clock, **bounds, "floor": max(bounds.values())}
        table.append(
            {"name": instruction.name, "source": instruction.source, "times": times}
            | {name: times * value for name, value in seconds.items()}
        )
    return sorted(table, key=lambda row: -row["estimated"])


def product_flops(
    program: Program, instruction: Instruction, shapes: dict[str, tuple[Shape, ...]]
) -> int:
    """Operations of the products of an instruction, at any depth."""
    inside = {i.name: i.shapes for _, i in program.inside(instruction)}
    products = [instruction, *(i for _, i in program.inside(instruction))]
    return sum(_flops(product, shapes | inside) for product in products)


def large_bytes(
    program: Program, instruction: Instruction, shapes: dict[str, tuple[Shape, ...]]
) -> int:
    """Bytes that an instruction reads from the large memory and writes to it. An array that is given
    several times counts once; of one of which a fusion takes or replaces a slice, the slice.

    Args:
      program, instruction: one of its instructions.
      shapes: of the results of all instructions, by name.
    """
    called = instruction.called[:1] if instruction.opcode == "fusion" else []
    read: dict[str, int] = {}
    for index, name in enumerate(instruction.operands):
        whole = sum(shape.device_bytes for shape in shapes.get(name, ()))
        size = min(whole, _read(program, called[0], index)) if whole and called else whole
        read[name] = min(whole, read.get(name, 0) + size)
    replaced = _replaced(program, called[0]) if called else {}
    written = (
        min(shape.device_bytes, replaced.get(index, shape.device_bytes))
        for index, shape in enumerate(instruction.shapes)
    )
    return sum(read.values()) + sum(written)


def _read(program: Program, computation: str, index: int) -> int:
    """Bytes that a computation reads of its parameter `index`."""
    lines = program.computations[computation]
    parameter = next(i for i in lines if i.opcode == "parameter" and i.operands == (str(index),))
    return _used(program, lines, parameter.name)


def _used(program: Program, lines: list[Instruction], name: str) -> int:
    total = 0
    for user in lines:
        for place, operand in enumerate(user.operands):
            if operand != name:
                continue
            if user.opcode == "bitcast":
                total += _used(program, lines, user.name)
            elif user.opcode == "fusion":
                total += _read(program, user.called[0], place)
            elif user.opcode == "dynamic-slice" and place == 0:
                total += user.shapes[0].bytes
            elif user.opcode != "dynamic-update-slice" or place:
                total += next(i for i in lines if i.name == name).shapes[0].bytes
    return total


def _replaced(program: Program, computation: str) -> dict[int, int]:
    """Bytes of the slices that a computation's results replace, by the number of the result."""
    lines = program.computations[computation]
    by_name = {i.name: i for i in lines}
    root = lines[-1]
    results = root.operands if root.opcode == "tuple" else (root.name,)
    updates = {index: by_name[name] for index, name in enumerate(results)}
    return {
        index: by_name[update.operands[1]].shapes[0].bytes
        for index, update in updates.items()
        if update.opcode == "dynamic-update-slice"
    }


def _flops(instruction: Instruction, shapes: dict[str, tuple[Shape, ...]]) -> int:
    if instruction.opcode == "dot":
        return roofline.dot_flops(instruction, shapes[instruction.operands[0]][0])
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, *(shapes[name][0] for name in instruction.operands))
    return 0


def _convolution_flops(instruction: Instruction, image: Shape, kernel: Shape) -> int:
    """XLA writes products of several axes as convolutions with windows that mostly lie in the padding:
    only what meets the image counts.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    of_image, of_kernel, of_result = (
        {label: size for label, size in zip(names, shape.dims, strict=True)}
        for names, shape in zip(
            labels.groups(), (image, kernel, instruction.shapes[0]), strict=True
        )
    )
    pairs = math.prod(
        _meetings(of_image[axis], of_kernel[axis], of_result[axis], **window)
        for axis, window in _windows(instruction, sorted(set(of_image) - {"b", "f"}))
    )
    return 2 * of_result["b"] * of_result["f"] * of_kernel["i"] * pairs


def _windows(instruction: Instruction, axes: list[str]) -> Iterator[tuple[str, dict]]:
    """How the window moves along each axis."""
    text = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    given = {name: sides.split("x") for name, sides in _SIDE.findall(text[1])} if text else {}
    for index, axis in enumerate(axes):
        pad, _, _ = given["pad"][index].partition("_") if "pad" in given else ("0", "", "")
        yield (
            axis,
            {
                "pad": int(pad),
                "stride": int(given["stride"][index]) if "stride" in given else 1,
                "spread": int(given["lhs_dilate"][index]) if "lhs_dilate" in given else 1,
                "step": int(given["rhs_dilate"][index]) if "rhs_dilate" in given else 1,
            },
        )


def _meetings(
    image: int, window: int, result: int, *, pad: int, stride: int, spread: int, step: int
) -> int:
    """How many pairs of a result and an element of its window meet an element of the image, whose
    elements lie `spread` apart.
    """
    met = 0
    for first in range(-pad, result * stride - pad, stride):
        skipped = max(0, math.ceil(-first / step))
        places = range(first + skipped * step, min(first + window * step, image * spread), step)
        met += len(places) if spread == 1 else sum(place % spread == 0 for place in places)
    return met
