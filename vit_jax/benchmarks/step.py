"""Throughput of the train step and of inference, on images made up once."""

import statistics
import time
from collections.abc import Iterable

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base import places
from vit_jax.benchmarks import breakdown as timing
from vit_jax.benchmarks.context import context
from vit_jax.compute import attend, choices
from vit_jax.devices import chips
from vit_jax.evaluation import maps
from vit_jax.evaluation.forward import make_forward
from vit_jax.models import naming
from vit_jax.models.contract import GRID
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly, assemble, make_mesh, resolve
from vit_jax.training.guards import check_batch, make_deterministic
from vit_jax.training.step_programs import compile_train_step


def step(
    config: ConfigDict,
    *,
    steps: int,
    against: ConfigDict | None = None,
    profile: str = "",
    breakdown: bool = False,
) -> dict:
    """Times the train step of a config on images made up once: no input pipeline, no logging.

    Args:
      steps: how many are timed, after two to warm up.
      against: another config, whose steps are timed in turn with these, so that what else the machine
        does falls on both alike.
      profile: a folder for a trace of three further steps; none if empty.
      breakdown: also time the step's parts, see `breakdown`.

    Returns:
      Compile time, median and spread of the step time, images/s, model FLOPs (counted analytically,
      matrix products only, times 3 for forward and backward), XLA's own count of FLOPs (which
      counts the body of a scan once), peak memory, and what was chosen for the device; of the other
      config time and FLOPs of an image, and what this one's are over them.
    """
    if profile:
        profile = str(places.locate(profile, "--profile", instead="copy the trace afterwards"))
    timed = Timed(config)
    others = [Timed(against)] if against is not None else []
    times, *others_times = timing.seconds_in_turn([timed.run, *(o.run for o in others)], steps)
    if profile:
        with jax.profiler.trace(profile):
            timing.seconds(timed.run, 3, warm_up=0)
    assembly, mesh, compiled = timed.assembly, timed.mesh, timed.compiled
    where = {}
    if breakdown:
        with jax.set_mesh(mesh):
            where = timing.breakdown(assembly, mesh, timed.state, timed.batch, steps)
    median = statistics.median(times)
    flops = assembly.step_flops
    peak = chips.peak_flops(jax.devices()[0].device_kind)
    result = _summary(assembly, mesh, times, timed.attention, timing.count_images(timed.batch)) | {
        "compile_seconds": timed.compile_seconds,
        "model_flops_per_step": flops,
        "model_flops_per_second": flops / median,
        "mfu": flops / median / (peak * mesh.size) if peak else None,
        "xla_flops_per_step": compiled.cost_analysis().get("flops"),
        "peak_memory_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "temporary_memory_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "loss": float(timed.metrics["loss"]),
    }
    if where:
        where["other"] = median - sum(where.values()) + where["transfers"]
        result |= {f"{name}_seconds": value for name, value in where.items()}
    for other, other_times in zip(others, others_times, strict=True):
        result |= _compared(timed, times, other, other_times)
    return result | context()


class Timed:
    """The train step of a config, compiled, with a state and a batch for it."""

    def __init__(self, config: ConfigDict):
        self.assembly, self.mesh = assembled(config)
        with jax.set_mesh(self.mesh):
            like = self.assembly.abstract_state(self.mesh)
            self.batch = made_up_batch(self.assembly, self.mesh)
            began = time.perf_counter()
            jitted = compile_train_step(
                self.assembly.train_step, states.shardings_of(like), self.mesh
            )
            with attend.record() as self.attention:
                self.compiled = jitted.lower(like, self.batch).compile()
            self.compile_seconds = time.perf_counter() - began
            self.state = states.create(self.assembly.init, self.assembly.config.seed, like)
        self.metrics = {}

    def run(self) -> dict:
        """The next step; its metrics."""
        self.state, self.metrics = self.compiled(self.state, self.batch)
        return self.metrics


