"""Reports how a run trains: its metrics, its throughput, and the status line of a terminal."""

import collections
import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import durations, logs, places
from vit_jax.config import Config
from vit_jax.data import loader, views
from vit_jax.devices import chips, local
from vit_jax.training.assembly import Assembly
from vit_jax.training.upkeep import writers as metric_writers
from vit_jax.training.upkeep.clock import Clock

# The kinds of work that take the time of the rest of a run.
_PACE = ("steps", "input", "evaluate", "save")
# Waiting is worth a warning when it takes more than this share of the time, in this many log lines
# in a row, and has added up to this many seconds.
_MUCH_WAITING = 0.1
_LINES = 3
_SECONDS = 10.0
_READING_HELPS = (
    "What helps reading: more memory for it (config.data.read_ahead), a copy on a local disk "
    "(config.data.cache), large files (vit_jax prepare)."
)
_DECODING_HELPS = (
    "What helps decoding: more cores for it (config.data.threads; 0 is all there are), smaller files "
    "(vit_jax prepare --max_side)."
)


# Not averaged: the mean of rates is none that was used, and a count is no mean.
_NOT_AVERAGED = ("learning_rate", "skipped_updates")


class Meter:
    """Collects the metrics of each step on the devices, and reads, completes and writes them on
    demand.

    Attributes:
      skipped: how many updates were skipped before the first step of the window; `None` if that is not known.
    """

    def __init__(self, assembly: Assembly, examples: int, clock: Clock):
        """Begins with `continue_from`.

        Args:
          examples: in the training set.
        """
        self._assembly = assembly
        self._examples = examples
        self._clock = clock
        self._waiting = collections.deque(maxlen=_LINES)
        self._warned = False
        self._host_waited = [clock.waited] * 2  # before the last step, and since
        self._warned_of_objective = False
        peak = chips.peak_flops(jax.devices()[0].device_kind)
        self._peak = peak and peak * jax.device_count()
        self._shown = ()
        self._left = 0.0
        self._shown_at = time.monotonic()
        self._status = logs.status(jax.process_index() == 0)

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Keeps a step's metrics; they are not read yet."""
        self._pending.append(metrics)
        self._host_waited = [self._host_waited[1], self._clock.waited]
        if self._status.due:
            self._show(step)

    def window(self) -> list[dict[str, float]]:
        """The metrics of each step since the last log, which a resumed run needs for the next; waits for the
        devices.
        """
        self._pending = jax.device_get(self._pending)
        return [{n: float(value) for n, value in metrics.items()} for metrics in self._pending]

    def continue_from(
        self,
        step: int,
        writers: metric_writers.MetricWriter,
        window: Sequence[Mapping[str, float]] = (),
        skipped: float | None = None,
    ) -> None:
        """Starts at `step`, or goes back to it and forgets all later metrics.

        Args:
          writers: they write the metrics.
          window: the result of `window` when the checkpoint of `step` was saved.
          skipped: the value of `skipped` at that time; `None` if it is not known.
        """
        self._status.__enter__()
        self._writers = writers
        self.skipped = skipped
        self._pending: list[dict] = _as_on_devices(window)
        self._logged_at = step
        self._before = self._clock.read()
        self._start = (step, self._before)

    def log(self, step: int, batches: loader.Batches, *, with_skipped: bool = False) -> None:
        """Waits for the devices and writes the means since the last time, and the learning rate of this step.

        Args:
          batches: the loader of the steps' batches.
          with_skipped: whether steps with a skipped update count: they show why a run ends.
        """
        scalars = self._read_means(with_skipped)
        now = self._clock.read()
        waited = now["input"] - self._before["input"]
        elapsed = now["steps"] - self._before["steps"] + waited
        seen = batches.images_before(step)
        images = seen - batches.images_before(self._logged_at)
        flops = self._assembly.flops(self._logged_at, step)
        scalars["images_per_second"] = images / elapsed
        scalars["step_seconds"] = elapsed / (step - self._logged_at)
        scalars["input_wait"] = waited / elapsed
        scalars["read_wait"] = batches.read_wait()
        scalars["model_flops_per_second"] = flops / elapsed
        scalars["examples"] = seen
        scalars["epochs"] = seen / self._examples
        scalars["core_hours"] = self._clock.training_seconds * jax.device_count() / 3600
        left = self._assembly.total_steps - step
        scalars["eta_minutes"] = left * self._pace(step, now) / 60
        scalars["goodput"] = now["steps"] / sum(now.values())
        if self._peak:
            scalars["mfu"] = scalars["model_flops_per_second"] / self._peak
        # If the devices wait for data, they were idle before the last step: the time of that step is the time that the
        # host has waited for it.
        on_devices = self._clock.waited - self._host_waited[0]
        self._host_waited[1] = self._clock.waited
        self._warn_of_waiting(scalars, waited, on_devices)
        warning = self._assembly.networks.objective.warning(scalars)
        if warning and not self._warned_of_objective:
            self._warned_of_objective = True
            logging.warning("%s", warning)
        self._shown = (
            f"loss {scalars['loss']:.3g}",
            f"{scalars['images_per_second']:,.0f} images/s",
        )
        self._left = 60 * scalars["eta_minutes"]
        self._shown_at = time.monotonic()
        self._show(step)
        self._writers.write_scalars(step, scalars)
        self._writers.flush()
        self._logged_at = step
        self._before = now

    def _read_means(self, with_skipped: bool) -> dict[str, float]:
        """The means of the metrics since the last log, and of the learning rate the last value; waits for the
        devices. See `log`.
        """
        read = jax.device_get(self._pending)
        self._pending.clear()
        averaged = read
        if self._assembly.config.nonfinite == "skip" and not with_skipped:
            averaged = _without_skipped(read, self.skipped) or read
        last = read[-1]
        self.skipped = float(last["skipped_updates"])
        means = {}
        for name in last:
            values = [metrics[name] for metrics in averaged]
            means[name] = float(np.mean(values))
        for name in _NOT_AVERAGED:
            means[name] = float(last[name])
        return means

    def _pace(self, step: int, now: dict[str, float]) -> float:
        """Seconds for each step since this process began to train, with all that comes between."""
        first, then = self._start
        seconds = [now[kind] - then[kind] for kind in _PACE]
        return sum(seconds) / max(step - first, 1)

    def _warn_of_waiting(
        self, scalars: Mapping[str, float], waited: float, on_devices: float
    ) -> None:
        """Warns once that the host is too slow, where that lasts.

        Args:
          scalars: since the last log.
          waited: seconds for input since then.
          on_devices: seconds of a step, if the devices were idle before it.
        """
        much = scalars["input_wait"] > _MUCH_WAITING
        self._waiting.append((waited if much else 0.0, on_devices))
        seconds, step_seconds = zip(*self._waiting, strict=True)
        lasts = len(seconds) == _LINES and all(seconds)
        if lasts and sum(seconds) > _SECONDS and not self._warned:
            self._warned = True
            possible = views.images_per_step(self._assembly.config) / min(step_seconds)
            self._log_waiting(scalars, possible)

    def _log_waiting(self, scalars: Mapping[str, float], possible: float) -> None:
        """Logs the warning. Args: `possible`: images/s of devices that do not wait for data."""
        cores = local.own_cores()
        threads = self._assembly.config.data.threads or cores
        made = scalars["images_per_second"] / jax.process_count()
        taken = possible / jax.process_count()
        decoding = 1 - scalars["read_wait"]
        helps = _READING_HELPS if scalars["read_wait"] > 0.5 else _DECODING_HELPS
        logging.warning(
            "The step waits for data %.0f %% of the time: %d decoding threads on %d cores for %s make about "
            "%s images/s of the %s that this step takes. They decode %.0f %% of their time and wait for reads in "
            "the rest. %s 'vit_jax benchmark input' shows what the host can do.",
            100 * scalars["input_wait"], threads, cores, local.device_text(jax.local_devices()),
            f"{made:,.0f}", f"{taken:,.0f}", 100 * decoding, helps,
        )  # fmt: skip

    def close(self) -> None:
        """Ends the status line."""
        self._status.__exit__()

    def _show(self, step: int) -> None:
        """Draws the status from the values that were logged last: nothing is read from the devices."""
        total = self._assembly.total_steps
        share = step / total
        parts = [f"step {step:,} of {total:,} ({share:.0%})"]
        if self._shown:
            left = max(self._left - (time.monotonic() - self._shown_at), 0)
            parts += [f"{durations.duration_text(left)} left", *self._shown]
        self._status.show(*parts)


