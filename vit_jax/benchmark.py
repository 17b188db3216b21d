"""Throughput of the step, of inference and of the input pipeline, each with the context that makes its figures
mean something.
"""

import dataclasses
import importlib.metadata
import io
import os
import platform
import resource
import statistics
import time

import jax
import numpy as np
from ml_collections import ConfigDict
from PIL import Image, ImageOps

from vit_jax import breakdown as parts
from vit_jax import parallel, topologies
from vit_jax.data import decode, loader, sources
from vit_jax.data.order import batch_indices, crop_draws, example_ids
from vit_jax.data.record import Record
from vit_jax.evaluation.logits import make_logits
from vit_jax.interchange import loading
from vit_jax.models import execution
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly, assemble, check
from vit_jax.training.guards import check_batch
from vit_jax.training.step import compile_train_step


def step(config: ConfigDict, *, steps: int, profile: str = "", breakdown: bool = False) -> dict:
    """Times the train step of a config on images made up once: no input pipeline, no logging.

    Args:
      steps: how many are timed, after two to warm up.
      profile: a folder for a trace of three further steps; none if empty.
      breakdown: also time the step's parts, see `breakdown`.

    Returns:
      Compile time, median and spread of the step time, images/s, model FLOPs (counted analytically,
      matrix products only, times 3 for forward and backward), XLA's own count of FLOPs (which
      counts the body of a scan once), peak memory, and what was chosen for the device.
    """
    assembly, mesh = _assembled(config)
    config = assembly.config
    with jax.set_mesh(mesh):
        like = assembly.abstract_state(mesh)
        batch = _made_up_batch(assembly, parallel.batch_sharding(mesh))
        began = time.perf_counter()
        lowered = compile_train_step(assembly.train_step, states.shardings_of(like), mesh).lower(
            like, batch
        )
        compiled = lowered.compile()
        compile_seconds = time.perf_counter() - began
        state, metrics = states.create(assembly.init, config.seed, like), {}

        def run():
            nonlocal state, metrics
            state, metrics = compiled(state, batch)
            return metrics

        times = parts.seconds(run, steps)
        if profile:
            with jax.profiler.trace(profile):
                parts.seconds(run, 3, warm_up=0)
        where = parts.breakdown(assembly, mesh, state, batch, steps) if breakdown else {}
    median = statistics.median(times)
    flops = 3 * assembly.model_config.flops() * config.batch_size
    peak = topologies.peak_flops(jax.devices()[0].device_kind)
    result = _told(assembly, mesh, times) | {
        "compile_seconds": compile_seconds,
        "model_flops_per_step": flops,
        "model_flops_per_second": flops / median,
        "mfu": flops / median / (peak * mesh.size) if peak else None,
        "xla_flops_per_step": compiled.cost_analysis().get("flops"),
        "peak_memory_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "temporary_memory_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "loss": float(metrics["loss"]),
    }
    if where:
        where["other"] = median - sum(where.values()) + where["transfers"]
        result |= {f"{name}_seconds": value for name, value in where.items()}
    return result | context()


def inference(config: ConfigDict, *, steps: int) -> dict:
    """Times the classification of batches of made-up images that are on the devices already.

    Returns:
      Compile time, median and spread of a batch's time, images/s, and what was chosen.
    """
    assembly, mesh = _assembled(config)
    logits = make_logits(assembly.definition, assembly.model_config, assembly.config.data)
    with jax.set_mesh(mesh):
        params = states.create(assembly.init, 0, assembly.abstract_state(mesh)).params
        images = _made_up_batch(assembly, parallel.batch_sharding(mesh))["image"]
        began = time.perf_counter()
        compiled = jax.jit(logits).lower(params, images).compile()
        compile_seconds = time.perf_counter() - began
        times = parts.seconds(lambda: compiled(params, images), steps)
    return _told(assembly, mesh, times) | {"compile_seconds": compile_seconds} | context()


def input_pipeline(config: ConfigDict, *, steps: int) -> dict:
    """Times the training batches of a config from file to device, with nothing else to do.

    Returns:
      images_per_second; images_per_core_second, the images for each second that a core was busy,
      whatever else the machine does; first_batch_seconds; wait_share, the share of the time that
      was spent waiting for a batch (near 1 here, where nothing is done with it); overhead: what a
      record costs beyond decoding and resizing, microseconds of reading it and of all else; psnr_db:
      how near the crops are to a full decode and an antialiased resize with Pillow; memory.
    """
    config = loading.take_over(config)
    check(config)
    source = sources.open_train(config.data)
    mesh = parallel.make_mesh(config.mesh)
    images = steps * config.batch_size
    seconds, cpu_seconds, first, wait = _time_batches(source, config, mesh, steps)
    return {
        "data": config.data.name,
        "image_size": config.data.image_size,
        "train_crop": config.data.train_crop,
        "batch_size": config.batch_size,
        "batches": steps,
        "decoder": "native" if decode.is_native() else "OpenCV",
        "images_per_second": images / seconds,
        "images_per_core_second": images / cpu_seconds,
        "first_batch_seconds": first,
        "wait_share": wait / seconds,
        "overhead_read_microseconds": 1e6 * _read_seconds(source, config),
        "overhead_else_microseconds": 1e6 * _machinery_seconds(source, config, mesh),
        "psnr_db": _psnr(source, config),
        "resident_bytes_peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "threads": config.data.threads or len(os.sched_getaffinity(0)),
    } | context()


