"""What a run tells while it trains: metrics, throughput, progress bar, trace."""

import contextlib
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
import tqdm
from absl import logging
from etils import epath

from vit_jax.base import paths, patterns
from vit_jax.base.errors import UserError
from vit_jax.config import Log
from vit_jax.devices import chips
from vit_jax.training import writers as metric_writers
from vit_jax.training.assembly import Assembly
from vit_jax.training.state import TrainState

_SHOWN = (
    "loss",
    "accuracy",
    "learning_rate",
    "images_per_second",
    "input_wait",
    "mfu",
    "eta_minutes",
    "eval/accuracy",
    "eval/loss",
)


_MUCH_WAITING = 0.1  # the share of a step that is worth a word


class NonFiniteError(UserError):
    """Loss or gradients stopped being numbers."""


class Lost(NonFiniteError):
    """The same, where the run may go back to a checkpoint.

    Attributes:
      step: the first bad one.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Meter:
    """Collects the metrics of each step on the devices, and reads, completes and writes them when
    asked to.
    """

    def __init__(
        self,
        assembly: Assembly,
        source,
        writers: metric_writers.MetricWriter,
        seconds: float,
        start_step: int,
    ):
        """seconds: of training before this process started."""
        self._assembly, self._writers, self._examples = assembly, writers, len(source)
        self._pending: list[dict] = []
        self._began = self._since = time.monotonic()
        self._seconds_before, self._wait_before, self._logged_at = seconds, 0.0, start_step
        self._told_of_waiting = False
        # A training step costs three forward passes: one forward, two backward.
        self._step_flops = 3 * assembly.networks.objective.flops() * assembly.config.batch_size
        peak = chips.peak_flops(jax.devices()[0].device_kind)
        self._peak = peak and peak * jax.device_count()
        self._bar = tqdm.tqdm(
            total=assembly.total_steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            disable=jax.process_index() > 0 or not sys.stderr.isatty(),
        )

    @property
    def seconds(self) -> float:
        """Of training, with all that belongs to it, over all restarts."""
        return self._seconds_before + time.monotonic() - self._began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in here does not count as time of steps."""
        began = time.monotonic()
        yield
        self._since += time.monotonic() - began

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Keeps a step's metrics; they are not read yet."""
        self._pending.append(metrics)
        self._bar.update(step - self._bar.n)

    def rewind(self, step: int) -> None:
        """Forgets what came after `step`, with which the run goes on."""
        self._pending.clear()
        self._logged_at, self._since, self._wait_before = step, time.monotonic(), 0.0
        self._bar.update(step - self._bar.n)

    def log(self, step: int, state: TrainState, batches, **more: float) -> None:
        """Waits for the devices and writes the means since the last time, and `more` scalars.
        Raises `NonFiniteError`, see `check_health`.
        """
        read = jax.device_get(self._pending)
        self._pending.clear()
        self.check_health(state)
        scalars = {name: float(np.mean([metrics[name] for metrics in read])) for name in read[0]}
        config, now = self._assembly.config, time.monotonic()
        steps, elapsed = step - self._logged_at, now - self._since
        speed = steps / elapsed
        scalars |= {
            "images_per_second": speed * config.batch_size,
            "step_seconds": elapsed / steps,
            "input_wait": (batches.wait_seconds - self._wait_before) / elapsed,
            "model_flops_per_second": speed * self._step_flops,
            "examples": step * config.batch_size,
            "epochs": step * config.batch_size / self._examples,
            "core_hours": self.seconds * jax.device_count() / 3600,
            "eta_minutes": (self._assembly.total_steps - step) / speed / 60,
        }
        if scalars["input_wait"] > _MUCH_WAITING and steps > 1 and not self._told_of_waiting:
            self._told_of_waiting = True
            logging.warning(
                "The step waits for data %.0f %% of the time: the host makes fewer images than the devices "
                "could take. What helps: more cores for it (config.data.threads; 0 is all there are), "
                "smaller files (vit_jax prepare --max_side), the compiled decoder; "
                "'vit_jax benchmark input' shows what it can do, and with which decoder.",
                100 * scalars["input_wait"],
            )
        scalars |= more
        if self._peak:
            scalars["mfu"] = scalars["model_flops_per_second"] / self._peak
        self._bar.set_postfix_str(
            f"loss {scalars['loss']:.3g}, {scalars['images_per_second']:.0f} images/s"
        )
        self.write(step, scalars)
        self._since, self._wait_before, self._logged_at = (
            time.monotonic(),
            batches.wait_seconds,
            step,
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Writes scalars wherever metrics go."""
        with self._bar.external_write_mode(file=sys.stderr):
            self._writers.write_scalars(step, scalars)
            self._writers.flush()

    def check_health(self, state: TrainState) -> None:
        """Raises `NonFiniteError` if the config says that what happened since the last look is too
        much to go on.
        """
        config = self._assembly.config
        health = jax.device_get(state.health)
        if health.first_bad_step < 0:
            return
        names = zip(patterns.names(state.params), health.bad_tensors, strict=True)
        bad = [name for name, is_bad in names if is_bad]
        others = " and others" if len(bad) > 5 else ""
        what = "the loss is not finite"
        if bad:
            what = f"loss or gradients are not finite, in the gradients of {', '.join(bad[:5])}{others}"
        elif config.spike.factor:
            what += f", or above {config.spike.factor:g} times its mean of {health.mean_loss:.4g}"
        told = f"step {health.first_bad_step}: {what}. The update was not made."
        if config.nonfinite == "rollback":
            raise Lost(told, int(health.first_bad_step))
        if config.nonfinite == "stop":
            raise NonFiniteError(
                f"{told} The last checkpoint is good. "
                "Try a lower config.optim.lr, a longer warm-up, or config.nonfinite=skip or rollback"
            )
        if health.in_a_row >= config.max_skips:
            raise NonFiniteError(
                f"{health.in_a_row} updates in a row were skipped, as config.nonfinite=skip says; "
                f"lastly {what}. config.max_skips = {config.max_skips}"
            )
        if health.skipped and jax.process_index() == 0:
            logging.warning(
                "%d updates skipped so far, the first at step %d; lastly %s",
                health.skipped,
                health.first_bad_step,
                what,
            )

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.close()


class Profiler:
    """Records a trace of the steps `first` to `last`, for TensorBoard or Perfetto."""

    def __init__(self, steps: tuple[int, int] | tuple[()], folder: epath.Path):
        self._first, self._last = steps or (0, 0)
        self._folder = folder
        # JAX writes traces to local folders only.
        self._local = tempfile.mkdtemp() if steps and paths.in_bucket(folder) else None

    def before(self, step: int) -> None:
        """Starts the trace if this is its first step."""
        if step == self._first:
            jax.profiler.start_trace(self._local or str(self._folder))

    def after(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Ends the trace if this was its last step, when the devices have done it."""
        if step == self._last:
            jax.block_until_ready(metrics)
            jax.profiler.stop_trace()
            if self._local:
                metric_writers.copy_grown(pathlib.Path(self._local), self._folder, {})
                shutil.rmtree(self._local)
            logging.info("trace of steps %d to %d: %s", self._first, self._last, self._folder)


def make_writers(workdir: epath.Path, config: Log) -> metric_writers.Writers:
    """Console, JSON lines and TensorBoard of the first process; the others write nothing.

    Args:
      config: the section `log`.
    """
    if jax.process_index():
        return metric_writers.Writers()
    folder, metrics = pathlib.Path(workdir), "metrics.jsonl"
    if paths.in_bucket(workdir):
        folder = pathlib.Path(tempfile.mkdtemp())
        if (workdir / metrics).exists():
            (folder / metrics).write_bytes((workdir / metrics).read_bytes())
    writers = [
        metric_writers.ConsoleWriter(_SHOWN),
        metric_writers.JsonLinesWriter(folder / metrics),
    ]
    if config.tensorboard:
        writers.append(metric_writers.TensorBoardWriter(folder / "tensorboard"))
    if paths.in_bucket(workdir):
        writers.append(metric_writers.BucketWriter(folder, workdir))
    return metric_writers.Writers(*writers)
