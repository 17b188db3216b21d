"""The compiled programs of a run's step."""

import concurrent.futures
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import logging

from vit_jax.compute import attend, choices
from vit_jax.devices import meshes
from vit_jax.objectives.contract import Batch
from vit_jax.training.state import TrainState, shardings_of
from vit_jax.training.step import Metrics


def compile_train_step(
    train_step: Callable,
    shardings: TrainState,
    mesh: jax.sharding.Mesh,
    *,
    checked: bool = False,
    seeded: bool = False,
) -> Callable:
    """The jitted step: the state keeps its shardings and its memory, metrics are on every device.

    Args:
      checked: whether devices compute everything twice and compare, where the platform has that.
      seeded: whether the seed is an argument, so that all seeds have one program.

    Returns:
      A function of (state, batch), or of (state, batch, seed), see `step.make_train_step`.
    """
    options = choices.compiler_options(mesh)
    whole = meshes.replicated(mesh)
    arguments = (shardings, meshes.batch_sharding(mesh))
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(*arguments, whole) if seeded else arguments,
        out_shardings=(shardings, whole),
        compiler_options=options | choices.checker_options(mesh) if checked else options,
    )


class StepPrograms:
    """The compiled programs of a run's step: for batches of each shape one, and one that checks itself."""

    def __init__(
        self,
        train_step: Callable,
        like: TrainState,
        seed: jax.Array,
        mesh: jax.sharding.Mesh,
        checker_every: int,
    ):
        """Takes the step, to be compiled later.

        Args:
          train_step: see `make_train_step`.
          like: shapes, dtypes and shardings of the state.
          seed: from `inputs.seed_key`.
          checker_every: the period, in steps, of the checked program, on platforms that have one; 0: never.
        """
        shardings = shardings_of(like)
        self._every = checker_every if choices.checker_options(mesh) else 0
        self._jitted = {
            checked: compile_train_step(train_step, shardings, mesh, checked=checked, seeded=True)
            for checked in {False, self._every > 0}
        }
        self._seed = jax.device_put(np.asarray(seed), meshes.replicated(mesh))
        self._compiled: dict[tuple, Callable] = {}
        self._coming: dict[tuple, concurrent.futures.Future] = {}
        self._background = concurrent.futures.ThreadPoolExecutor(1, "compiling-steps")

    @property
    def is_begun(self) -> bool:
        """Whether they are being compiled."""
        return bool(self._coming or self._compiled)

    def is_compiled(self, batch: Batch) -> bool:
        """Whether a step can be run on a batch."""
        return (False, _shapes(batch)) in self._compiled

    def compile(self, state: TrainState, batches: Sequence[Batch], first: Batch) -> None:
        """Begins to compile the programs in the background, one after the other; see `wait`.

        Args:
          batches: the run's batches, or their shapes, no two alike.
          first: the batch that is trained on first; programs for it come first, and the rest in their order.
        """
        # The sort keeps their order.
        batches = sorted(batches, key=lambda batch: _shapes(batch) != _shapes(first))
        with attend.record() as kinds:
            lowered = {
                (checked, _shapes(batch)): jitted.lower(state, batch, self._seed)
                for batch in batches
                for checked, jitted in self._jitted.items()
            }
        if kinds:
            logging.info("attention: %s", " and ".join(kinds))
        for key, program in lowered.items():
            self._coming[key] = self._background.submit(program.compile)

    def wait(self, batch: Batch) -> None:
        """Waits for the programs for batches like this one."""
        for checked in self._jitted:
            key = checked, _shapes(batch)
            self._compiled[key] = self._coming.pop(key).result()

    def __call__(self, step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Runs step `step`."""
        checked = self._every > 0 and step % self._every == 0
        program = self._compiled[checked, _shapes(batch)]
        return program(state, batch, self._seed)

    def close(self) -> None:
        """Cancels all compilations that have not begun."""
        self._background.shutdown(wait=False, cancel_futures=True)


def _shapes(batch: Batch) -> tuple:
    return tuple((name, batch[name].shape) for name in sorted(batch))