def _time_batches(source, config: ConfigDict, mesh, steps: int) -> tuple[float, ...]:
    """Seconds of `steps` batches, on the clock and of all cores together, of the one before them,
    and of waiting for them.
    """
    began = time.perf_counter()
    sharding = parallel.batch_sharding(mesh)
    with loader.train_batches(
        source, config, sharding, start_step=0, stop_step=steps + 1
    ) as batches:
        jax.block_until_ready(next(batches))
        first, waited = time.perf_counter() - began, batches.wait_seconds
        began, cpu_began = time.perf_counter(), time.process_time()
        for batch in batches:
            jax.block_until_ready(batch)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        return seconds, cpu_seconds, first, batches.wait_seconds - waited


def _read_seconds(source, config: ConfigDict) -> float:
    """What reading a record costs; median of batches."""
    times = []
    for step in range(5):
        ids = batch_indices(config.seed, step, config.batch_size, len(source), config.data.repeats)
        began = time.process_time()
        for index in ids.tolist():
            source[index]
        times.append(time.process_time() - began)
    return statistics.median(times) / config.batch_size


def _machinery_seconds(source, config: ConfigDict, mesh) -> float:
    """What a record costs when there is nothing to read, decode or resize: images of one pixel."""
    tiny = ConfigDict(config)
    tiny.data.image_size, steps = 1, 50
    dots = _Dots(source.classes, source.multi_label)
    return _time_batches(dots, tiny, mesh, steps)[1] / (steps * config.batch_size)


@dataclasses.dataclass(frozen=True)
class _Dots:
    """A million images of one pixel."""

    classes: tuple[str, ...]
    multi_label: bool
    record: Record = Record(np.zeros((1, 1, 3), np.uint8), 0, "dot")

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Record:
        return dataclasses.replace(self.record, label=(0,)) if self.multi_label else self.record


def _psnr(source, config: ConfigDict) -> float | None:
    """The mean peak signal-to-noise ratio of up to 64 crops against a full decode and antialiased
    resize with Pillow, in dB; None where a crop is not merely a part.
    """
    if config.data.train_crop == "pad":
        return None
    positions = np.arange(min(64, len(source)))
    ids = example_ids(config.seed, positions, len(source))
    found = []
    for index, draws in zip(ids.tolist(), crop_draws(config.seed, positions).tolist(), strict=True):
        record = source[index]
        crop = decode.train_crop(record.image, config.data, draws, name=record.name)
        difference = crop.astype(np.float64) - _crop_with_pillow(record, config.data, draws)
        found.append(10 * np.log10(255**2 / max(np.mean(difference**2), 1e-3)))
    return float(np.mean(found))


def _crop_with_pillow(record: Record, config_data, draws: list[float]) -> np.ndarray:
    if isinstance(record.image, bytes):
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(record.image))).convert("RGB")
    else:
        image = Image.fromarray(record.image)
    (top, left, bottom, right), inside = decode.train_part(
        image.height, image.width, config_data, draws
    )
    size, box = (config_data.image_size,) * 2, (left, top, right, bottom)
    if inside:
        return np.asarray(image.crop(box).resize(size, Image.Resampling.BILINEAR))
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR, box=box))


def context() -> dict:
    """Where and with what a figure was measured."""
    device = jax.devices()[0]
    return {
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": importlib.metadata.version("flax"),
    }


def _assembled(config: ConfigDict) -> tuple[Assembly, jax.sharding.Mesh]:
    """A run of the config on data with as many classes as it says, 1,000 if it says none."""
    config = loading.take_over(config)
    check(config)
    classes = config.model.num_classes or 1000
    assembly = assemble(config, num_classes=classes, examples_per_epoch=config.batch_size * 1000)
    mesh = parallel.make_mesh(config.mesh)
    check_batch(config, mesh)
    return assembly, mesh


def _told(assembly: Assembly, mesh: jax.sharding.Mesh, times: list[float]) -> dict:
    config, median = assembly.config, statistics.median(times)
    return {
        "model": config.model.name,
        "image_size": config.data.image_size,
        "dtype": assembly.model_config.dtype,
        "choices": execution.told(assembly.model_config, mesh),
        "batch_size": config.batch_size,
        "images_per_second": config.batch_size / median,
        "step_seconds": median,
        "step_seconds_min": min(times),
        "step_seconds_max": max(times),
        "steps": len(times),
    }


def _made_up_batch(assembly: Assembly, sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    config, classes = assembly.config, assembly.model_config.num_classes
    size = config.data.image_size
    images = random.integers(0, 256, (config.batch_size, size, size, 3), np.uint8)
    labels = random.integers(0, classes, config.batch_size, np.int32)
    return jax.device_put({"image": images, "label": labels}, sharding)
