"""The state that a run continues from: from its newest good checkpoint, on the hosts' local disks or in the workdir;
without a checkpoint, the first state.
"""

import dataclasses
import os
from typing import TYPE_CHECKING

import jax
from absl import logging
from etils import epath

from vit_jax.base import logs
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import fingerprints, reading, saving
from vit_jax.checkpoints.lora import BASE
from vit_jax.config import Config
from vit_jax.models.registry import Weights
from vit_jax.objectives.networks import model_part
from vit_jax.training import positions
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly
from vit_jax.training.guards import changed_fields, few_other_images
from vit_jax.training.state import TrainState
from vit_jax.training.state_changes import check_state
from vit_jax.training.upkeep.clock import KINDS

if TYPE_CHECKING:
    from vit_jax.checkpoints.tiers import LocalTier

# A hint for users on the time that it takes.
_INITIALISING = "XLA first compiles the program for that, in seconds on an idle machine, in minutes on a busy one"


@dataclasses.dataclass
class Start:
    """Finds or makes the state to continue from; asked again after a rollback.

    Attributes:
      assembly, checkpoints: of the run.
      tier: the run's local checkpoints, if it has any.
      description: of the run as it is now.
      like: shapes, dtypes and shardings of the state.
      saved: the description of the checkpoint that was restored; in a new run, the same fields at their first values.
    """

    assembly: Assembly
    checkpoints: saving.Checkpoints
    tier: "LocalTier | None"
    description: dict
    like: TrainState
    saved: dict = dataclasses.field(init=False)

    def __call__(self) -> TrainState:
        """The state.

        Raises:
          ConfigError: the run in the workdir is a different one.
          CheckpointError: there are checkpoints, and none can be read; or the one to start from.
        """
        self.saved = {"seconds": 0.0, "goodput": dict.fromkeys(KINDS, 0.0), "best": None}
        restored = self.checkpoints.restore_latest(
            self.like.parts(), self._check_checkpoint, self._restored_locally
        )
        if restored:
            step, parts = restored
            positions.check_position(
                step,
                self.assembly.total_steps,
                self.saved,
                self.description,
                self.checkpoints.workdir,
            )
            warn_of_changes(self.saved, self.description)
            logging.info("resumed at step %d of %d", step, self.assembly.total_steps)
            state = self.like.with_parts(parts)
            if state.base is not None:
                from vit_jax.training.initial_weights import base_of

                state = state.replace(base=base_of(self.assembly, state))
        else:
            count = sum(x.size for x in jax.tree.leaves(self.like.params))
            with logs.with_elapsed_time(f"initialising {count:,} parameters", about=_INITIALISING):
                state = states.create(self.assembly.init, self.assembly.config.seed, self.like)
                jax.block_until_ready(state)
            if self.assembly.config.init_from:
                from vit_jax.training.initial_weights import start_from

                state = start_from(self.assembly, state, self.description["classes"])
            state = _with_gram_teacher(self.assembly, state)
        self._check_base(state)
        return self._with_teachers(state)

    def _restored_locally(self, steps: list[int]) -> tuple[int, dict] | None:
        """The state on local disks, if it is newer than the good checkpoints of `steps` in the workdir."""
        if self.tier is None:
            return None
        newest = max(steps, default=0)
        return self.tier.restore(newest, lambda saved: self._check_local(saved, steps))

    def _check_base(self, state: TrainState) -> None:
        """Notes where the base below adapters is, and its fingerprint.

        Raises:
          ConfigError: it has other weights than that which the adapters were trained for.
        """
        if state.base is None:
            return
        path = self.assembly.config.init_from
        base = Weights(state.base, {})
        saved = self.saved.get(BASE)
        if saved and not fingerprints.is_digest_of(saved["digest"], base):
            raise ConfigError(
                f"config.init_from = {path} has other weights than the base that the adapters of this run were "
                "trained for: put that back, or use another --workdir"
            )
        if os.path.exists(path):
            path = os.path.abspath(path)
        self.description[BASE] = {"path": path, "digest": fingerprints.digest(base)}

    def _check_checkpoint(self, saved: dict, folder: epath.Path) -> None:
        """Raises `ConfigError` unless the run can continue from a checkpoint in the workdir."""
        self._check_same_run(saved)
        if changed := changed_fields(saved, self.description):
            like = self.like.parts()
            reading.everywhere(lambda: check_state(folder, like, changed) or {})

    def _check_same_run(self, saved: dict) -> None:
        """Raises `ConfigError` if the saved run is a different one."""
        if saved.get("pixels") != self.description["pixels"] and jax.process_index() == 0:
            logging.warning(
                "images are decoded and resized by other code than before: crops of the same images differ "
                "slightly from those that this run began with"
            )
        check_same_run(self.assembly.config, saved, self.description)
        self.saved |= {"window": []} | saved  # which an earlier version did not save

    def _check_local(self, saved: dict, steps: list[int]) -> None:
        """Raises `ConfigError` unless the run can continue from a local checkpoint. The workdir has checkpoints of
        `steps` that are not known to be damaged.
        """
        best = saved["best"] if self.assembly.config.checkpoint.best else None
        if best and best["step"] not in steps:
            raise ConfigError(f"the best checkpoint, of step {best['step']}, was not saved whole")
        self._check_same_run(saved)

    def _with_teachers(self, state: TrainState) -> TrainState:
        """`state` with the weights of the fixed teachers, which are not saved with it."""
        teachers = self.assembly.networks.teachers
        if not teachers:
            return state
        from vit_jax.training.initial_weights import teacher_weights

        saved_digests = self.saved.get("teacher", "").split()
        saved_digests += [""] * len(teachers)  # of teachers that were not saved
        read = map(teacher_weights, teachers, self.like.frozen_teachers, saved_digests)
        all_weights, digests = zip(*read, strict=True)
        self.description["teacher"] = " ".join(digests)
        return state.replace(frozen_teachers=all_weights)


