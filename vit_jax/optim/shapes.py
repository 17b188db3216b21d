"""The shapes of the learning rate after warm-up, relative to its peak. Each is a function of the updates since then."""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.optim.options import Optim


@dataclasses.dataclass(frozen=True)
class Span:
    """What a shape may read. The options that it reads are declared where it is registered.

    Attributes:
      steps: how many there are after warm-up, at least 1.
      end: `lr_end` relative to `lr`.
      timescale: in steps.
      boundaries: in steps after warm-up.
      config: `config.optim`.
    """

    steps: int
    end: float
    timescale: int
    boundaries: tuple[int, ...]
    config: Optim


def cosine(k: jax.Array, span: Span) -> jax.Array:
    """Half a period, from 1 to the end."""
    done = jnp.minimum(k / span.steps, 1)
    return span.end + (1 - span.end) * 0.5 * (1 + jnp.cos(jnp.pi * done))


def linear(k: jax.Array, span: Span) -> jax.Array:
    """A straight line from 1 to the end."""
    return span.end + (1 - span.end) * (1 - jnp.minimum(k / span.steps, 1))


def polynomial(k: jax.Array, span: Span) -> jax.Array:
    """The line to the power of `power`."""
    left = 1 - jnp.minimum(k / span.steps, 1)
    return span.end + (1 - span.end) * left**span.config.power


def rsqrt(k: jax.Array, span: Span) -> jax.Array:
    """1 / √(1 + k / timescale)."""
    return 1 / jnp.sqrt(1 + k / span.timescale)


def constant(k: jax.Array, span: Span) -> jax.Array:
    """1."""
    return jnp.ones_like(k)


def staircase(k: jax.Array, span: Span) -> jax.Array:
    """`factor` to the power of the number of boundaries reached."""
    reached = sum((k >= boundary).astype(jnp.float32) for boundary in span.boundaries)
    return span.config.factor**reached
