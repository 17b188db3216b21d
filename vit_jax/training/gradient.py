"""The gradient of a step: of the objective's mean loss, over the batch that all devices have together."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base import patterns
from vit_jax.config import Config
from vit_jax.objectives.contract import Batch, Learner
from vit_jax.objectives.networks import OWN, Networks
from vit_jax.optim.options import takes_two_gradients
from vit_jax.training.accumulation import accumulated
from vit_jax.training.inputs import prepare_inputs, seed_key
from vit_jax.training.state import TrainState
from vit_jax.training.zero import Placement, placement

Rate = Callable[[jax.Array], jax.Array]  # from a step to the learning rate


def make_gradient(networks: Networks, learning_rate: Rate, config: Config) -> Callable:
    """The gradient of a step; arguments as of `step.make_train_step`.

    Returns:
      `gradient_of(state, batch, seed) -> (gradients, metrics, variables)`: trees like the parameters, sharded as
      their optimizer state is, of float32 scalars, and like `state.variables` after the step. `seed` is from
      `inputs.seed_key`; by default the config's.
    """
    place = placement(networks, config)
    scale_of = make_batch_scales(config)
    freezing = _make_freezing(networks, config)
    sharpened = _make_sharpness(learning_rate, config)

    def gradient(state: TrainState, batch: Batch, seed: jax.Array | None = None):
        seed = seed_key(config) if seed is None else seed
        on_devices = networks.for_devices().for_batch(batch)
        images, targets, model_key = prepare_inputs(on_devices, state, batch, config, seed)
        weight, _ = scale_of(batch)
        loss_of = _make_loss(on_devices, state, weight, freezing, config)
        of_part = _make_gradient_of_part(loss_of, place)
        gradient_of = sharpened(accumulated(of_part, config.accumulate), state)
        variables = {
            name: state.variables[name] for name in ("model", OWN) if name in state.variables
        }
        batch = {**images, **targets}
        grads, others = gradient_of(state.params, variables, batch, model_key)
        metrics, variables, observed = others
        if observed:
            learner = state.learner(on_devices, variables=variables)
            metrics |= on_devices.objective.update_state(learner.modules, observed, state.step)
            variables = on_devices.variables_of(learner, variables)
        return grads, metrics, variables

    return gradient


def _make_loss(
    networks: Networks, state: TrainState, weight: float, freezing: Callable, config: Config
) -> Callable:
    """The mean loss of a part of a batch, as a function of the parameters.

    Args:
      networks: the run's, for these devices and this batch.
      state: before the step.
      weight: factor of the loss.
      freezing: from `_make_freezing`.

    Returns:
      `loss_of(params, variables, batch, key) -> (loss, (metrics, variables, observed))`.
    """

    def loss_of(params: dict, variables: dict, batch: Batch, key: jax.Array):
        trained = _stop_frozen(params, config)
        learner = state.learner(networks, params=trained, variables=variables)
        with freezing(learner, params):
            loss, metrics = networks.objective(learner, batch, nnx.Rngs(dropout=key))
        metrics = {name: jnp.mean(value) for name, value in metrics.items()}
        variables = networks.variables_of(learner, variables)
        mean = jnp.mean(loss)
        metrics |= {"loss": mean}
        weighted = mean if weight == 1 else weight * mean
        return weighted, (metrics, variables, learner.observed)

    return loss_of


def _make_gradient_of_part(loss_of: Callable, place: Placement) -> Callable:
    """The gradient of a loss from `_make_loss`, sharded as optimizer state is.

    Args:
      place: the shardings of parameters between steps and in the update.
    """
    differentiated = jax.grad(loss_of, has_aux=True)

    def gradient_of_part(params: dict, *rest: Any):
        grads, others = differentiated(place.stored(params), *rest)
        return place.updated(grads), others

    return gradient_of_part


def make_batch_scales(config: Config) -> Callable[[Batch], tuple[float, float]]:
    """A function from a batch to the factors of its loss and of its learning rate. They differ from 1 only where the
    number of images varies from batch to batch.
    """
    if not config.data.native_budget:
        return lambda batch: (1.0, 1.0)
    from vit_jax.data import native_batches

    return lambda batch: native_batches.share_of(config, len(batch["image"]))


def _stop_frozen(params: dict, config: Config) -> dict:
    """The parameters. Frozen ones are not differentiated, so that a linear probe costs a forward pass."""

    def stop(name: str, param: jax.Array) -> jax.Array:
        is_frozen = patterns.selected(config.optim.freeze, name, param.shape)
        if isinstance(is_frozen, bool):
            return jax.lax.stop_gradient(param) if is_frozen else param
        # Some layers of a stack.
        of_layers = patterns.along(is_frozen, param)
        return jnp.where(of_layers, jax.lax.stop_gradient(param), param)

    return patterns.map_named(stop, params)


def _make_freezing(networks: Networks, config: Config) -> Callable[[Learner, dict], Any]:
    """A function that makes a context: inside, frozen batch norms keep their running statistics."""
    freeze = config.optim.freeze
    if not (freeze or networks.adapters):
        return lambda learner, params: contextlib.nullcontext()
    from vit_jax.training import frozen_statistics

    return lambda learner, params: frozen_statistics.freezing(learner, params, freeze)


def _make_sharpness(
    learning_rate: Rate, config: Config
) -> Callable[[Callable, TrainState], Callable]:
    """A wrapper of the gradient that makes it sharpness-aware, where the config asks for that."""
    if not takes_two_gradients(config.optim):
        return lambda gradient_of, state: gradient_of
    from vit_jax.optim import sharpness

    def sharpened(gradient_of: Callable, state: TrainState) -> Callable:
        rate = learning_rate(state.step - state.health.skipped)
        rho = sharpness.radius(config.optim, rate)
        return sharpness.aware(gradient_of, config.optim, rho)

    return sharpened
