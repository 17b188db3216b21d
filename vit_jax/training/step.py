"""One training step: a pure function of (state, batch), shared by training, planning, benchmarks
and tests.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from absl import logging
from flax import nnx

from vit_jax import optim
from vit_jax.base import patterns
from vit_jax.compute import attend, choices, dense, partitioning
from vit_jax.config import Config
from vit_jax.data import views
from vit_jax.data.augmentation.augment import augment, moved, permuted
from vit_jax.devices import meshes
from vit_jax.models.contract import images_of, size_and_patch
from vit_jax.objectives.contract import Batch, Learner
from vit_jax.objectives.networks import OWN, Networks, model_part
from vit_jax.optim.options import Optim, is_of_matrices, takes_two_gradients
from vit_jax.training.state import ANCHOR, TrainState, shardings_of
from vit_jax.training.upkeep.health import examine, update_is_made
from vit_jax.training.zero import placement

Metrics = dict[str, jax.Array]


def make_train_step(
    networks: Networks,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable[[jax.Array], jax.Array],
    config: Config,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step of a run.

    Args:
      networks: the model, the objective and its teacher.
      optimizer, learning_rate: from `optim.make`.
      config: the run's.

    Returns:
      `train_step(state, batch) -> (state, metrics)` with a batch as `data.batches.spec` describes it
      and metrics as float32 scalars. Not compiled yet: see `compile_train_step`.
    """
    gradient_of = make_gradient(networks, learning_rate, config)
    place = placement(networks, config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with dense.gradients_in(config.mesh.gradients):
            grads, metrics, own = gradient_of(state, batch)
        state = state.replace(params=place.updated(state.params))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        rate, (_, share) = learning_rate(state.step - state.health.skipped), scales(batch, config)
        if share != 1:
            rate, updates = jax.tree.map(lambda x: share * x, (rate, updates))
        params = optax.apply_updates(state.params, updates)
        followers = _update_averages(state, params, opt_state, own, networks, config.optim)
        # Roots of matrices may not be finite where gradients are.
        examined = updates if is_of_matrices(config.optim.name) else grads
        health = examine(state.health, state.step, metrics["loss"], examined, config.spike)
        kept = update_is_made(health, config.nonfinite)
        trained = state.replace(
            params=params,
            opt_state=opt_state,
            health=health,
            frozen_teachers=(),
            base=None,
            **followers,
        )
        unchanged = state.replace(health=health, frozen_teachers=(), base=None)
        new = jax.tree.map(lambda a, b: jnp.where(kept, a, b), trained, unchanged)
        new = _with_anchor_due(new, networks)
        # Whatever is selected or measured is a device's own shard, before parameters are gathered.
        new = new.replace(params=place.updated(new.params))

        metrics |= {
            # A skipped update does not advance the optimizer's own count.
            "learning_rate": jnp.float32(rate),
            "skipped_updates": health.skipped.astype(jnp.float32),
            "gradient_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "parameter_norm": optax.tree.norm(params),
        }
        return new.replace(
            step=state.step + 1, frozen_teachers=state.frozen_teachers, base=state.base
        ), metrics

    return train_step


def make_gradient(
    networks: Networks, learning_rate: Callable[[jax.Array], jax.Array], config: Config
) -> Callable:
    """The gradient of a step; arguments as of `make_train_step`.

    Returns:
      `gradient_of(state, batch) -> (gradients, metrics, own)`: trees like the parameters, sharded as their
      optimizer state is, of float32 scalars, and like `state.variables` after the step.
    """
    place = placement(networks, config)

    def stop_if_frozen(name: str, param: jax.Array) -> jax.Array:
        # Frozen parameters are not differentiated: a linear probe costs a forward pass.
        frozen = patterns.selected(config.optim.freeze, name, param.shape)
        if isinstance(frozen, bool):
            return jax.lax.stop_gradient(param) if frozen else param
        return jnp.where(patterns.along(frozen, param), jax.lax.stop_gradient(param), param)

    def gradient(state: TrainState, batch: Batch):
        on_devices = networks.for_devices().for_batch(batch)
        objective = on_devices.objective
        images, targets, model_key = prepare_inputs(on_devices, state, batch, config)
        weight, _ = scales(batch, config)

        def loss_of(params: dict, variables: dict, batch: Batch, key: jax.Array):
            trained = patterns.map_named(stop_if_frozen, params)
            learner = state.learner(on_devices, params=trained, variables=variables)
            with _frozen_statistics(learner, params, networks, config.optim):
                loss, metrics = objective(learner, batch, nnx.Rngs(dropout=key))
            means = {name: jnp.mean(value) for name, value in metrics.items()}
            variables = on_devices.variables_of(learner, variables)
            mean = jnp.mean(loss)
            others = (means | {"loss": mean}, variables, learner.observed)
            return mean if weight == 1 else weight * mean, others

        def of_batch(params: dict, *rest):
            grads, others = jax.grad(loss_of, has_aux=True)(place.stored(params), *rest)
            return place.updated(grads), others

        gradient_of = _accumulated(of_batch, config.accumulate)
        if takes_two_gradients(config.optim):
            from vit_jax.optim import sharpness

            rate = learning_rate(state.step - state.health.skipped)
            rho = sharpness.radius(config.optim, rate)
            gradient_of = sharpness.aware(gradient_of, config.optim, rho)
        own = {name: state.variables[name] for name in ("model", OWN) if name in state.variables}
        batch = {**images, **targets}
        grads, (metrics, own, observed) = gradient_of(state.params, own, batch, model_key)
        if observed:
            learner = state.learner(on_devices, variables=own)
            metrics |= objective.update_state(learner.own, observed, state.step)
            own = on_devices.variables_of(learner, own)
        return grads, metrics, own

    return gradient


def _frozen_statistics(
    learner: Learner, params: dict, networks: Networks, config: Optim
) -> contextlib.AbstractContextManager:
    """A context in which frozen batch norms keep their running statistics."""
    if not (config.freeze or networks.adapters):
        return contextlib.nullcontext()
    from vit_jax.training import frozen_statistics

    return frozen_statistics.freezing(learner, params, config.freeze)


def scales(batch: Batch, config: Config) -> tuple[float, float]:
    """What the loss and the learning rate of a batch are multiplied by, where its number of images varies."""
    if not config.data.native_budget:
        return 1.0, 1.0
    from vit_jax.data import native_batches

    return native_batches.share_of(config, len(batch["image"]))


def prepare_inputs(
    networks: Networks, state: TrainState, batch: Batch, config: Config
) -> tuple[dict[str, jax.Array], dict, jax.Array]:
    """What the model sees in a step: augmented images as they are named in the batch, what the objective
    makes of the labels, and the key of the step's other random choices. `networks` are those for these
    devices.
    """
    # Every random choice of a step is a function of (seed, step): a resumed run repeats none
    # and skips none.
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    augment_key, model_key = jax.random.split(key)
    targets, all_views = networks.objective.targets(batch), views.of(config)
    normalization = {
        "mean": config.data.mean,
        "std": config.data.std,
        "dtype": jnp.dtype(networks.model_config.dtype),
    }
    if all_views:
        from vit_jax.data import several_views

        images = several_views.augment_views(batch, all_views, augment_key, **normalization)
    elif config.data.native_tokens:
        from vit_jax.data.augmentation import patches

        channels = config.data.channels
        image, targets = patches.augment_patches(
            images_of(batch),
            targets,
            augment_key,
            config.augment,
            channels=channels,
            **normalization,
        )
        images = {"image": image}
    else:
        size, _ = size_and_patch(batch["image"].shape)
        image = batch["image"].reshape(-1, *size, config.data.channels)
        image, targets = augment(image, targets, augment_key, config.augment, **normalization)
        if networks.objective.needs_masks:
            targets = moved(targets, augment_key, config.augment)
        images = {"image": permuted(image, config.data)}
    images = jax.tree.map(partitioning.constrain_batch, images)
    return images, targets, model_key


def compile_train_step(
    train_step: Callable, shardings: TrainState, mesh: jax.sharding.Mesh, *, checked: bool = False
) -> Callable:
    """The jitted step: the state keeps its shardings and its memory, metrics are on every device.

    Args:
      checked: whether devices compute everything twice and compare, where the platform has that.
    """
    options = choices.compiler_options(mesh)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, meshes.batch_sharding(mesh)),
        out_shardings=(shardings, meshes.replicated(mesh)),
        compiler_options=options | choices.checker_options(mesh) if checked else options,
    )


