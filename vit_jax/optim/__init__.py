"""From gradients to updates: the whole of `config.optim` as one optax transformation.

Here is what all optimizers share: clipping, learning rates, weight decay, freezing; and Polyak
averaging, which is no part of the update. The optimizers are in `optimizers.py`, those of matrices in
`preconditioners`, the learning rate over time in `schedules.py`, over parameters in `multipliers.py`.
Where the gradient is taken, in `sharpness.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models.classifier import INPUTS
from vit_jax.optim import multipliers
from vit_jax.optim.optimizers import OPTIMIZERS, SCALED_BY_TRUST
from vit_jax.optim.options import Optim, keeps_average
from vit_jax.optim.schedules import Schedule, late_schedule, schedule

__all__ = [
    "OPTIMIZERS", "ema_update", "keeps_average", "late_schedule", "make", "schedule", "update_average",
]  # fmt: skip


def make(
    config: Optim,
    params: Any,
    *,
    total_steps: int,
    to_steps: Callable[[str], int],
    layers: Mapping[str, int] | None = None,
    inputs: Sequence[str] = INPUTS,
    starts: Mapping[str, int] | None = None,
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer of a run.

    Updates are made in this order:
    1. clip the gradients of all parameters that are not frozen, together, to the norm `clip`; for decay
       by 'gradient', add wd p to them;
    2. the named optimizer turns them into a direction u;
    3. update = -s (lr m u + d p), with s the relative schedule (`late` parameters have their own), m the
       parameter's multiplier of the learning rate and d its decay: d = lr m wd for decay by 'lr' (AdamW:
       wherever the learning rate goes, the decay goes), d = wd by 'schedule' (big_vision: m does not touch
       the decay), d = 0 by 'gradient', where wd is `weight_decay` times the multiplier of
       `weight_decay_rules`; of LAMB and LARS, whose decay is part of their direction (see `trust`), d = 0;
    4. frozen parameters get an update of exactly 0. Nothing is stored for them. So do frozen layers of a
       stack, for which state is kept as for the others.

    Args:
      config: `config.optim`.
      params: parameters, or their shapes as from `jax.eval_shape`; a tree of float32 arrays whose
        names (see `patterns`) the rules match.
      total_steps: length of the run.
      to_steps: a duration such as '5%' in steps.
      layers: for layer-wise decay, see `classifier.ClassifierConfig.layers`; by default the one stack of
        layers that the parameters have.
      inputs: the same, see `classifier.ClassifierConfig.inputs`.
      starts: the updates before parameters begin to be trained, by the beginning of their names; see `late_terms`.

    Returns:
      The transformation, whose `update` needs the parameters, and the learning rate as a function
      of the number of updates made.

    Raises:
      ConfigError: some field of `config` is wrong, or a pattern matches no parameter.
    """
    if config.name not in OPTIMIZERS:
        from vit_jax.optim import preconditioners

        preconditioners.check_name(config.name)
    if any(config.sam_rho) or config.sam_alpha:
        from vit_jax.optim import sharpness

        sharpness.check(config)
    relative = schedule(config, total_steps=total_steps, to_steps=to_steps)
    shapes = {name: p.shape for name, p in patterns.named(params).items()}
    frozen, frozen_layers = patterns.select(config.freeze, shapes, "config.optim.freeze")
    patterns.check_patterns(config.late, list(shapes), "config.optim.late")
    relatives = dict.fromkeys(shapes, relative)
    if late := patterns.matching(config.late, shapes):
        of_late = late_schedule(config, total_steps=total_steps, to_steps=to_steps)
        relatives |= dict.fromkeys(late, of_late)
    if len(frozen) == len(shapes):
        raise ConfigError("config.optim.freeze leaves no parameter to train")

    rates, decays = _rates_and_decays(config, shapes, layers, inputs)

    def make_direction(names: Sequence[str]) -> optax.GradientTransformation:
        if config.name in OPTIMIZERS:
            return OPTIMIZERS[config.name](config)
        return preconditioners.make(config, params, inputs, names)

    if starts:
        from vit_jax.optim import late_terms

        direction = late_terms.with_own_states(make_direction, list(shapes), starts)
    else:
        direction = make_direction(list(shapes))
    decay_over_time = _decay_over_time(config, total_steps)
    if config.weight_decay_by == "gradient":
        direction = optax.chain(_penalty(decays), direction)
        decays = dict.fromkeys(decays, 0.0)
    if config.name in SCALED_BY_TRUST:
        _check_inside(config)
        from vit_jax.optim import trust

        inside = multipliers.weight_decays(config, shapes)
        direction = trust.with_trust_ratio(config.name, direction, inside)
        decays = dict.fromkeys(decays, 0.0)
    trained = optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
        direction,
        _step(relatives, rates, decays, decay_over_time),
    )
    # Only where it is needed, since saved states have a place for each part of a chain.
    trained = optax.chain(trained, late_terms.rest_until(starts)) if starts else trained
    hold = [_hold(frozen_layers)] if frozen_layers else []
    trained = optax.chain(*hold, trained, *hold) if hold else trained
    if config.name == "schedule_free":
        from vit_jax.optim import schedule_free

        schedule_free.check(config, to_steps(config.cooldown))
        trained = schedule_free.averaged(trained, relative, config)
        trained = optax.chain(trained, *hold) if hold else trained
    is_frozen = patterns.map_named(lambda name, _: name in frozen, params)
    optimizer = optax.chain(
        optax.masked(trained, jax.tree.map(lambda f: not f, is_frozen)),
        optax.masked(optax.set_to_zero(), is_frozen),
    )
    return optimizer, lambda count: config.lr * relative(count)


