"""Throughput of the input pipeline, from files to devices."""

import dataclasses
import resource
import statistics
import time

import jax
import numpy as np
from ml_collections import ConfigDict
from PIL import Image, ImageOps

from vit_jax.benchmarks.context import context
from vit_jax.config import Config
from vit_jax.data import crops, loader, reading, sources
from vit_jax.data.batches import TrainBatches
from vit_jax.data.decoding import decode, images
from vit_jax.data.order import batch_indices, crop_draws, example_ids
from vit_jax.data.record import Record, soft_labels
from vit_jax.devices import local, meshes
from vit_jax.training.assembly import resolve


def input_pipeline(
    config: ConfigDict, *, steps: int, latency_ms: float = 0.0, copy: bool = False
) -> dict:
    """Times the training batches of a config from file to device, with nothing else to do.

    Args:
      steps: timed batches.
      latency_ms: added to each read in further rounds, in turn with those without.
      copy: instead of being decoded, images are filled with the bytes of their files: what all but
        decoding can do.

    Returns:
      images_per_second; images_per_core_second, the images for each second that a core was busy,
      whatever else the machine does; first_batch_seconds; wait_share, the share of the time that
      was spent waiting for a batch (near 1 here, where nothing is done with it); read_wait, the share
      of the decoding threads' time in which they waited for reads; overhead: what a record costs beyond
      decoding and resizing, microseconds of reading it and of all else; psnr_db: how near the crops are
      to a full decode and an antialiased resize with Pillow; memory. With latency, the same of the
      rounds with it, and the ratio of the images a second.
    """
    config = resolve(config)
    source = sources.open_train(config.data)
    mesh = meshes.make_mesh(vars(config.mesh))
    rounds = [[_time_batches(source, config, mesh, steps, copy)]]
    if latency_ms:
        late = _Late(source, latency_ms / 1000)
        rounds.append([_time_batches(late, config, mesh, steps, copy)])
        rounds[0].append(_time_batches(source, config, mesh, steps, copy))
        rounds[1].append(_time_batches(late, config, mesh, steps, copy))
    images = steps * config.batch_size
    result = {
        "data": config.data.name,
        "image_size": config.data.image_size,
        "train_crop": config.data.train_crop,
        "batch_size": config.batch_size,
        "batches": steps,
        "pixels": "copies of files" if copy else decode.PIXELS,
    } | _summarize(rounds[0], images)
    if latency_ms:
        late = _summarize(rounds[1], images)
        result["latency_ms"] = latency_ms
        result |= {f"latency_{name}": value for name, value in late.items()}
        result["latency_ratio"] = late["images_per_second"] / result["images_per_second"]
    return (
        result
        | {
            "overhead_read_microseconds": 1e6 * _read_seconds(source, config),
            "overhead_else_microseconds": 1e6 * _machinery_seconds(source, config, mesh),
            "psnr_db": _psnr(source, config),
            "resident_bytes_peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "threads": config.data.threads or local.own_cores(),
        }
        | context()
    )


@dataclasses.dataclass(frozen=True)
class _Times:
    """Of batches: seconds on the clock and of all cores together, seconds of the batch before them, and of
    waiting for them; the share of the decoding threads' time that went into waiting for reads; and the
    most that was read ahead.
    """

    seconds: float
    core_seconds: float
    first: float
    waited: float
    read_wait: float
    requests: int
    read_bytes: int


def _time_batches(source, config: Config, mesh, steps: int, copy: bool = False) -> _Times:
    """Times `steps` batches, and the batch before them."""
    began = time.perf_counter()
    sharding = meshes.batch_sharding(mesh)
    rows = loader.local_rows(sharding, config.batch_size)
    host_batches = (_Copies if copy else TrainBatches)(source, config, rows)
    with loader.Batches(
        host_batches, lambda step: step, steps + 1, config.data, sharding
    ) as batches:
        jax.block_until_ready(next(batches))
        first, waited = time.perf_counter() - began, batches.wait_seconds
        batches.read_wait()
        began, cpu_began = time.perf_counter(), time.process_time()
        for batch in batches:
            jax.block_until_ready(batch)
        return _Times(
            time.perf_counter() - began,
            time.process_time() - cpu_began,
            first,
            batches.wait_seconds - waited,
            batches.read_wait(),
            batches.reading.most_requests,
            batches.reading.most_bytes,
        )


def _summarize(rounds: list[_Times], images: int) -> dict:
    seconds = sum(times.seconds for times in rounds)
    images *= len(rounds)
    return {
        "images_per_second": images / seconds,
        "images_per_core_second": images / sum(times.core_seconds for times in rounds),
        "first_batch_seconds": rounds[0].first,
        "wait_share": sum(times.waited for times in rounds) / seconds,
        "read_wait": statistics.fmean(times.read_wait for times in rounds),
        "read_requests_peak": max(times.requests for times in rounds),
        "read_ahead_mib_peak": max(times.read_bytes for times in rounds) / reading.MIB,
    }


class _Late:
    """A source whose reads take longer."""

    def __init__(self, source, seconds: float):
        self._source, self._seconds = source, seconds
        self.classes, self.multi_label = source.classes, source.multi_label
        self.labels, self.soft_labels = source.labels, soft_labels(source)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Record:
        time.sleep(self._seconds)
        return self._source[index]


class _Copies(TrainBatches):
    """Batches with the bytes of the images' files in place of pixels."""

    def cut(self, example, *, variant, draws: list, outs: dict[str, np.ndarray]) -> None:
        content = np.frombuffer(example.image, np.uint8)
        for name, out in outs.items():
            if name.startswith("image"):
                out[...] = np.resize(content, out.shape)


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
    return _time_batches(dots, tiny, mesh, steps).core_seconds / (steps * config.batch_size)


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
    if (
        config.data.train_crop in ("pad", "jitter")
        or config.data.channels != 3
        or config.data.views
    ):
        return None
    positions = np.arange(min(64, len(source)))
    ids = example_ids(config.seed, positions, len(source))
    ratios = []
    for index, draws in zip(ids.tolist(), crop_draws(config.seed, positions).tolist(), strict=True):
        record = source[index]
        crop = decode.train_crop(record.image, config.data, draws, name=record.name)
        difference = crop.astype(np.float64) - _crop_with_pillow(record, config.data, draws)
        ratios.append(10 * np.log10(255**2 / max(np.mean(difference**2), 1e-3)))
    return float(np.mean(ratios))


def _crop_with_pillow(record: Record, config_data, draws: list[float]) -> np.ndarray:
    if isinstance(record.image, bytes):
        kind = images.check_image(record.image, record.name, config_data.max_pixels).kind
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
