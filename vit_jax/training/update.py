"""The update of a step: the optimizer's change of the parameters, and all that follows it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import optim
from vit_jax.config import Config
from vit_jax.objectives.contract import Batch
from vit_jax.objectives.networks import Networks, model_part
from vit_jax.optim.options import is_of_matrices
from vit_jax.training.gradient import Rate, make_batch_scales
from vit_jax.training.state import GRAM_TEACHER, TrainState
from vit_jax.training.upkeep.health import examine, update_is_made


@dataclasses.dataclass
class Update:
    """An update, before it is known whether the step was good.

    Attributes:
      state: after the update.
      change: of the parameters.
      rate: the learning rate.
      examined: trees like the parameters; if these are not finite, the step is bad.
    """

    state: TrainState
    change: Any
    rate: jax.Array
    examined: Any


def make_update(
    networks: Networks, optimizer: optax.GradientTransformation, learning_rate: Rate, config: Config
) -> Callable[..., Update]:
    """The update of a step; arguments as of `step.make_train_step`.

    Returns:
      `update(state, gradients, variables, batch) -> Update`, with the results of `gradient.make_gradient`.
    """
    scale_of = make_batch_scales(config)
    # Roots of matrices may not be finite where gradients are.
    examines_change = is_of_matrices(config.optim.name)

    def update(state: TrainState, grads: Any, variables: dict, batch: Batch) -> Update:
        change, opt_state = optimizer.update(grads, state.opt_state, state.params)
        # A skipped update does not advance the optimizer's own count.
        rate = learning_rate(state.step - state.health.skipped)
        _, scale = scale_of(batch)
        if scale != 1:
            rate = scale * rate
            change = jax.tree.map(lambda x: scale * x, change)
        params = optax.apply_updates(state.params, change)
        new = state.replace(params=params, opt_state=opt_state)
        new = _with_averages(state, new, variables, networks, config)
        return Update(new, change, rate, change if examines_change else grads)

    return update


def keep_if_good(state: TrainState, update: Update, loss: jax.Array, config: Config) -> TrainState:
    """The state after an update, or the state before it where the step was bad; without the constants of the state.

    Args:
      state: before the step.
      loss: of the step.
    """
    health = examine(state.health, state.step, loss, update.examined, config.spike)
    is_made = update_is_made(health, config.nonfinite)
    trained = update.state.without_constants().replace(health=health)
    unchanged = state.without_constants().replace(health=health)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_made, new, old)

    return jax.tree.map(choose, trained, unchanged)


def refresh_gram_teacher(state: TrainState, networks: Networks) -> TrainState:
    """The state at the end of a step, with its Gram teacher refreshed if due, even if the update was skipped."""
    gram_teacher = networks.objective.gram_teacher()
    if gram_teacher is None:
        return state
    refreshed = jax.lax.cond(
        gram_teacher.is_due(state.step + 1),
        lambda new, old: new,
        lambda new, old: old,
        model_part(state.teacher),
        state.variables[GRAM_TEACHER],
    )
    return state.replace(variables=state.variables | {GRAM_TEACHER: refreshed})


def _with_averages(
    state: TrainState, new: TrainState, variables: dict, networks: Networks, config: Config
) -> TrainState:
    """The state after an update, with the averages that follow its parameters, and all state that is not trained.

    Args:
      state: before the update.
      new: after it, but for these.
      variables: of the model and the objective, after the step.
    """
    ema = state.ema
    teacher = state.teacher
    all_variables = state.variables | variables
    if ema is not None:
        ema = optim.update_average(config.optim, ema, new.params, new.opt_state, state.step)
    if "ema" in all_variables:
        all_variables["ema"] = optim.ema_update(
            all_variables["ema"], variables["model"], config.optim.ema, state.step
        )
    average = networks.moving_average()
    if average is not None:
        rate = 1 - average.momentum(state.step)
        teacher = optim.follow(teacher, new.params, rate)
        if "teacher" in all_variables:
            all_variables["teacher"] = optim.follow(all_variables["teacher"], variables, rate)
    return new.replace(ema=ema, teacher=teacher, variables=all_variables)
