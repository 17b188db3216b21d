"""One training step: a pure function of (state, batch), shared by training, planning, benchmarks
and tests.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import optim
from vit_jax.base import patterns
from vit_jax.data.augmentation.augment import augment
from vit_jax.devices import meshes
from vit_jax.models import execution, registry
from vit_jax.objectives import Objective
from vit_jax.objectives.supervised import to_targets
from vit_jax.training.state import Health, TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def make_train_step(
    definition: nnx.GraphDef,
    model_config,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[jax.Array], jax.Array],
    config: ConfigDict,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a run.

    Args:
      definition: the model's, from `registry.abstract`.
      model_config: the family's config; its dtype and classes are used.
      objective: the loss.
      optimizer, learning_rate: from `optim.make`.
      config: the run's.

    Returns:
      `train_step(state, batch) -> (state, metrics)` with `batch` = {"image": uint8 (B, S, S, 3),
      "label": int32 (B,) or float32 (B, K)} and metrics as float32 scalars. Not compiled yet: see
      `compile_train_step`.
    """

    def held(name: str, param: jax.Array) -> jax.Array:
        # What is frozen is not differentiated: a linear probe costs a forward pass.
        frozen = patterns.matching(config.optim.freeze, [name])
        return jax.lax.stop_gradient(param) if frozen else param

    def loss_of(params: dict, images: jax.Array, targets: jax.Array, key: jax.Array):
        model = nnx.merge(registry.here(definition, model_config), patterns.map_named(held, params))
        loss, metrics = objective(model, images, targets, nnx.Rngs(dropout=key))
        means = {name: jnp.mean(value) for name, value in metrics.items()}
        return jnp.mean(loss), means | {"loss": jnp.mean(loss)}

    gradient_of = jax.grad(loss_of, has_aux=True)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # Every random choice of a step is a function of (seed, step): a resumed run repeats none
        # and skips none.
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        augment_key, model_key = jax.random.split(key)
        images, targets = augment(
            batch["image"],
            to_targets(batch["label"], model_config.num_classes),
            augment_key,
            config.augment,
            mean=config.data.mean,
            std=config.data.std,
            dtype=jnp.dtype(execution.computed(model_config).dtype),
        )
        images = meshes.constrain_batch(images)
        grads, metrics = _accumulated(gradient_of, config.accumulate)(
            state.params, images, targets, model_key
        )

        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema and optim.ema_update(state.ema, params, config.optim.ema, state.step)
        health = _examine(state, metrics["loss"], grads, config.spike)
        kept = health.in_a_row == 0
        if config.nonfinite != "skip":  # the run ends or goes back, as soon as somebody looks
            kept &= health.first_bad_step < 0
        trained = TrainState(state.step, params, opt_state, ema, health)
        unchanged = state.replace(health=health)
        new = jax.tree.map(lambda a, b: jnp.where(kept, a, b), trained, unchanged)

        metrics |= {
            # A skipped update does not advance the optimizer's own count.
            "learning_rate": jnp.float32(learning_rate(state.step - state.health.skipped)),
            "skipped_updates": health.skipped.astype(jnp.float32),
            "gradient_norm": optax.global_norm(grads),
            "update_norm": optax.global_norm(updates),
            "parameter_norm": optax.global_norm(params),
        }
        return new.replace(step=state.step + 1), metrics

    return train_step


def compile_train_step(
    train_step: Callable, shardings: TrainState, mesh: jax.sharding.Mesh
) -> Callable:
    """The jitted step: the state keeps its shardings and its memory, metrics are on every device."""
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, meshes.batch_sharding(mesh)),
        out_shardings=(shardings, meshes.replicated(mesh)),
    )


def _accumulated(gradient_of: Callable, parts: int) -> Callable:
    """`gradient_of` over `parts` equal parts of the batch, one after the other; the mean is that of
    the whole batch.
    """
    if parts == 1:
        return gradient_of

    def accumulated(params, images, targets, key):
        # Part i takes every parts-th example, so that each part is spread over all devices and
        # nothing moves between them.
        cut = jax.tree.map(
            lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), (images, targets)
        )

        def add(total, part):
            (images, targets), key = part
            new = gradient_of(params, meshes.constrain_batch(images), targets, key)
            return jax.tree.map(jnp.add, total, new), None

        like = jax.eval_shape(gradient_of, params, images[:1], targets[:1], key)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        total, _ = jax.lax.scan(add, zero, (cut, jax.random.split(key, parts)))
        return jax.tree.map(lambda x: x / parts, total)

    return accumulated


def _examine(state: TrainState, loss: jax.Array, grads: dict, spike: ConfigDict) -> Health:
    """The health after a step with this loss and these gradients.

    Args:
      spike: the section of the config.
    """
    old = state.health
    bad_tensors = jnp.stack(
        [~jnp.isfinite(jnp.sum(g, dtype=jnp.float32)) for g in jax.tree.leaves(grads)]
    )
    bad = ~jnp.isfinite(loss) | bad_tensors.any()
    good_steps = state.step - old.skipped
    if spike.factor:
        bad |= (good_steps >= spike.memory) & (loss > spike.factor * old.mean_loss)
    # The mean of all losses at first, then one that forgets.
    weight = 1 / (1 + jnp.minimum(good_steps, spike.memory - 1).astype(jnp.float32))
    mean_loss = old.mean_loss + weight * (loss - old.mean_loss)
    return Health(
        first_bad_step=jnp.where((old.first_bad_step < 0) & bad, state.step, old.first_bad_step),
        bad_tensors=jnp.where(bad, bad_tensors, old.bad_tensors),
        in_a_row=jnp.where(bad, old.in_a_row + 1, 0),
        skipped=old.skipped + bad,
        mean_loss=jnp.where(bad, old.mean_loss, mean_loss),
    )