def check_same_run(config: Config, saved: dict, description: dict) -> None:
    """Raises `ConfigError` if the run that a checkpoint is of, `saved`, is another than `description`, and the config
    does not allow it.
    """
    if (few := few_other_images(saved, description)) and jax.process_index() == 0:
        logging.warning("%s", few)
    changed = changed_fields(saved, description)
    if not changed or config.checkpoint.on_config_change != "error":
        return
    moved = positions.changed_steps(saved, description)
    allow = ", or --config.checkpoint.on_config_change=allow"
    put_back = (
        f", or put config.{' and config.'.join(moved)} back, which no option allows to change"
    )
    raise ConfigError(
        f"{_difference(changed)}. Use another --workdir{put_back if moved else allow}"
    )


def warn_of_changes(saved: dict, description: dict) -> None:
    """Logs the changes of the config, after all checks: the run continues with them."""
    changed = changed_fields(saved, description)
    if changed and jax.process_index() == 0:
        logging.warning(
            "%s; continuing, as config.checkpoint.on_config_change says", _difference(changed)
        )


def _difference(changed: list[str]) -> str:
    return f"the config differs from the one this run was started with, in {'; '.join(changed)}"


def _with_gram_teacher(assembly: Assembly, state: TrainState) -> TrainState:
    """A new run's state with the earlier weights that the objective needs, if it does."""
    gram_teacher = assembly.networks.objective.gram_teacher()
    if gram_teacher is None:
        return state
    params = model_part(state.params)
    if gram_teacher.path:
        from vit_jax.training.initial_weights import gram_teacher_params

        params = gram_teacher_params(
            assembly, gram_teacher, Weights(params, state.variables.get("model", {}))
        )
    # Copies: the parameters' own buffers are donated to the step.
    earlier = states.copied(params, state.variables[states.GRAM_TEACHER])
    return state.replace(variables=state.variables | {states.GRAM_TEACHER: earlier})
