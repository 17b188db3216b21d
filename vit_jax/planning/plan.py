"""A plan: what a run of a config will need on a target, as plain data."""

import dataclasses
import math

import jax
from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import tiers
from vit_jax.compute import choices
from vit_jax.data import sources, views
from vit_jax.data.options import Data
from vit_jax.data.sources.known_sets import NAMED
from vit_jax.data.splits import select
from vit_jax.devices import meshes
from vit_jax.models import naming, registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.planning import (
    collectives,
    compiling,
    cycles,
    estimate,
    hlo,
    kernels,
    preconditioning,
    roofline,
    tpu_roofline,
)
from vit_jax.planning.target import Target
from vit_jax.training import phases
from vit_jax.training.assembly import Assembly, assemble, resolve

# Images of splits that plans need before the data is there: TFDS's catalog; JFT as the ViT paper
# counts it, its classes too.
EXAMPLES = {
    "imagenet2012": {"train": 1_281_167, "validation": 50_000},
    "imagenet21k": {"full": 14_197_122},
    "cifar10": {"train": 50_000, "test": 10_000},
    "cifar100": {"train": 50_000, "test": 10_000},
    "oxford_iiit_pet": {"train": 3_680, "test": 3_669},
    "oxford_flowers102": {"train": 1_020, "validation": 1_020, "test": 6_149},
    "jft300m": {"train": 303_000_000},
}
CLASSES = {name: NAMED[name].classes for name in EXAMPLES if name in NAMED} | {"jft300m": 18_291}
# How many of a program's operations are listed: those that take longest.
OPERATIONS = 40
# ViT Table 2 counts cost in days of one core of a TPU v3; this many FLOP/s at its peak.
TPU_V3_CORE = 61.5e12


def make_assembly(
    config: ConfigDict, *, num_classes: int | None = None, examples: int | None = None
) -> Assembly:
    """The parts of the run, without its data.

    Args:
      config: the run's.
      num_classes, examples: of the training data, where neither the config nor the tables above tell.

    Raises:
      ConfigError: the config is wrong, or one of these is not known.
    """
    config = resolve(config)
    classes = num_classes or config.model.num_classes
    if not (classes and examples):
        known_classes, known_examples = known_data(config.data)
        classes, examples = classes or known_classes, examples or known_examples
    if not classes and objectives.find_objective(config.objective)[0].needs_labels:
        raise ConfigError(
            f"the number of classes of {config.data.name!r} is not known: set --num_classes=N or "
            "--config.model.num_classes=N"
        )
    try:
        return assemble(config, num_classes=classes, examples_per_epoch=examples)
    except ConfigError as error:
        if examples is None and "epoch" in str(error):
            raise ConfigError(
                f"the number of training images of {config.data.name!r} is not known: set --examples=N ({error})"
            ) from error
        raise


def make_plan(
    assembly: Assembly, target: Target, *, price_per_chip_hour: float | None = None
) -> dict:
    """Compiles the step for the target and counts what it needs. Out of memory is an answer.

    Returns:
      Plain data for JSON; see docs/planning.md. Bytes, FLOPs and cycles are of one device, a
      collective's too.
    """
    step = compiling.prepare(assembly, target)
    try:
        compiled, memory = compiling.compile(step), None
    except compiling.OutOfMemory as error:
        compiled, memory = None, error.memory
    memory = memory or compiled.memory
    # The compiler for TPUs refuses what does not fit, the one for GPUs does not.
    fits = compiled is not None and not (target.gpu and memory.peak > target.capacity)
    plan = {
        "fits": fits,
        "topology": target.name,
        "slices": target.slices,
        "chips": target.chips,
        "hosts": target.hosts,
        "devices": len(target.devices),
        "mesh": meshes.sizes_of(step.mesh),
    } | _of_config(assembly, target, step)
    if (matrices := assembly.matrices()) is not None:
        plan["matrices"] = preconditioning.plan_matrices(
            assembly.config.optim, matrices, step.mesh.shape
        )
    plan["memory"] = dataclasses.asdict(memory) | {
        "state": step.state_bytes(),
        "capacity": target.capacity,
    }
    if assembly.config.checkpoint.local:
        plan["local_disk_bytes"] = _local_disk(step, target)
    if not fits:
        return _without_room(plan, assembly, step, memory)
    plan["compile_seconds"] = compiled.seconds
    if target.tpu:
        longest = assembly
        if assembly.config.data.native_tokens:
            longest = max(phases.split_run(assembly), key=lambda alone: alone.step_flops)
        plan |= _on_tpu(plan, longest.model_config, target, step, compiled)
    elif target.gpu:
        plan |= _on_gpu(target, step, compiled.program)
    else:
        step_collectives = collectives.find(compiled.program, slices=target.slices)
        plan["collectives"] = collectives.summary(step_collectives)
    data = assembly.config.data
    if data.size_schedule or data.patch_sizes or len(data.native_lengths) > 1:
        try:
            plan["sizes"] = _by_size(plan, assembly, target)
        except compiling.OutOfMemory as error:  # short images, whose batch has more of them
            return _without_room(plan, assembly, step, error.memory)
    if target.chip:
        plan["run"] = _of_run(plan, target, price_per_chip_hour)
    return plan


