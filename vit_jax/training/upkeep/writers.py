"""Writers of metrics: console, JSON lines, TensorBoard, Weights & Biases. The interface is CLU's `MetricWriter`; CLU's
module is not used because it needs TensorFlow.
"""

import concurrent.futures
import functools
import json
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import BinaryIO, NamedTuple

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import durations, logs, places

# The scalars of a step that a line on the console shows, with their formats.
_SHOWN = {
    "loss": "loss {:.3g}",
    "accuracy": "accuracy {:.1%}",
    "learning_rate": "learning rate {:.3g}",
    "images_per_second": "{:,.0f} images/s",
    "input_wait": "{:.0%} waiting for data",
    "read_wait": "{:.0%} of decoding waiting for reads",
    "mfu": "MFU {:.1%}",
}


# The groups of TensorBoard's cards, by scalar. Scalars that are not listed are in the group of their name, as in
# `eval/accuracy`, or else in `train`.
_GROUPS = {
    "learning_rate": "optim",
    "gradient_norm": "optim",
    "update_norm": "optim",
    "parameter_norm": "optim",
    "skipped_updates": "optim",
    "images_per_second": "speed",
    "step_seconds": "speed",
    "input_wait": "speed",
    "read_wait": "speed",
    "model_flops_per_second": "speed",
    "mfu": "speed",
    "seconds": "speed",
    "goodput": "speed",
    "examples": "progress",
    "epochs": "progress",
    "core_hours": "progress",
    "eta_minutes": "progress",
}


class Histogram(NamedTuple):
    """How many values lie where.

    Attributes:
      counts: (n,) values in each bin.
      edges: (n + 1,) of the bins, the smallest and the largest value first and last.
      sum, sum_squares: of the values.
    """

    counts: np.ndarray
    edges: np.ndarray
    sum: float
    sum_squares: float


class MetricWriter:
    """The part of CLU's interface that training uses, except histograms, which are counted on the devices. Each method
    does nothing here; a writer overrides the methods that it supports.
    """

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def write_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Of each name (n, H, W, 1 or 3) uint8."""

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None: ...

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Of each name Markdown."""

    def rewind(self, step: int) -> None:
        """The run goes back to this step: it writes the metrics of later ones again."""

    def flush(self) -> None: ...

    def sync(self) -> None:
        """Returns when nothing that was written so far can be lost with this process; from any thread."""

    def close(self) -> None: ...


class ConsoleWriter(MetricWriter):
    """One line of the scalars that a person follows, with units and three figures; all scalars are in the files."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        shown = []
        for name, form in _SHOWN.items():
            if name in scalars:
                shown.append(form.format(scalars[name]))
        for name, value in scalars.items():
            if name.startswith("eval/"):
                is_share = name.endswith("accuracy")
                number = f"{value:.1%}" if is_share else logs.number_text(value, 3)
                shown.append(f"{name} {number}")
        if scalars.get("eta_minutes"):
            shown.append(f"{durations.duration_text(60 * scalars['eta_minutes'])} left")
        if shown:
            logging.info("step %d  %s", step, "  ".join(shown))

    def flush(self) -> None:
        sys.stderr.flush()

    close = flush


class JsonLinesWriter(MetricWriter):
    """A JSON object per step, appended: {"step": …, name: number, …}. Numbers that are not finite
    become null, as JSON has none.
    """

    def __init__(self, path: pathlib.Path, marks: Mapping = MappingProxyType({})):
        """Opens the file, and makes it if it is not there.

        Args:
          marks: further fields of each line.
        """
        self._file = path.open("a+b")
        self._marks = dict(marks)
        _drop_cut_line(self._file)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        line = {"step": step, **self._marks}
        for name, value in scalars.items():
            line[name] = value if math.isfinite(value) else None
        text = json.dumps(line) + "\n"
        self._file.write(text.encode())

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _drop_cut_line(file: BinaryIO) -> None:
    """Ends a file of lines after its last complete line: a process that was killed may have left a part of a line, and
    the next line would be appended to it.
    """
    end = file.seek(0, 2)
    position = end
    while position > 0:
        start = max(position - 4096, 0)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position < end:
        file.truncate(position)


@functools.cache
def _tensorboard() -> ModuleType:
    """tensorboardX without its optional imports, which are not needed to write arrays of NumPy to a local file: a run
    starts 2 s earlier.
    """
    blocked = [n for n in ("torch", "boto3", "google.cloud.storage") if n not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # pyrefly: ignore[no-matching-overload]
    try:
        import tensorboardX.event_file_writer
        import tensorboardX.proto.event_pb2
    finally:
        for name in blocked:
            del sys.modules[name]
    return tensorboardX


def tag(name: str) -> str:
    """The name in TensorBoard of a scalar of metrics.jsonl.

    >>> tag("loss"), tag("mfu"), tag("eval/accuracy")
    ('train/loss', 'speed/mfu', 'eval/accuracy')
    """
    return name if "/" in name else f"{_GROUPS.get(name, 'train')}/{name}"


class TensorBoardWriter(MetricWriter):
    """TensorBoard event files, without TensorFlow.

    Not with tensorboardX's `SummaryWriter`: its thread dies when the disk is full, and writers then
    wait for it forever.
    """

    def __init__(self, folder: pathlib.Path, after: int = -1):
        """Appends to the folder.

        Args:
          after: the step that a run continues from: readers forget the events of later steps; -1: none.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._prefix = str(folder / "events")
        self._events = None
        self._after = after

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        scalar = _tensorboard().summary.scalar
        self._write(step, [scalar(tag(name), value) for name, value in scalars.items()])

    def write_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        summary = _tensorboard().summary
        self._write(
            step,
            [
                summary.image(f"{name}/{number}", image, dataformats="HWC")
                for name, examples in images.items()
                for number, image in enumerate(examples)
            ],
        )

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        make = _tensorboard().summary.histogram_raw
        summaries = []
        for name, histogram in histograms.items():
            edges = histogram.edges
            counts = histogram.counts
            summaries.append(
                make(
                    name,
                    min=edges[0],
                    max=edges[-1],
                    num=counts.sum(),
                    sum=float(histogram.sum),
                    sum_squares=float(histogram.sum_squares),
                    bucket_limits=edges[1:],
                    bucket_counts=counts,
                )
            )
        self._write(step, summaries)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        text = _tensorboard().summary.text
        self._write(step, [text(name, content) for name, content in texts.items()])

    def _write(self, step: int, summaries: list) -> None:
        # A file that could not be written to the end is left behind; TensorBoard reads all files. By its seconds
        # alone, one that is begun soon afterwards would have the same name, and replace it.
        library = _tensorboard()
        event = library.proto.event_pb2.Event
        events = self._events
        self._events = None
        if events is None:
            name = f".{time.time_ns()}"
            events = library.event_file_writer.EventsWriter(self._prefix, name)
        if self._after >= 0:
            # Events after the checkpoint that a run continues from are written again.
            session = library.proto.event_pb2.SessionLog
            start = session(status=session.START)
            restart = event(step=self._after + 1, wall_time=time.time(), session_log=start)
            events.write_event(restart)
            self._after = -1
        for part in summaries:
            events.write_event(event(step=step, wall_time=time.time(), summary=part))
        events.flush()
        self._events = events

    def rewind(self, step: int) -> None:
        """Readers forget the events of later steps."""
        self._after = step

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        if self._events:
            self._events.close()


