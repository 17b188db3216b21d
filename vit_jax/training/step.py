"""One training step: a pure function of (state, batch), shared by training, planning, benchmarks and tests.

It computes the gradient (`gradient.py`), then the update (`update.py`), and measures both.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.compute import dense
from vit_jax.config import Config
from vit_jax.objectives.contract import Batch
from vit_jax.objectives.networks import Networks
from vit_jax.training.gradient import Rate, make_gradient
from vit_jax.training.state import TrainState
from vit_jax.training.update import keep_if_good, make_update, refresh_gram_teacher
from vit_jax.training.zero import placement

Metrics = dict[str, jax.Array]


def make_train_step(
    networks: Networks, optimizer: optax.GradientTransformation, learning_rate: Rate, config: Config
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a run.

    Args:
      networks: the model, the objective and its teacher.
      optimizer, learning_rate: from `optim.make`.
      config: the run's.

    Returns:
      `train_step(state, batch, seed) -> (state, metrics)` with a batch as `data.batches.spec` describes it and
      metrics as float32 scalars; `seed` is from `inputs.seed_key`, by default the config's. Not compiled yet: see
      `step_programs.compile_train_step`.
    """
    gradient_of = make_gradient(networks, learning_rate, config)
    update_of = make_update(networks, optimizer, learning_rate, config)
    place = placement(networks, config)

    def train_step(
        state: TrainState, batch: Batch, seed: jax.Array | None = None
    ) -> tuple[TrainState, Metrics]:
        with dense.gradients_in(config.mesh.gradients):
            grads, metrics, variables = gradient_of(state, batch, seed)
        # From here to the end a device has its own shard of parameters, not all of them.
        sharded = state.replace(params=place.updated(state.params))
        update = update_of(sharded, grads, variables, batch)
        new = keep_if_good(sharded, update, metrics["loss"], config)
        new = refresh_gram_teacher(new, networks)
        new = new.replace(params=place.updated(new.params))
        metrics["learning_rate"] = jnp.float32(update.rate)
        metrics["skipped_updates"] = new.health.skipped.astype(jnp.float32)
        metrics["gradient_norm"] = optax.tree.norm(grads)
        metrics["update_norm"] = optax.tree.norm(update.change)
        metrics["parameter_norm"] = optax.tree.norm(update.state.params)
        return new.with_constants_of(state).replace(step=state.step + 1), metrics

    return train_step