def _compared(first: Timed, times: list[float], other: Timed, other_times: list[float]) -> dict:
    """Time and FLOPs of an image of `first` over those of the other."""

    def of_an_image(timed: Timed, seconds: list[float]) -> tuple[float, float]:
        images = timing.count_images(timed.batch)
        return statistics.median(seconds) / images, timed.assembly.step_flops / images

    (seconds, flops), (other_seconds, other_flops) = (
        of_an_image(first, times), of_an_image(other, other_times),
    )  # fmt: skip
    return {
        "against_model": naming.full_name(
            other.assembly.model_config, other.assembly.config.model.name
        ),
        "against_objective": other.assembly.config.objective.name,
        "against_image_seconds": other_seconds,
        "against_image_flops": other_flops,
        "seconds_over_against": seconds / other_seconds,
        "flops_over_against": flops / other_flops,
    }


def inference(config: ConfigDict, *, steps: int) -> dict:
    """Times what a model answers to batches of made-up images that are on the devices already: classes, or maps.

    Returns:
      Compile time, median and spread of a batch's time, images/s, what was chosen, and the bytes of the
      weights and of a batch's arrays by the compiler's count.
    """
    assembly, mesh = assembled(config)
    data = assembly.config.data
    forward = make_forward(assembly.definition, assembly.model_config, data)
    answers = maps.make_answers(assembly.networks, data)
    gives_maps = assembly.networks.objective.predicts_with_modules
    with jax.set_mesh(mesh):
        state = states.create(assembly.init, 0, assembly.abstract_state(mesh))
        weights = state.weights(), *([state.module_weights()] if gives_maps else [])
        images = made_up_batch(assembly, mesh)["image"]
        began = time.perf_counter()
        jitted = jax.jit(answers if gives_maps else lambda w, images: forward(w, images).logits)
        with attend.record() as attention:
            compiled = jitted.lower(*weights, images).compile()
        compile_seconds = time.perf_counter() - began
        times = timing.seconds(lambda: compiled(*weights, images), steps)
    memory = compiled.memory_analysis()
    needs = {
        "compile_seconds": compile_seconds,
        "weights_bytes": sum(x.nbytes for x in jax.tree.leaves(weights)),
        "batch_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes + images.nbytes,
    }
    return _summary(assembly, mesh, times, attention, len(images)) | needs | context()


def assembled(config: ConfigDict) -> tuple[Assembly, jax.sharding.Mesh]:
    """A run of the config on data with as many classes as it says, 1,000 (of masks 150) if it says none."""
    config = resolve(config)
    make_deterministic(config)
    usual = 150 if objectives.find_objective(config.objective)[0].needs_masks else 1000
    classes = config.model.num_classes or usual
    assembly = assemble(config, num_classes=classes, examples_per_epoch=config.batch_size * 1000)
    mesh = make_mesh(config)
    check_batch(config, mesh)
    return assembly, mesh


def _summary(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    times: list[float],
    attention: Iterable[str],
    images: int,
) -> dict:
    config, median = assembly.config, statistics.median(times)
    return {
        "model": naming.full_name(assembly.model_config, config.model.name),
        "image_size": config.data.image_size,
        "dtype": assembly.model_config.dtype,
        "choices": choices.summarize(assembly.model_config, mesh, attention),
        "batch_size": images,
        "images_per_second": images / median,
        "step_seconds": median,
        "step_seconds_min": min(times),
        "step_seconds_max": max(times),
        "steps": len(times),
    }


def made_up_batch(assembly: Assembly, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """A batch of random images, and whatever else the run's batches have, on the devices of the mesh."""
    random = np.random.default_rng(0)
    labels = 2 if assembly.multi_label else assembly.num_classes

    def draw(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        if name == GRID:  # all patches of the images
            values = np.resize([1, batch["image"].shape[1]], like.shape)
            return jax.device_put(values.astype(like.dtype), like.sharding)
        whole = np.int32 if like.dtype == np.float32 else like.dtype
        highest = labels if name == "label" else 256
        values = random.integers(0, highest, like.shape, whole)
        return jax.device_put(values.astype(like.dtype), like.sharding)

    batch = assembly.abstract_batch(mesh)
    return {name: draw(name, like) for name, like in batch.items()}