class BucketWriter(MetricWriter):
    """Copies a folder of growing files to a bucket, where files cannot be appended to: at most once a minute, in a
    separate thread, so that a bucket that answers late does not hold up training; for each checkpoint; and at the end.
    The folder is removed then.
    """

    SECONDS = 60

    def __init__(self, folder: pathlib.Path, bucket: epath.Path):
        self._folder = folder
        self._bucket = bucket
        self._sizes: dict[pathlib.Path, int] = {}
        self._due = time.monotonic()
        self._copies = concurrent.futures.ThreadPoolExecutor(1, "vit_jax-metrics")
        self._copy: concurrent.futures.Future | None = None

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes nothing: `flush` copies the files of the other writers."""

    def flush(self) -> None:
        if time.monotonic() < self._due or (self._copy and not self._copy.done()):
            return
        self._due = time.monotonic() + self.SECONDS
        before = self._copy
        self._copy = self._copies.submit(self._copy_all)
        if before:
            before.result()  # raises the error of the last copy, if it failed

    def sync(self) -> None:
        self._copies.submit(self._copy_all).result()

    def close(self) -> None:
        self._copies.shutdown()
        self._copy_all()
        shutil.rmtree(self._folder)

    def _copy_all(self) -> None:
        self._sizes = copy_grown(self._folder, self._bucket, self._sizes)


def copy_grown(
    folder: pathlib.Path, bucket: epath.Path, sizes: Mapping[pathlib.Path, int]
) -> dict[pathlib.Path, int]:
    """Copies the files in `folder` that have another size than in `sizes`; returns their sizes."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    now = {file: file.stat().st_size for file in files}
    for file, size in now.items():
        if sizes.get(file) != size:
            copy = bucket / file.relative_to(folder).as_posix()
            places.write_whole(copy, file.read_bytes())  # by now it may be larger
    return now


class Writers(MetricWriter):
    """Several writers as one. If metrics cannot be written, that is logged; they are lost, and the run continues."""

    def __init__(self, *writers: MetricWriter):
        self._writers = writers

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._each("write_scalars", step, scalars)

    def write_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        self._each("write_images", step, images)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        finite = {
            n: histogram
            for n, histogram in histograms.items()
            if np.isfinite(histogram.sum_squares)
        }
        self._each("write_histograms", step, finite)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._each("write_texts", step, texts)

    def rewind(self, step: int) -> None:
        self._each("rewind", step)

    def flush(self) -> None:
        self._each("flush")

    def sync(self) -> None:
        self._each("sync")

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *arguments) -> None:
        for writer in self._writers:
            try:
                getattr(writer, method)(*arguments)
            except OSError as error:
                logging.error("metrics cannot be written: %s", error)