class StepPrograms:
    """The compiled programs of a run's step: for batches of each shape one, and one that checks itself."""

    def __init__(
        self, train_step: Callable, like: TrainState, mesh: jax.sharding.Mesh, checker_every: int
    ):
        """Takes the step, to be compiled later.

        Args:
          train_step: see `make_train_step`.
          like: shapes, dtypes and shardings of the state.
          checker_every: steps between those that run the checked program, on platforms that have one; 0:
            never.
        """
        shardings = shardings_of(like)
        self._every = checker_every if choices.checker_options(mesh) else 0
        self._jitted = {
            checked: compile_train_step(train_step, shardings, mesh, checked=checked)
            for checked in {False, self._every > 0}
        }
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
          batches: those of the run, or their shapes, no two alike.
          first: the batch that is trained on first; programs for it come first, the others in their order.
        """
        # The sort keeps their order.
        batches = sorted(batches, key=lambda batch: _shapes(batch) != _shapes(first))
        with attend.record() as kinds:
            lowered = {
                (checked, _shapes(batch)): jitted.lower(state, batch)
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
        return self._compiled[checked, _shapes(batch)](state, batch)

    def close(self) -> None:
        """Gives up the programs whose compilation has not begun."""
        self._background.shutdown(wait=False, cancel_futures=True)


def _shapes(batch: Batch) -> tuple:
    return tuple((name, batch[name].shape) for name in sorted(batch))


def _accumulated(gradient_of: Callable, parts: int) -> Callable:
    """`gradient_of` over `parts` equal parts of the batch, one after the other; the mean is that of
    the whole batch. State that is not trained goes from each part to the next; observations of the parts are
    stacked, (parts, …).
    """

    def alone(*arguments):
        grads, (metrics, variables, observed) = gradient_of(*arguments)
        return grads, (metrics, variables, jax.tree.map(lambda x: x[None], observed))

    if parts == 1:
        return alone

    def accumulated(params, variables, batch, key):
        # Part i takes every parts-th example, so that each part is spread over all devices and
        # nothing moves between them.
        cut = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(carry, part):
            total, variables = carry
            batch, key = part
            batch = batch | {
                name: jax.tree.map(partitioning.constrain_batch, x)
                for name, x in batch.items()
                if name.startswith("image")
            }
            grads, (metrics, variables, observed) = gradient_of(params, variables, batch, key)
            return (jax.tree.map(jnp.add, total, (grads, metrics)), variables), observed

        first = jax.tree.map(lambda x: x[0], cut)
        grads, (metrics, *_) = jax.eval_shape(gradient_of, params, variables, first, key)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, metrics))
        keys = jax.random.split(key, parts)
        (total, variables), observed = jax.lax.scan(add, (zero, variables), (cut, keys))
        grads, metrics = jax.tree.map(lambda x: x / parts, total)
        return grads, (metrics, variables, observed)

    return accumulated


def _update_averages(
    state: TrainState,
    params: dict,
    opt_state: optax.OptState,
    variables: dict,
    networks: Networks,
    config: Optim,
) -> dict:
    """The averages that follow the parameters, and all state that is not trained, after an update.

    Args:
      params, opt_state, variables: after the update.
      networks: of the run; they may have a teacher that follows the student.
      config: `config.optim`.
    """
    updates = {"ema": state.ema, "variables": state.variables | variables}
    teacher = networks.moving_average()
    if state.ema is not None:
        updates["ema"] = optim.update_average(config, state.ema, params, opt_state, state.step)
    if "ema" in state.variables:
        updates["variables"]["ema"] = optim.ema_update(
            state.variables["ema"], variables["model"], config.ema, state.step
        )
    if teacher is not None:
        rate = 1 - teacher.momentum(state.step)
        updates["teacher"] = optim.follow(state.teacher, params, rate)
        if "teacher" in state.variables:
            updates["variables"]["teacher"] = optim.follow(
                state.variables["teacher"], variables, rate
            )
    return updates


def _with_anchor_due(state: TrainState, networks: Networks) -> TrainState:
    """The state at the end of a step, with its anchor refreshed if that is due: also where the update was skipped."""
    anchor = networks.objective.anchor()
    if anchor is None:
        return state
    refreshed = jax.lax.cond(
        anchor.is_due(state.step + 1),
        lambda new, old: new,
        lambda new, old: old,
        model_part(state.teacher),
        state.variables[ANCHOR],
    )
    return state.replace(variables=state.variables | {ANCHOR: refreshed})
