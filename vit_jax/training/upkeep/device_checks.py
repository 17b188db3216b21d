"""All checks of the devices of a run: audits of their arrays, replays of their computations, and the search for the
device that caused a gradient that is not finite.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np
from absl import logging

from vit_jax.base.errors import ConfigError
from vit_jax.data import loader
from vit_jax.data.record import Source
from vit_jax.devices import meshes
from vit_jax.objectives.contract import Batch
from vit_jax.training.assembly import Assembly
from vit_jax.training.gradient import make_gradient
from vit_jax.training.state import TrainState
from vit_jax.training.upkeep import health
from vit_jax.training.upkeep.audit import Audit, CordonHost, Events, WrongState
from vit_jax.training.upkeep.health import NonFiniteError
from vit_jax.training.with_data import assembly_for

if TYPE_CHECKING:
    from vit_jax.training.upkeep.replay import Replay


class DeviceChecks:
    """The checks of a run, as `config.audit` has them; every process calls the same methods in the same order.

    Methods raise:
      WrongState: the run has to continue from an earlier state, with the same data.
      CordonHost: a host was at fault too often.
    """

    def __init__(
        self, assembly: Assembly, source: Source, like: TrainState, mesh: jax.sharding.Mesh
    ):
        """Args: `like`: shapes, dtypes and shardings of the state.

        Raises:
          ConfigError: the objective cannot be replayed.
        """
        self._assembly = assembly
        self._source = source
        self._like = like
        self._mesh = mesh
        self._options = assembly.config.audit
        self.events = Events(self._options.most)
        every = self._options.every
        self._audit = Audit(self._options, like, mesh, self.events) if every else None
        self._replay = self._make_replay() if self._options.replay_every else None
        self._excused: set[int] = set()  # steps that were not finite, and then were
        if jax.process_index() == 0:
            logging.info("%s", self._summary())

    def start(self, step: int, state: TrainState) -> None:
        """Marks a state that was just made or restored."""
        if self._audit:
            self._audit.start(step, state)

    def compile(self, state: TrainState, batches: list[Batch]) -> None:
        """Compiles the programs for batches of these shapes, before any process runs them."""
        for batch in batches if self._replay else ():
            self._replay.compile(state, batch)

    def before(self, step: int, state: TrainState, batch: Batch) -> TrainState:
        """The state after `step`, audited or replayed if that is due before the next step."""
        if self._audit:
            state = self._audit.before(step, state)
        if self._replay and (step + 1) % self._options.replay_every == 0:
            self._replay.check(step, state, batch)
        return state

    def after(self, step: int, state: TrainState) -> None:
        """Marks the state after a step, if an audit is due; does not wait for the devices."""
        if self._audit:
            self._audit.after(step, state)

    def verify(self, step: int, state: TrainState) -> TrainState:
        """The state after `step`, audited now."""
        return self._audit.verify(step, state) if self._audit else state

    def marks_of(self, parts: dict) -> dict[str, np.ndarray] | None:
        """The `fingerprint` of parts of the state that was verified last, if it was."""
        return self._audit.marks_of(parts) if self._audit else None

    def check_health(
        self, state: TrainState, saved_steps: Callable, skipped: list[tuple[int, int]]
    ) -> TrainState:
        """The state, if the run can continue with it; see `health.check_health`, which raises, and `explain`."""
        config = self._assembly.config
        try:
            health.check_health(state.health, state.params, config, saved_steps)
            return state
        except NonFiniteError:
            state = self.explain(state, skipped)
        health.check_health(state.health, state.params, config, saved_steps)
        return state

    def explain(self, state: TrainState, skipped: list[tuple[int, int]]) -> TrainState:
        """Finds out whether devices are at fault for a bad step. Returns the state, healed if devices hold wrong bits.
        Raises if some devices computed a gradient that is not finite, and the same gradient is finite elsewhere.

        Args:
          state: after the bad step, without its update.
          skipped: `SkippedData.ranges`.
        """
        state = self.verify(int(state.step), state)
        self._blame(state, skipped)
        return state

    def _blame(self, state: TrainState, skipped: list[tuple[int, int]]) -> None:
        bad = jax.device_get(state.health)
        if not self._audit or not bad.bad_tensors.any():
            return
        # With `skip` the bad step is the last one. Otherwise it is the first bad step, since no update was made after
        # it.
        skips = self._assembly.config.nonfinite == "skip"
        step = int(state.step) - 1 if skips else int(bad.first_bad_step)
        if step in self._excused:
            return
        self._excused.add(step)
        try:
            replay = self._replay = self._replay or self._make_replay()
            with loader.train_batches(
                self._source,
                self._assembly.config,
                meshes.batch_sharding(self._mesh),
                start_step=step,
                stop_step=step + 1,
                skipped=skipped,
            ) as batches:
                batch = next(iter(batches))
            then = jax.device_put(np.int32(step), state.step.sharding)
            who = replay.not_finite(step, state.replace(step=then), batch)
        except (ConfigError, jax.errors.JaxRuntimeError) as error:
            logging.warning("step %d cannot be replayed: %s", step, error)
            return
        if not who:
            return
        message = f"step {step}: gradients are not finite, but {who}"
        if self.events.cordon:
            raise CordonHost(f"{message}; {self.events.cordon}")
        raise WrongState(message)

    def _make_replay(self) -> "Replay":
        from vit_jax.training.upkeep.replay import Replay

        config = self._assembly.config
        teachers = self._assembly.networks.teachers
        # As a run of one device, with its share of the rows.
        alone = dataclasses.replace(
            config,
            batch_size=config.batch_size // meshes.batch_shards(self._mesh),
            duration=f"{self._assembly.total_steps} steps",
        )
        made = assembly_for(alone, self._source)
        alone_networks = dataclasses.replace(made.networks, teachers=teachers)
        gradient_of = make_gradient(alone_networks, self._assembly.learning_rate, alone)
        wait = config.hosts.wait_minutes
        return Replay(gradient_of, self._like, self._mesh, self.events, wait)

    def _summary(self) -> str:
        options = self._options
        phrases = []
        if options.every:
            phrases.append(
                f"copies of the state are compared every {options.every} steps and before each save"
            )
        if options.replay_every:
            phrases.append(f"gradients are computed again every {options.replay_every} steps")
        if options.checker_every:
            phrases.append(f"libtpu's checker runs every {options.checker_every} steps")
        return f"audit: {', '.join(phrases) or 'off'} (config.audit)"
