"""Records a trace of some steps (`config.log.profile`), for TensorBoard or Perfetto."""

import pathlib
import shutil
import tempfile

import jax
from absl import logging

from vit_jax.base import places
from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run
from vit_jax.training.upkeep.writers import copy_grown


class Profile(Action):
    """A trace of the steps `first` to `last`."""

    def __init__(self, run: Run):
        self._first, self._last = run.config.log.profile
        # A trace is named by its host, which may have several processes.
        process = f"process-{jax.process_index()}" if jax.process_index() else ""
        self._folder = run.workdir / "profile" / process
        # JAX writes traces to local folders only.
        self._local = tempfile.mkdtemp() if places.in_bucket(self._folder) else None

    def before_step(self, progress: Progress) -> None:
        """Starts the trace before its first step."""
        if progress.step + 1 == self._first:
            jax.profiler.start_trace(self._local or str(self._folder))

    def after_step(self, progress: Progress) -> None:
        """Ends the trace when the devices have done its last step."""
        if progress.step != self._last:
            return
        jax.block_until_ready(progress.metrics)
        jax.profiler.stop_trace()
        if self._local:
            copy_grown(pathlib.Path(self._local), self._folder, {})
            shutil.rmtree(self._local)
        logging.info("trace of steps %d to %d: %s", self._first, self._last, self._folder)
