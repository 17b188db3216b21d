"""The parts of a run, which stay the same while it trains."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from vit_jax import evaluation
from vit_jax.checkpoints import saving
from vit_jax.config import Config
from vit_jax.data.record import Source
from vit_jax.training.assembly import Assembly
from vit_jax.training.starting import Start
from vit_jax.training.state import TrainState
from vit_jax.training.step_programs import StepPrograms
from vit_jax.training.upkeep.callbacks import Callbacks
from vit_jax.training.upkeep.clock import Clock
from vit_jax.training.upkeep.device_checks import DeviceChecks
from vit_jax.training.upkeep.health import SkippedData
from vit_jax.training.upkeep.preemption import StopRequest
from vit_jax.training.upkeep.programs import Programs
from vit_jax.training.upkeep.writers import Writers

if TYPE_CHECKING:
    from vit_jax.checkpoints.tiers import LocalTier


@dataclasses.dataclass
class Run:
    """The parts of a run, made by `setup.open_run`.

    Attributes:
      assembly: the model, the objective, the optimizer and the step.
      source: the examples to train on.
      suite: the evaluators.
      mesh: the devices.
      workdir: the folder of the run.
      clock: counts the time by its use.
      stop: hears the signals that ask the run to stop.
      programs: the compiled programs that are kept for later starts.
      callbacks: the user's functions, which are called with all metrics.
      like: shapes, dtypes and shardings of the state.
      description: the description of the run in each of its checkpoints.
      checkpoints: the checkpoints in the workdir.
      tier: the checkpoints on the hosts' local disks, if the config asks for them.
      begin: finds or makes the state to continue from.
      skipped_data: the data that the run leaves out.
      checks: the checks of the devices.
      train_step: the compiled steps.
      writers: where metrics go, from the first step on.
      recipe: the resolved config, as a file that trains the same.
    """

    assembly: Assembly
    source: Source
    suite: evaluation.Suite
    mesh: jax.sharding.Mesh
    workdir: epath.Path
    clock: Clock
    stop: StopRequest
    programs: Programs
    callbacks: Callbacks
    like: TrainState
    description: dict[str, Any]
    checkpoints: saving.Checkpoints
    tier: "LocalTier | None"
    begin: Start
    skipped_data: SkippedData
    checks: DeviceChecks
    train_step: StepPrograms
    writers: Writers = dataclasses.field(default_factory=Writers)
    recipe: str = ""

    @property
    def config(self) -> Config:
        """The resolved config of the run."""
        return self.assembly.config

    @property
    def total_steps(self) -> int:
        """The number of the last step."""
        return self.assembly.total_steps

    @functools.cached_property
    def log_every(self) -> int:
        """The number of steps between two logs."""
        return self.assembly.to_steps(self.config.log.every)

    def is_logged(self, step: int) -> bool:
        """Whether metrics are logged after this step: a resumed run logs after the same steps as an unbroken one."""
        return step in (1, self.total_steps) or is_due(step, self.log_every)


def is_due(step: int, every: int) -> bool:
    """Whether an action that is done `every` steps (0: never) is done after this one."""
    return every > 0 and step % every == 0
