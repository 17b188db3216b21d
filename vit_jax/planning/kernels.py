"""Cycles of hand-written kernels (Pallas) in a compiled TPU program, of which the compiler estimates
nothing.

Each kernel is compiled again by itself, in a process whose compiler writes down its schedules, and
the bundles are counted: a core issues one a cycle. A kernel's code runs once for each program of
its grid. So its cycles are bundles times programs, which is exact for code without loops and
branches that never waits for memory.
"""

import collections
import dataclasses
import fractions
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

import jax
from jax.extend import core
from jax.sharding import SingleDeviceSharding

from vit_jax.base import subprocesses
from vit_jax.compute import flops
from vit_jax.planning import target
from vit_jax.planning.hlo import Instruction, Program

TARGET = "tpu_custom_call"
# The compiler of another process writes what these ask for.
SCHEDULES = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
_GIVEN = ("custom_call_config", "scoped_memory_configs")
_DTYPES = {"bf16": "bfloat16", "pred": "bool"} | {
    f"{kind}{bits}": f"{name}{bits}"
    for kind, name in (("f", "float"), ("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32)
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as a program calls it.

    Attributes:
      code: the call's configuration for the compiler, which has the kernel's program.
      operands, results: types of arrays, (dtype, dims).
    """

    code: str
    operands: tuple
    results: tuple


def find_kernels(program: Program) -> dict[str, Kernel]:
    """The kernels of a program, by the name of the instruction that calls them."""
    types = {
        instruction.name: [(_DTYPES[s.dtype], s.dims) for s in instruction.shapes]
        for instruction in _instructions(program)
        if all(s.dtype in _DTYPES for s in instruction.shapes)
    }
    return {
        instruction.name: Kernel(
            _code(instruction),
            tuple(array for name in instruction.operands for array in types[name]),
            tuple(types[instruction.name]),
        )
        for instruction in _instructions(program)
        if instruction.opcode == "custom-call" and f'"{TARGET}"' in instruction.attributes
    }


def grids(jaxpr: core.ClosedJaxpr, cores: int = 1) -> dict[str, int]:
    """How many programs the grid of each kernel has on a core, by the kernel's name; the most, if several kernels have
    one name.

    Args:
      jaxpr: of a step.
      cores: of a device. They divide a grid along one of the axes that it calls parallel; taken is the one that they
        divide best.
    """
    programs: dict[str, int] = collections.defaultdict(int)
    for equation in flops.equations(jaxpr):
        if equation.primitive.name == "pallas_call":
            name = equation.params["name"]
            programs[name] = max(programs[name], _on_a_core(equation, cores))
    return dict(programs)


def _on_a_core(equation: core.JaxprEqn, cores: int) -> int:
    mapping = equation.params["grid_mapping"]
    semantics = iter(getattr(equation.params["compiler_params"], "dimension_semantics", None) or ())
    # Axes of `vmap` are parallel, and come before those that the kernel tells of.
    parallel = [
        size
        for axis, size in enumerate(mapping.grid)
        if axis in mapping.vmapped_dims or "parallel" in str(next(semantics, "")).lower()
    ]
    share = min((fractions.Fraction(-(-size // cores), size) for size in parallel), default=1)
    return math.ceil(share * flops.runs(equation))


def count_bundles(kernels: Mapping[str, Kernel], topology: str) -> dict[str, int]:
    """Bundles of each kernel's schedule on the chips of a topology."""
    if not kernels:
        return {}
    distinct = {kernel: name for name, kernel in kernels.items()}
    request = {name: dataclasses.asdict(kernel) for kernel, name in distinct.items()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {SCHEDULES.format(folder)}"
        command, environment = subprocesses.python_module("vit_jax.planning.kernels")
        done = subprocess.run(
            [*command, topology, folder],
            input=json.dumps(request),
            env=environment | {"LIBTPU_INIT_ARGS": arguments.strip(), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"kernels of the program cannot be compiled alone: {done.stderr}")
    counted = json.loads(done.stdout.splitlines()[-1])
    return {name: counted[distinct[kernel]] for name, kernel in kernels.items()}


def rows(program: Program, bundles: Mapping[str, int], programs: Mapping[str, int]) -> list[dict]:
    """What each kernel of a step costs, most cycles first.

    Args:
      program: a compiled one.
      bundles: of `count_bundles`.
      programs: of `grids`.
    """
    table = []
    for instruction, times in program.steps():
        if instruction.name in bundles:
            # XLA calls an instruction as its kernel, and adds a number and what it made of it: cubed.3.x_ref.
            name = instruction.name.partition(".")[0]
            count = bundles[instruction.name]
            row = {
                "name": instruction.name,
                "bundles": count,
                "programs": programs[name],
                "cycles": count * programs[name],
                "times": times,
            }
            table.append(row)
    return sorted(table, key=lambda row: -row["times"] * row["cycles"])


def _instructions(program: Program) -> Iterator[Instruction]:
    return (i for instructions in program.computations.values() for i in instructions)


def _code(instruction: Instruction) -> str:
    """What XLA was given for the call: of all that it prints, the kernel and the fast memory that it may
    take.
    """
    text = instruction.attributes.partition("backend_config=")[2]
    config, _ = json.JSONDecoder().raw_decode(text)
    return json.dumps({key: config[key] for key in _GIVEN if key in config})


def _compile(kernel: dict, device: jax.Device) -> None:
    """Compiles one kernel for a device."""
    sharding = SingleDeviceSharding(device)
    operands, results = (
        [jax.ShapeDtypeStruct(dims, dtype, sharding=sharding) for dtype, dims in kernel[arrays]]
        for arrays in ("operands", "results")
    )
    call = jax.ffi.ffi_call(
        TARGET, results, custom_call_api_version=1, legacy_backend_config=kernel["code"]
    )
    jax.jit(call).lower(*operands).compile()


def _main(topology: str, folder: str) -> None:
    """Prints bundles by name of the kernels on the standard input."""
    device, counted, seen = target.find(topology).devices[0], {}, set()
    for name, kernel in json.load(sys.stdin).items():
        _compile(kernel, device)
        for path in set(pathlib.Path(folder).glob("*schedule-analysis_final_bundles.txt")) - seen:
            seen.add(path)
            text = path.read_text()
            # The top-level program, TLP, is scheduled beside the kernel that it calls.
            if f'custom_call_target="{TARGET}"' in text and "-TLP-" not in path.name:
                counted[name] = int(re.search(r"total scheduled bundles:\s+(\d+)", text)[1])
    print(json.dumps(counted))


if __name__ == "__main__":
    _main(*sys.argv[1:])
