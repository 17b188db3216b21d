"""The learning rate over time, relative to its peak: warm-up, a shape, cool-down. Optimizers are
not here.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.optim import shapes
from vit_jax.optim.options import SCHEDULES, Optim
from vit_jax.optim.shapes import Span

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
Shape = Callable[[jax.Array, Span], jax.Array]
SHAPES: dict[str, Shape] = {name: getattr(shapes, name) for name in SCHEDULES}


def register(name: str, shape: Shape, *, reads: Sequence[str] = ()) -> None:
    """Adds a schedule from outside the package: `config.optim.schedule=NAME`.

    Args:
      name: of the schedule.
      shape: from the number of updates since warm-up, float32, and a `Span`, to the learning rate relative to its peak.
      reads: the options of `config.optim` that it reads: 'lr_end', 'timescale', 'boundaries', 'factor', 'power', and
        'cooldown' if it does not fall by itself. A run that sets another one of them is refused.
    """
    SHAPES[name] = shape
    SCHEDULES[name] = tuple(reads)


def schedule(
    config: Optim, *, total_steps: int, to_steps: Callable[[str], int], rise: str = "warmup"
) -> Schedule:
    """The learning rate relative to its peak, as a function of the number of updates already made.

    With t updates made, W the warm-up, T the total and p = clip((t - W) / (T - W), 0, 1), the shape
    is (ViT Table 3, B.1.1; Scaling ViT §3.5; e is `lr_end` relative to `lr`)

        cosine     e + (1 - e) (1 + cos(pi p)) / 2
        linear     e + (1 - e) (1 - p)
        polynomial e + (1 - e) (1 - p)^power (EoMT, arXiv 2503.19108)
        rsqrt      1 / sqrt(1 + max(t - W, 0) / timescale)
        constant   1
        staircase  factor^n, with n of the boundaries reached (BiT §3.3)

    times min(1, t / W) during warm-up, times (T - t) / cooldown at the end. So with warm-up the
    first update, for which t = 0, changes no parameter: big_vision's convention, kept so that its
    recipes give the same numbers step by step.

    Args:
      config: `config.optim`.
      total_steps: T, at least 1.
      to_steps: a duration such as '5%' in steps.
      rise: the field that says how long the warm-up is.

    Returns:
      A function of a scalar (or array) of integers, to float32 in [0, 1].

    Raises:
      ConfigError: a field has no effect with this shape, or the parts do not fit into the run.
    """
    warmup = _steps(config, rise, to_steps)
    cooldown = _steps(config, "cooldown", to_steps)
    timescale = _steps(config, "timescale", to_steps)
    boundaries = _boundaries(config, to_steps, warmup, total_steps)
    if config.schedule not in SHAPES:
        hint = nearest(config.schedule, SHAPES)
        raise ConfigError(f"config.optim.schedule = {config.schedule!r} is not a schedule{hint}")
    shape = SHAPES[config.schedule]
    span = Span(
        steps=max(total_steps - warmup, 1),
        end=config.lr_end / config.lr if config.lr else 0.0,
        timescale=timescale,
        boundaries=tuple(boundary - warmup for boundary in boundaries),
        config=config,
    )
    read = SCHEDULES[config.schedule]
    if cooldown and "cooldown" not in read:
        raise ConfigError(
            f"config.optim.cooldown has no use with the {config.schedule} schedule, which has its own end; "
            "set it to '0 steps'"
        )
    if config.lr_end and "lr_end" not in read:
        ending = [name for name, options in SCHEDULES.items() if "lr_end" in options]
        raise ConfigError(
            f"config.optim.lr_end has no use with the {config.schedule} schedule; "
            f"set it to 0: only {', '.join(ending)} end there"
        )
    if config.lr_end > config.lr:
        raise ConfigError(
            f"config.optim.lr_end = {config.lr_end} is above the peak, lr = {config.lr}; "
            "it is a learning rate, not a share of one"
        )
    if "timescale" in read and timescale < 1:
        raise ConfigError(
            f"config.optim.timescale = {config.timescale!r} must be at least one step"
        )
    if warmup + cooldown > total_steps:
        raise ConfigError(
            f"config.optim.{rise} and cooldown take {warmup} + {cooldown} steps, more than the {total_steps} "
            "of the whole run; shorten them or train for longer"
        )

    def relative(count: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(count, jnp.float32)
        value = shape(jnp.maximum(t - warmup, 0), span)
        if warmup:
            value *= jnp.minimum(t / warmup, 1)
        if cooldown:
            value *= jnp.clip((total_steps - t) / cooldown, 0, 1)
        return value

    return relative


def late_schedule(config: Optim, *, total_steps: int, to_steps: Callable[[str], int]) -> Schedule:
    """The schedule of the parameters `config.late`: 0 during the warm-up of the others; from then on `schedule` with
    the warm-up `late_warmup` over the steps that remain (EoMT, arXiv 2503.19108).

    Raises:
      ConfigError: see `schedule`; or boundaries are set, which count from the beginning of the run.
    """
    if "boundaries" in SCHEDULES[config.schedule]:
        raise ConfigError(
            f"config.optim.late = {config.late!r} has no use with the {config.schedule} schedule: set another "
            "schedule, or late to ()"
        )
    rest, warmup = (_steps(config, field, to_steps) for field in ("warmup", "late_warmup"))
    if rest + warmup > total_steps:
        raise ConfigError(
            f"config.optim.warmup and late_warmup take {rest} + {warmup} steps, and the whole run has {total_steps}; "
            "shorten them or train for longer"
        )
    own = schedule(config, total_steps=total_steps - rest, to_steps=to_steps, rise="late_warmup")

    def relative(count: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(count, jnp.float32) - rest
        return jnp.where(t < 0, 0.0, own(jnp.maximum(t, 0)))

    return relative


def _boundaries(config: Optim, to_steps, warmup: int, total_steps: int) -> list[int]:
    if ("boundaries" in SCHEDULES.get(config.schedule, ())) != bool(config.boundaries):
        raise ConfigError(
            f"config.optim.boundaries = {config.boundaries!r} with the {config.schedule} schedule: "
            "the staircase schedule needs them, e.g. ('30%', '60%', '90%'), and no other uses them"
        )
    try:
        boundaries = [to_steps(boundary) for boundary in config.boundaries]
    except ConfigError as error:
        raise ConfigError(f"config.optim.boundaries: {error}") from error
    steps = [warmup, *boundaries, total_steps]
    if boundaries and any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ConfigError(
            f"config.optim.boundaries = {config.boundaries!r} are steps {boundaries}: they must rise, "
            f"from the end of warm-up ({warmup}) to that of the run ({total_steps})"
        )
    return boundaries


def _steps(config: Optim, field: str, to_steps: Callable[[str], int]) -> int:
    try:
        return to_steps(getattr(config, field))
    except ConfigError as error:
        raise ConfigError(f"config.optim.{field}: {error}") from error