def _without_skipped(window: Sequence[Mapping], before: float | None) -> list[Mapping]:
    """The metrics of the steps with an update that was made.

    Args:
      before: how many updates were skipped before the first of these steps; `None` if that is not known.
    """
    made = []
    for metrics in window:
        count = float(metrics["skipped_updates"])
        is_made = np.isfinite(metrics["loss"]) if before is None else count == before
        if is_made:
            made.append(metrics)
        before = count
    return made


def _as_on_devices(window: Sequence[Mapping[str, float]]) -> list[dict[str, np.float32]]:
    """A window that was saved, in the type of the metrics on the devices."""
    return [{name: np.float32(value) for name, value in metrics.items()} for metrics in window]


def make_writers(workdir: epath.Path, config: Config, step: int) -> metric_writers.Writers:
    """Console, JSON lines, TensorBoard and Weights & Biases of the first process; all other processes write nothing.
    The run continues from `step`.
    """
    if jax.process_index():
        return metric_writers.Writers()
    folder = pathlib.Path(workdir)
    metrics = "metrics.jsonl"
    if places.in_bucket(workdir):
        folder = pathlib.Path(tempfile.mkdtemp())
        with contextlib.suppress(FileNotFoundError):
            (folder / metrics).write_bytes(places.read_bytes(workdir / metrics))
    writers = [metric_writers.ConsoleWriter(), metric_writers.JsonLinesWriter(folder / metrics)]
    if config.log.tensorboard:
        writers.append(metric_writers.TensorBoardWriter(folder / "tensorboard", step))
    if config.log.wandb:
        from vit_jax.training.upkeep.wandb_writer import WandbWriter

        fields = dataclasses.asdict(config)
        writers.append(WandbWriter(config.log.wandb, workdir, folder, fields))
    if places.in_bucket(workdir):
        writers.append(metric_writers.BucketWriter(folder, workdir))
    return metric_writers.Writers(*writers)