def _without_room(
    plan: dict, assembly: Assembly, step: compiling.Step, memory: compiling.Memory
) -> dict:
    """The plan of a step that needs more memory than a device has."""
    of_step = plan["memory"] | dataclasses.asdict(memory)
    missing = memory.peak - of_step["capacity"]
    plan = plan | {"fits": False, "memory": of_step, "missing_bytes": missing}
    return plan | {"advice": _advice(assembly, step, plan)}


def _by_size(plan: dict, assembly: Assembly, target: Target) -> list[dict]:
    """A row for each entry of `config.data.size_schedule`, `patch_sizes` or `native_lengths`: its steps, and what one
    takes. `plan` is of the largest images.
    """
    variants, each = views.variants(assembly.config), phases.split_run(assembly)
    flops = [alone.step_flops for alone in each]
    longest, kept = variants[flops.index(max(flops))], ("flops_per_device", "seconds")
    rows, costs = [], {longest.shapes[0][1]: {name: plan[name] for name in kept if name in plan}}
    steps = _steps_by_size(assembly)
    for variant, alone, number, row in zip(variants, each, flops, steps, strict=True):
        ((_, shape),) = variant.shapes
        if shape not in costs:
            step = compiling.prepare(assembly, target, variant)
            costs[shape] = {"flops_per_device": step.flops / len(target.devices)}
            compiled = compiling.compile(step) if target.chip else None
            if target.tpu:
                on_tpu = _on_tpu(plan | costs[shape], alone.model_config, target, step, compiled)
                costs[shape]["seconds"] = on_tpu["seconds"]
            elif target.gpu:
                costs[shape]["seconds"] = _on_gpu(target, step, compiled.program)["seconds"]
        rows.append(row | {"model_flops_per_step": number} | costs[shape])
    return rows


def _steps_by_size(assembly: Assembly) -> list[dict]:
    """The steps of each of `views.variants`; of patches drawn by their shares as many as are expected."""
    data, total = assembly.config.data, assembly.total_steps
    if data.native_lengths:
        from vit_jax.data import native_batches

        counts = native_batches.Cycle(assembly.config).counts(0, total)
        return [
            {"patches": v.data.native_tokens, "batch_size": v.batch_size, "steps": count}
            for v, count in zip(views.variants(assembly.config), counts, strict=True)
        ]
    if data.patch_sizes:
        from vit_jax.data import patch_sizes

        shares = patch_sizes.find_sizes(data)
        return [{"patch": size, "steps": round(share * total)} for size, share in shares.items()]
    return [
        {"image_size": p.image_size, "first_step": p.first + 1, "steps": p.stop - p.first}
        for p in assembly.phases()
    ]


def _on_tpu(
    plan: dict,
    model: ClassifierConfig,
    target: Target,
    step: compiling.Step,
    compiled: compiling.Compiled,
) -> dict:
    """What takes the time of a step, on TPUs. `model`: for images of the step's size."""
    step_collectives = collectives.find(compiled.program, slices=target.slices)
    tokens = getattr(model, "tokens", None)
    bundles = kernels.count_bundles(kernels.find_kernels(compiled.program), target.name)
    rows = kernels.rows(compiled.program, bundles, step.grids)
    program = dataclasses.replace(
        compiled.program, kernels={row["name"]: row["cycles"] for row in rows}
    )
    counted = cycles.count(program, tokens=tokens)
    rooflines = tpu_roofline.rooflines(program, target)
    return {
        "collectives": collectives.summary(step_collectives),
        "kernels": rows,
        "cycles": counted,
        "conditionals": cycles.conditionals(program),
        "operations": cycles.largest(program, OPERATIONS),
        "rooflines": rooflines,
        "seconds": estimate.step_seconds(
            target,
            operations=sum(row["floor"] for row in rooflines),
            flops=plan["flops_per_device"],
            arguments=compiled.memory.arguments,
            temporaries=compiled.memory.temporaries,
            cycles=sum(counted["all"].values()),
            collectives=step_collectives,
        ),
    }


