"""Steps that go wrong: the search for them on the devices, the reaction of the host, and the return to an earlier
state without their data.

A step is bad if its loss or gradient is not finite, or if its loss is a spike. Its update is never
made. `config.nonfinite` says what happens next: the run stops, continues without the update, or goes
back to the last checkpoint and on without the data.
"""

import json
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from absl import logging
from etils import epath

from vit_jax.base import patterns, places
from vit_jax.base.errors import UserError
from vit_jax.config import Config, Spike
from vit_jax.data.order import data_step
from vit_jax.devices import processes
from vit_jax.training.verdicts import Restore

_NAMED = 5  # tensors in a message


class NonFiniteError(UserError):
    """Loss or gradients stopped being numbers."""


class BadStep(NonFiniteError, Restore):
    """The same, where the run may go back to a checkpoint.

    Attributes:
      step: the first bad one.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


@flax.struct.dataclass
class Health:
    """The bad steps so far; kept on the devices so that watching costs no synchronisation.

    Attributes:
      first_bad_step: int32, the first of them; −1 for none.
      bad_tensors: bool (parameters,), whether the gradient of each parameter was not finite at the last such step, in
        the order of `patterns.names`.
      in_a_row, skipped: int32, updates skipped in a row and in total.
      mean_loss: float32, running mean of the absolute values of the losses that were not bad: their scale, whatever
        their sign.
    """

    first_bad_step: jax.Array
    bad_tensors: jax.Array
    in_a_row: jax.Array
    skipped: jax.Array
    mean_loss: jax.Array


def healthy(params: dict) -> Health:
    """The health before the first step."""
    return Health(
        first_bad_step=jnp.int32(-1),
        bad_tensors=jnp.zeros(len(patterns.names(params)), bool),
        in_a_row=jnp.int32(0),
        skipped=jnp.int32(0),
        mean_loss=jnp.float32(0),
    )


def examine(old: Health, step: jax.Array, loss: jax.Array, grads: dict, spike: Spike) -> Health:
    """The health after a step with this loss and these gradients; part of the compiled step.

    Args:
      old: before the step.
      step: int32, steps done before this one.
    """
    bad_tensors = jnp.stack(
        [~jnp.isfinite(jnp.sum(g, dtype=jnp.float32)) for g in jax.tree.leaves(grads)]
    )
    bad = ~jnp.isfinite(loss) | bad_tensors.any()
    good_steps = step - old.skipped
    # A state of an earlier version has the mean of the losses themselves, which may be below 0.
    scale = jnp.abs(old.mean_loss)
    if spike.factor:
        bad |= (good_steps >= spike.memory) & (loss > spike.factor * scale)
    # The mean of all losses at first, then one that forgets.
    steps_of_mean = jnp.minimum(good_steps, spike.memory - 1)
    weight = 1 / (1 + steps_of_mean.astype(jnp.float32))
    mean_loss = scale + weight * (jnp.abs(loss) - scale)
    is_first = (old.first_bad_step < 0) & bad
    first_bad_step = jnp.where(is_first, step, old.first_bad_step)
    newest_bad_tensors = jnp.where(bad, bad_tensors, old.bad_tensors)
    return Health(
        first_bad_step=first_bad_step,
        bad_tensors=newest_bad_tensors,
        in_a_row=jnp.where(bad, old.in_a_row + 1, 0),
        skipped=old.skipped + bad,
        mean_loss=jnp.where(bad, old.mean_loss, mean_loss),
    )


def update_is_made(health: Health, nonfinite: str) -> jax.Array:
    """Whether the update of the step just examined counts; part of the compiled step."""
    made = health.in_a_row == 0
    if nonfinite != "skip":  # the run ends or goes back, as soon as the host looks
        made &= health.first_bad_step < 0
    return made


def check_health(
    health: Health, params: dict, config: Config, saved_steps: Callable[[], Sequence[int]]
) -> None:
    """Waits for the devices and reports bad steps.

    Args:
      saved_steps: the steps of the checkpoints that there are.

    Raises:
      BadStep: the run is to go back.
      NonFiniteError: the run is to end.
    """
    health = jax.device_get(health)
    if health.first_bad_step < 0:
        return
    what = _what_happened(health, params, config)
    message = f"step {health.first_bad_step}: {what}. The update was not made."
    if config.nonfinite == "rollback":
        raise BadStep(message, int(health.first_bad_step))
    if config.nonfinite == "stop":
        raise NonFiniteError(
            f"{message} {_last_good(saved_steps())} "
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
            health.skipped, health.first_bad_step, what,
        )  # fmt: skip


def _last_good(steps: Sequence[int]) -> str:
    if not steps:
        return "There is no checkpoint before it."
    return f"The last checkpoint, of step {max(steps)}, is good."


def _what_happened(health: Health, params: dict, config: Config) -> str:
    names = zip(patterns.names(params), health.bad_tensors, strict=True)
    bad = [name for name, is_bad in names if is_bad]
    if bad:
        others = " and others" if len(bad) > _NAMED else ""
        named = ", ".join(bad[:_NAMED])
        return f"loss or gradients are not finite, in the gradients of {named}{others}"
    if config.spike.factor:
        mean = (
            f"{config.spike.factor:g} times the mean of its absolute value, {health.mean_loss:.4g}"
        )
        return f"the loss is not finite, or above {mean}"
    return "the loss is not finite"


class SkippedData:
    """The data a run does not train on, in WORKDIR/left_out.json: part of the run, so that whoever
    continues with it, with any number of processes, has the same data in the same order.

    Attributes:
      ranges: (first, count) in steps of the order of all data; see `order.data_step`.
    """

    def __init__(self, workdir: epath.Path):
        self._path = workdir / "left_out.json"
        # A damaged file counts as none: the run meets the data that it named again, and skips it again.
        saved = places.read_json(self._path, list) if processes.index() == 0 else None
        agreed = processes.broadcast_from_first("skipped data", json.dumps(saved or []))
        ranges = json.loads(agreed)
        pairs = all(
            isinstance(pair, list) and list(map(type, pair)) == [int, int] for pair in ranges
        )
        self.ranges = [tuple(pair) for pair in ranges] if pairs else []

    def add(self, bad: BadStep, count: int, most: int, *, back_to: int) -> None:
        """Leaves out the data of the step that was bad, and of the `count` - 1 after it.

        Args:
          back_to: the step that the run goes back to; 0: its beginning.

        Raises:
          NonFiniteError: this has happened `most` times before.
        """
        if len(self.ranges) >= most:
            raise NonFiniteError(f"{bad} There were {most} rollbacks (config.max_rollbacks) before")
        first = data_step(bad.step, self.ranges)
        self.ranges.append((first, count))
        if processes.index() == 0:
            where = f"to the checkpoint of step {back_to}" if back_to else "to the beginning"
            logging.warning(
                "%s Going back %s, and on without the data of steps %d to %d",
                bad, where, first, first + count - 1,
            )  # fmt: skip
            places.write_whole(self._path, json.dumps(self.ranges) + "\n")
        processes.barrier("rollback")
