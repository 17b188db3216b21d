"""Throughput of the input pipeline, from files to devices."""

import dataclasses
import os
import resource
import statistics
import time

import jax
import numpy as np
from ml_collections import ConfigDict
from PIL import Image, ImageOps

from vit_jax.benchmarks.context import context
from vit_jax.config import Config
from vit_jax.data import crops, decode, images, loader, sources
from vit_jax.data.order import batch_indices, crop_draws, example_ids
from vit_jax.data.record import Record
from vit_jax.devices import meshes
from vit_jax.training.assembly import resolve


def input_pipeline(config: ConfigDict, *, steps: int) -> dict:
    """Times the training batches of a config from file to device, with nothing else to do.

    Returns:
      images_per_second; images_per_core_second, the images for each second that a core was busy,
      whatever else the machine does; first_batch_seconds; wait_share, the share of the time that
      was spent waiting for a batch (near 1 here, where nothing is done with it); overhead: what a
      record costs beyond decoding and resizing, microseconds of reading it and of all else; psnr_db:
      how near the crops are to a full decode and an antialiased resize with Pillow; memory.
    """
    config = resolve(config)
    source = sources.open_train(config.data)
    mesh = meshes.make_mesh(vars(config.mesh))
    images = steps * config.batch_size
    seconds, cpu_seconds, first, wait = _time_batches(source, config, mesh, steps)
    return {
        "data": config.data.name,
        "image_size": config.data.image_size,
        "train_crop": config.data.train_crop,
        "batch_size": config.batch_size,
        "batches": steps,
        "pixels": decode.PIXELS,
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


def _time_batches(source, config: Config, mesh, steps: int) -> tuple[float, ...]:
    """Seconds of `steps` batches, on the clock and of all cores together, of the one before them,
    and of waiting for them.
    """
    began = time.perf_counter()
    sharding = meshes.batch_sharding(mesh)
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


def _read_seconds(source, config: Config) -> float:
    """Processor seconds of reading a record; the median of batches."""
    times = []
    for step in range(5):
        ids = batch_indices(config.seed, step, config.batch_size, len(source), config.data.repeats)
        began = time.process_time()
        for index in ids.tolist():
            source[index]
        times.append(time.process_time() - began)
    return statistics.median(times) / config.batch_size


def _machinery_seconds(source, config: Config, mesh) -> float:
    """Processor seconds of a record when there is nothing to read, decode or resize: images of one
    pixel.
    """
    steps = 50
    data = dataclasses.replace(config.data, image_size=1, views=())
    tiny = dataclasses.replace(config, data=data)
    dot = Record(np.zeros((1, 1, config.data.channels), np.uint8), 0, "dot")
    dots = _Dots(source.classes, source.multi_label, dot)
    return _time_batches(dots, tiny, mesh, steps)[1] / (steps * config.batch_size)


@dataclasses.dataclass(frozen=True)
class _Dots:
    """A million images of one pixel."""

    classes: tuple[str, ...]
    multi_label: bool
    record: Record

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Record:
        return dataclasses.replace(self.record, label=(0,)) if self.multi_label else self.record


def _psnr(source, config: Config) -> float | None:
    """The mean peak signal-to-noise ratio of up to 64 crops against a full decode and antialiased
    resize with Pillow, in dB; None where a crop is not merely a part, or has no colours, or there are
    several views.
    """
    if config.data.train_crop == "pad" or config.data.channels != 3 or config.data.views:
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
        kind = images.check(record.image, record.name, config_data.max_pixels).kind
        image = ImageOps.exif_transpose(images.open_with_pillow(record.image, kind)).convert("RGB")
    else:
        image = Image.fromarray(record.image)
    (top, left, bottom, right), inside = crops.train_part(
        image.height, image.width, config_data, draws
    )
    method = Image.Resampling[config_data.interpolation.upper()]
    size, box = crops.shape(config_data)[1::-1], (left, top, right, bottom)
    if inside:
        return np.asarray(image.crop(box).resize(size, method))
    return np.asarray(image.resize(size, method, box=box))