def update_average(config: Optim, ema: Any, params: Any, opt_state: Any, count: jax.Array) -> Any:
    """The average that is evaluated, after an update: of Polyak's kind or schedule-free's.

    Args:
      config: `config.optim`.
      ema: before the update.
      params, opt_state: after it.
      count: updates made before it.
    """
    if config.name == "schedule_free":
        from vit_jax.optim import schedule_free

        return schedule_free.mean(config, params, opt_state)
    return ema_update(ema, params, config.ema, count)


def ema_update(ema: Any, params: Any, decay: float, count: jax.typing.ArrayLike) -> Any:
    """Polyak averaging: ema + (1 - d) (params - ema), with d = min(decay, (1 + count) / (10 +
    count)).

    The second term lets the average forget the initialisation in short runs, as TensorFlow's
    ExponentialMovingAverage does when given the step; for ViT's 0.9999 (ViT §4.1) it holds for the
    first 90,000 updates. An average that equals its parameter stays so exactly.

    Args:
      ema: the average so far, at first the parameters themselves; float32.
      params: after the update.
      decay: in [0, 1).
      count: updates made before this one, 0 at first.
    """
    count = jnp.asarray(count, jnp.float32)
    rate = 1 - jnp.minimum(decay, (1 + count) / (10 + count))
    return follow(ema, params, rate)


def follow(average: Any, target: Any, rate: jax.typing.ArrayLike) -> Any:
    """average + rate (target - average); counts and other integers are the target's."""

    def step(a, t):
        return a + rate * (t - a) if jnp.issubdtype(a.dtype, jnp.floating) else t

    return jax.tree.map(step, average, target)


class _StepState(NamedTuple):
    count: jax.Array


def _decay_over_time(config: Optim, total_steps: int) -> Schedule | None:
    """The weight decay relative to that at the beginning; `None` where it stays."""
    if config.weight_decay_end is None:
        return None
    if not config.weight_decay or config.weight_decay_by == "gradient":
        raise ConfigError(
            f"config.optim.weight_decay_end = {config.weight_decay_end} is where config.optim.weight_decay = "
            f"{config.weight_decay} goes: that must be above 0, and not config.optim.weight_decay_by=gradient"
        )
    change = config.weight_decay_end / config.weight_decay - 1

    def relative(count: jax.typing.ArrayLike) -> jax.Array:
        done = jnp.minimum(jnp.asarray(count, jnp.float32) / total_steps, 1)
        return 1 + change * (1 - jnp.cos(jnp.pi * done)) / 2

    return relative


def _check_inside(config: Optim) -> None:
    """Raises `ConfigError` where the decay is not inside the direction, as a trust ratio needs it."""
    if config.weight_decay_by != "lr" or config.weight_decay_end is not None:
        raise ConfigError(
            f"config.optim.name = {config.name!r} has its weight decay inside the direction whose length it sets: it "
            f"takes config.optim.weight_decay_by='lr' (got {config.weight_decay_by!r}), and no weight_decay_end"
        )


def _step(
    relatives: dict[str, Schedule], rates: dict, decays: dict, decay_over_time: Schedule | None
) -> optax.GradientTransformation:
    """Directions u to updates -s (rate u + decay p), s being the parameter's relative schedule; the decay may have one
    of its own.
    """

    def update(directions, state, params):
        scales = {schedule: schedule(state.count) for schedule in dict.fromkeys(relatives.values())}
        decay = decay_over_time(state.count) if decay_over_time else None

        def step(name, u, p):
            change = rates[name] * u
            if np.any(decays[name]):
                change += (decays[name] if decay is None else decay * decays[name]) * p
            return -scales[relatives[name]] * change

        return patterns.map_named(step, directions, params), _StepState(state.count + 1)

    return optax.GradientTransformation(lambda params: _StepState(jnp.zeros([], jnp.int32)), update)


def _hold(layers: Mapping[str, np.ndarray]) -> optax.GradientTransformation:
    """Gradients or updates of exactly 0 for these layers, (layers,) bool by parameter name."""

    def hold(name: str, u: jax.Array) -> jax.Array:
        return jnp.where(patterns.along(layers[name], u), 0, u) if name in layers else u

    return optax.stateless(lambda updates, _: patterns.map_named(hold, updates))


def _penalty(decays: dict) -> optax.GradientTransformation:
    """Gradients plus decay times parameter."""

    def add(name, g, p):
        return g + decays[name] * p if np.any(decays[name]) else g

    return optax.stateless(lambda g, params: patterns.map_named(add, g, params))


def _rates_and_decays(
    config: Optim,
    shapes: dict[str, tuple[int, ...]],
    layers: Mapping[str, int] | None,
    inputs: Sequence[str],
) -> tuple[dict, dict]:
    """The factors of the direction and of the parameter, by parameter name; of decoupled ones those at the
    peak of the schedule.
    """
    relative = multipliers.learning_rates(config, shapes, layers, inputs)
    rates = {name: config.lr * multiplier for name, multiplier in relative.items()}
    decays = multipliers.weight_decays(config, shapes)
    if config.weight_decay_by == "lr":
        decays = {name: rates[name] * decay for name, decay in decays.items()}
    return _float32(rates), _float32(decays)


def _float32(values: dict) -> dict:
    return {name: np.float32(value) for name, value in values.items()}
