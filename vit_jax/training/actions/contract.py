"""An `Action` does something beside the steps of a run: it logs, evaluates, saves or watches. It sees the `Progress` of
the run, and may change it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.data import loader
from vit_jax.objectives.contract import Batch
from vit_jax.training.run import Run
from vit_jax.training.state import TrainState
from vit_jax.training.step import Metrics
from vit_jax.training.verdicts import Restore

# `Checkpoints.save` and its kin: of a step, the parts of a state, a description, and fingerprints.
Write = Callable[[int, dict, dict, dict | None], None]
# The name in a checkpoint's description of the states of actions from outside the package, by their names.
OF_GUESTS = "actions"


class Action:
    """Something that is done beside the steps of a run. Each method does nothing here.

    All processes of a run call the same methods after the same steps, the last step before a signal included. Steps are
    dispatched ahead of the devices: an action that reads `progress.state` or `progress.metrics` makes the host wait, so
    it reads them only where it is due. It may replace `progress.state`. It may raise the exceptions of `verdicts`;
    several hosts have to agree on that first.

    Attributes:
      kept_as: the name under which checkpoints keep the state of an action from outside the package, set when it is
        made; '' for actions of the package, whose state is part of the checkpoint's description itself.
    """

    kept_as = ""

    def start(self, progress: "Progress") -> None:
        """Called before the first step, and again when the run has gone back to a checkpoint: then
        `progress.went_back_for` says why.
        """

    def compile(self, progress: "Progress", batches: Sequence[Batch]) -> None:
        """Has its own programs compiled, before any process runs the first step.

        Args:
          batches: shapes of all kinds of batches of the run; `progress.batch` is the first.
        """

    def before_step(self, progress: "Progress") -> None:
        """Called before step `progress.step + 1`, which trains on `progress.batch`."""

    def after_step(self, progress: "Progress") -> None:
        """Called after step `progress.step`. Its metrics are `progress.metrics`, on the devices."""

    def end(self, progress: "Progress") -> None:
        """Called once after the last step, when the state is saved."""

    def state(self, progress: "Progress") -> dict[str, Any]:
        """A checkpoint keeps this, as JSON."""
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Continues from the result of `state` at the time of the checkpoint; not called if the checkpoint has none.
        Actions of the package get the whole description of the checkpoint, of a new run too.
        """

    def close(self) -> None:
        """Called at the end, also after an error."""


@dataclasses.dataclass
class Progress:
    """How far a run is.

    Attributes:
      run: its parts.
      actions: they are called in this order.
      state: the training state, on the devices.
      step: the number of steps done.
      batch: the batch of the next step; after a step, the batch of that step.
      batches: the loader that the batches come from.
      metrics: the metrics of the last step, on the devices.
      results: the metrics of the last evaluation.
      evaluated_at: the step of that evaluation; −1 before the first one of this process.
      conclusions: further entries of the result of the run, such as its best evaluation.
      ended: why the run is complete before its last step; '' if it is not.
      is_stopped: whether a signal stops the run after this step; the next start continues it.
      went_back_for: why the run has gone back to a checkpoint, if it did so just now.
    """

    run: Run
    actions: Sequence[Action]
    state: TrainState
    step: int
    batch: Batch = dataclasses.field(default_factory=dict)
    batches: loader.Batches | None = None
    metrics: Metrics = dataclasses.field(default_factory=dict)
    results: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluated_at: int = -1
    conclusions: dict[str, Any] = dataclasses.field(default_factory=dict)
    ended: str = ""
    is_stopped: bool = False
    went_back_for: Restore | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.run.total_steps

    @property
    def continues(self) -> bool:
        """Whether another step follows."""
        return not (self.is_complete or self.is_stopped or self.ended)

    def take_up(self, saved: dict[str, Any]) -> None:
        """Gives the clock and the actions the description of the checkpoint that the run continues from."""
        self.run.clock.resumed_from(saved["goodput"], saved["seconds"])
        of_guests = saved.get(OF_GUESTS, {})
        for action in self.actions:
            if not action.kept_as:
                action.load_state(saved)
            elif action.kept_as in of_guests:
                action.load_state(of_guests[action.kept_as])

    def save(self, write: Write | None = None) -> None:
        """Checks the state and saves it, with the state of each action.

        Args:
          write: by default `Checkpoints.save`, which returns before the checkpoint is written.

        Raises:
          NonFiniteError, WrongState: the state is not good; nothing is saved.
        """
        run = self.run
        write = write or run.checkpoints.save
        self.check_health()
        with run.clock.during("save", after=self.state):
            self.state = run.checks.verify(self.step, self.state)
            parts = self.state.parts()
            seconds = run.clock.training_seconds
            kept = {"seconds": seconds, "goodput": run.clock.read()}
            of_guests = {}
            for action in self.actions:
                if action.kept_as:
                    of_guests[action.kept_as] = action.state(self)
                else:
                    kept |= action.state(self)
            if of_guests:
                kept[OF_GUESTS] = of_guests
            marks = run.checks.marks_of(parts)
            write(self.step, parts, run.description | kept, marks)

    def save_now(self) -> None:
        """Saves, and returns when the checkpoint is on the disk."""
        self.save(self.run.checkpoints.save_now)
        if self.run.tier:
            self.run.tier.discard()

    def check_health(self) -> None:
        """Waits for the devices. Raises `NonFiniteError` if steps were bad, `WrongState` if a device is at fault."""
        run = self.run
        self.state = run.checks.check_health(
            self.state, run.checkpoints.steps, run.skipped_data.ranges
        )
