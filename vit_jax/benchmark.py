"""Throughput of the step and of the input pipeline, each with the context that makes its figures
mean something.
"""

import importlib.metadata
import os
import platform
import statistics
import time

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import parallel, topologies
from vit_jax.data import loader, sources
from vit_jax.interchange import loading
from vit_jax.training import state as states
from vit_jax.training.assembly import assemble, check
from vit_jax.training.guards import check_batch
from vit_jax.training.step import compile_train_step


def step(config: ConfigDict, *, steps: int) -> dict:
    """Times the train step of a config on images made up once: no input pipeline, no logging.

    Returns:
      Compile time, median and spread of the step time, images/s, model FLOPs (counted analytically,
      matrix products only, times 3 for forward and backward), XLA's own count of FLOPs (which
      counts the body of a scan once), peak memory.
    """
    config = loading.take_over(config)
    check(config)
    classes = config.model.num_classes or 1000
    assembly = assemble(config, num_classes=classes, examples_per_epoch=config.batch_size * 1000)
    mesh = parallel.make_mesh(config.mesh)
    check_batch(config, mesh)
    with jax.set_mesh(mesh):
        like = assembly.abstract_state(mesh)
        batch = _made_up_batch(config, classes, parallel.batch_sharding(mesh))
        began = time.perf_counter()
        lowered = compile_train_step(assembly.train_step, states.shardings_of(like), mesh).lower(
            like, batch
        )
        compiled = lowered.compile()
        compile_seconds = time.perf_counter() - began
        state = states.create(assembly.init, config.seed, like)
        times, loss = [], None
        for i in range(steps + 2):  # two to warm up
            began = time.perf_counter()
            state, metrics = compiled(state, batch)
            loss = jax.block_until_ready(metrics["loss"])
            if i >= 2:
                times.append(time.perf_counter() - began)
    median = statistics.median(times)
    flops = 3 * assembly.model_config.flops() * config.batch_size
    peak = topologies.peak_flops(jax.devices()[0].device_kind)
    return {
        "model": config.model.name,
        "image_size": config.data.image_size,
        "dtype": assembly.model_config.dtype,
        "batch_size": config.batch_size,
        "images_per_second": config.batch_size / median,
        "step_seconds": median,
        "step_seconds_min": min(times),
        "step_seconds_max": max(times),
        "steps": steps,
        "compile_seconds": compile_seconds,
        "model_flops_per_step": flops,
        "model_flops_per_second": flops / median,
        "mfu": flops / median / (peak * mesh.size) if peak else None,
        "xla_flops_per_step": compiled.cost_analysis().get("flops"),
        "peak_memory_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "loss": float(loss),
    } | context()


def input_pipeline(config: ConfigDict, *, steps: int) -> dict:
    """Times the training batches of a config from file to device, with nothing else to do; the
    first one apart.
    """
    config = loading.take_over(config)
    check(config)
    source = sources.open_train(config.data)
    sharding = parallel.batch_sharding(parallel.make_mesh(config.mesh))
    began = time.perf_counter()
    with loader.train_batches(
        source, config, sharding, start_step=0, stop_step=steps + 1
    ) as batches:
        jax.block_until_ready(next(batches))
        first = time.perf_counter() - began
        began = time.perf_counter()
        for batch in batches:
            jax.block_until_ready(batch)
        seconds = time.perf_counter() - began
    return {
        "data": config.data.name,
        "image_size": config.data.image_size,
        "batch_size": config.batch_size,
        "batches": steps,
        "first_batch_seconds": first,
        "images_per_second": steps * config.batch_size / seconds,
        "microseconds_per_image": 1e6 * seconds / (steps * config.batch_size),
        "threads": config.data.threads,
    } | context()


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


def _made_up_batch(
    config: ConfigDict, classes: int, sharding: jax.sharding.Sharding
) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    size = config.data.image_size
    images = random.integers(0, 256, (config.batch_size, size, size, 3), np.uint8)
    labels = random.integers(0, classes, config.batch_size, np.int32)
    return jax.device_put({"image": images, "label": labels}, sharding)
