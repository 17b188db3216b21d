"""The real train step of a config, compiled for a target: no data, no weights, no devices."""

import dataclasses
import math
import re
import time

import jax

from vit_jax.base import logs
from vit_jax.compute import flops
from vit_jax.data.views import Variant
from vit_jax.devices import meshes
from vit_jax.planning import hlo, kernels
from vit_jax.planning.target import Target
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly, make_mesh
from vit_jax.training.guards import check_batch
from vit_jax.training.step_programs import compile_train_step

LARGEST = 8
# Of GPUs only the program is read, not its machine code: without the passes over that, program and memory are
# the same to the byte, for four fifths of the processor time.
_PROGRAM_ALONE = {"xla_backend_optimization_level": 0}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a step needs of a device's memory, in bytes.

    Attributes:
      arguments: the state and the batch.
      temporaries: what lives within the step; where the state is updated in place, new and old are
        one.
      peak: the most at any time.
      largest: the largest arrays: {"bytes", "what"}.
    """

    arguments: int
    temporaries: int
    peak: int
    largest: list[dict]


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step on its way to a target.

    Attributes:
      mesh: of the target's devices.
      state: shapes, dtypes and shardings.
      lowered: the program before it is compiled.
      flops: operations of a step on all devices together, recomputation included.
      grids: programs of each hand-written kernel's grid on a core, by its name.
      kept: the largest arrays that loops stack up, which the backward pass needs of every layer;
        rows as in `Memory.largest`.
    """

    mesh: jax.sharding.Mesh
    state: states.TrainState
    lowered: jax.stages.Lowered
    flops: int
    grids: dict[str, int]
    kept: list[dict]

    def state_bytes(self) -> int:
        """Bytes of parameters, optimizer state and averages on one device."""
        return sum(
            x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(self.state)
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A train step compiled for a target.

    Attributes:
      program: what `hlo` reads of it.
      memory: see `Memory`.
      seconds: what the compiler took.
    """

    program: hlo.Program
    memory: Memory
    seconds: float


class OutOfMemory(Exception):
    """The step needs more memory than a device has; `memory` says what."""

    def __init__(self, memory: Memory):
        super().__init__(f"{memory.peak} bytes")
        self.memory = memory


def trace(
    assembly: Assembly, devices: list, variant: Variant | None = None
) -> tuple[jax.sharding.Mesh, states.TrainState, jax.stages.Traced]:
    """Traces the step that `train` would run on these devices; where images or patches have several sizes that of
    `variant`, by default the largest.

    Raises:
      ConfigError: mesh or batch do not fit them.
    """
    config = assembly.config
    mesh = make_mesh(config, devices)
    check_batch(config, mesh)
    with jax.set_mesh(mesh):
        state = assembly.abstract_state(mesh)
        step = compile_train_step(assembly.train_step, states.shardings_of(state), mesh)
        batch = assembly.abstract_batch(mesh)
        if variant is not None:
            ((name, shape),) = variant.shapes
            batches = assembly.abstract_batches(mesh)
            batch = next(batch for batch in batches if batch[name].shape[1:] == shape)
        return mesh, state, step.trace(state, batch)


def prepare(assembly: Assembly, target: Target, variant: Variant | None = None) -> Step:
    """Traces and lowers the step that `train` would run on the target; arguments as of `trace`.

    Raises:
      ConfigError: mesh or batch do not fit the target.
    """
    mesh, state, traced = trace(assembly, target.devices, variant)
    with jax.set_mesh(mesh):
        replicas = meshes.batch_shards(mesh)
        kept = [
            {
                "bytes": aval.size * aval.dtype.itemsize // replicas,
                "what": f"{aval}, in {replicas} parts",
            }
            for aval in flops.stacked(traced.jaxpr)
        ]
        kept = sorted(kept, key=lambda row: -row["bytes"])[:LARGEST]
        return Step(
            mesh=mesh,
            state=state,
            lowered=traced.lower(),
            flops=flops.count(traced.jaxpr),
            grids=kernels.grids(traced.jaxpr, target.tpu.cores if target.tpu else 1),
            kept=kept,
        )


def compile(step: Step) -> Compiled:
    """Compiles for the devices of the step's mesh.

    Raises:
      OutOfMemory: they have too little memory.
    """
    began = time.perf_counter()
    try:
        with logs.with_elapsed_time("compiling the training step"):
            on_gpu = step.mesh.devices.flat[0].platform == "gpu"
            compiled = step.lowered.compile(compiler_options=_PROGRAM_ALONE if on_gpu else None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(_refused(str(error), step)) from error
    program = hlo.parse(compiled.as_text())
    stats = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
        largest=largest_arrays(program),
    )
    return Compiled(program, memory, time.perf_counter() - began)


def largest_arrays(program: hlo.Program, number: int = LARGEST) -> list[dict]:
    """The largest arrays that the program writes to memory, a row for each: {"bytes", "what"}."""
    rows = {}
    for instruction, _ in program.steps():
        if instruction.opcode in ("parameter", "tuple", "get-tuple-element", "bitcast", "while"):
            continue
        for shape in instruction.shapes:
            what = f"{shape.dtype}{list(shape.dims)} {instruction.source}".strip()
            rows[what] = shape.device_bytes
    ordered = sorted(rows.items(), key=lambda row: -row[1])[:number]
    return [{"bytes": size, "what": what} for what, size in ordered]


def _refused(message: str, step: Step) -> Memory:
    """The memory that the step would need, from the compiler's error message."""
    arguments = step.state_bytes()
    used = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message)
    temporaries = re.search(r"HLO temporaries \(([\d.]+)([KMGT]?)\)", message)
    if used:
        peak = _bytes(used)
    elif temporaries:
        peak = arguments + _bytes(temporaries)
    else:
        raise RuntimeError(f"the compiler ran out of memory in words not known here: {message}")
    return Memory(arguments, peak - arguments, peak, step.kept)


def _bytes(match: re.Match) -> int:
    return round(float(match[1]) * _UNITS[match[2]])