def _on_gpu(target: Target, step: compiling.Step, program: hlo.Program) -> dict:
    """What takes the time of a step, on GPUs."""
    gpu = target.gpu
    costs = roofline.kernels_of(program, gpu)
    program = roofline.weigh(program, costs)
    hosts = max(1, gpu.per_nvlink // gpu.per_host)  # that NVLink joins
    islands = [device.process_index // hosts for device in step.mesh.devices.flat]
    step_collectives = collectives.find(program, islands=islands)
    counted = roofline.count_parts(program, costs)
    return {
        "collectives": collectives.summary(step_collectives),
        "roofline": counted,
        "operations": roofline.largest_kernels(program, costs, OPERATIONS),
        "seconds": estimate.gpu_seconds(gpu, counted, step_collectives),
    }


def _local_disk(step: compiling.Step, target: Target) -> int:
    """Bytes that the local checkpoints of a host need, of one process for each host: the distinct
    shards on its devices.
    """
    devices, size = len(target.devices) // target.hosts, 0
    for x in jax.tree.leaves(step.state):
        shard = math.prod(x.sharding.shard_shape(x.shape))
        size += x.dtype.itemsize * min(x.size, shard * devices)
    return tiers.disk_bytes(size)


def _of_config(assembly: Assembly, target: Target, step: compiling.Step) -> dict:
    config, model = assembly.config, assembly.model_config
    devices, images = len(target.devices), views.images_per_step(config)
    replicas = meshes.batch_shards(step.mesh)
    with jax.set_mesh(step.mesh):
        remat = choices.remat(model)
    return {
        "choices": choices.summarize(model, step.mesh),
        "model": naming.full_name(model, config.model.name),
        "image_size": config.data.image_size,
        "dtype": model.dtype,
        "remat": remat,
        "unroll": model.unroll,
        "optimizer": config.optim.name,
        "batch_size": images,
        "batch_per_chip": images / target.chips,
        "accumulate": config.accumulate,
        "batch_per_pass": images / replicas / config.accumulate,
        "steps": assembly.total_steps,
        "parameters": registry.count_parameters(model),
        "model_flops_per_step": assembly.step_flops,
        "flops_per_device": step.flops / devices,
    }


def _of_run(plan: dict, target: Target, price: float | None) -> dict:
    """What follows from the time of the steps: (least, expected, most) each."""
    phases = plan.get("sizes", [plan])
    peak = target.chip.peak * target.chips
    flops = sum(phase["model_flops_per_step"] * phase["steps"] for phase in phases)
    rows = {name: [] for name in ("images_per_second", "mfu", "hours", "chip_hours")}
    for basis in ("floor", "expected", "ceiling"):
        seconds = sum(phase["seconds"][basis] * phase["steps"] for phase in phases)
        hours = seconds / 3600
        rows["images_per_second"].append(plan["batch_size"] * plan["steps"] / seconds)
        rows["mfu"].append(flops / seconds / peak)
        rows["hours"].append(hours)
        rows["chip_hours"].append(hours * target.chips)
    # By peak rates: what the same share of a v3 core's peak would take.
    per_chip_hour = target.chip.peak / TPU_V3_CORE / 24
    rows["tpu_v3_core_days"] = [hours * per_chip_hour for hours in rows["chip_hours"]]
    if price is not None:
        rows["cost"] = [hours * price for hours in rows["chip_hours"]]
    return rows


def known_data(data: Data) -> tuple[int | None, int | None]:
    """Classes and training examples of a data set, where they are known without its images."""
    # Digits and scenes of them come with the installation, and a prepared set has a description.
    installed = data.name in ("digits", "digit_scenes", "digit_things")
    if installed or (data.name == "prepared" and data.path):
        source = sources.open_train(data)
        return len(source.classes), len(source)
    if data.name not in EXAMPLES or data.mask_feature:  # The tables count classes of images.
        return None, None
    classes, sizes = CLASSES[data.name], EXAMPLES[data.name]
    try:
        parts = select(data.train_split, sizes, data.name)
    except ConfigError:  # A split that no catalog has: the user made it and knows its size.
        return classes, None
    return classes, sum(stop - start for _, start, stop in parts)


def _advice(assembly: Assembly, step: compiling.Step, plan: dict) -> list[str]:
    """What to change so that it fits, what costs least first."""
    config, capacity = assembly.config, plan["memory"]["capacity"]
    advice = []
    fsdp, state = step.mesh.shape["fsdp"], plan["memory"]["state"]
    if state > capacity / 4:
        wanted = min(64, 2 ** math.ceil(math.log2(fsdp * 4 * state / capacity)))
        if wanted > fsdp and len(step.mesh.devices.flat) % wanted == 0:
            advice.append(
                f"--config.mesh.fsdp={wanted}: the state takes {state / 2**30:.1f} GiB a device, sharded over {fsdp}"
            )
    if plan["remat"] != "full":
        advice.append(
            "--config.model.remat=full: recompute activations, about a third more products"
        )
    room = capacity - state
    if room > 0:
        accumulate = 2 ** math.ceil(math.log2((plan["memory"]["peak"] - state) / room))
        accumulate *= config.accumulate
        images = plan["batch_per_pass"] * config.accumulate
        if accumulate > config.accumulate and images % accumulate == 0:
            advice.append(
                f"--config.accumulate={accumulate}: the batch in parts, one after the other"
            )
    advice.append("--fit: tries these for you; or more chips, or a kind with more memory")
    return advice
