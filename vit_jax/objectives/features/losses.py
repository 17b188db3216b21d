"""How far a student's features are from a teacher's, and which teachers an image learns from (UNIC, ECCV 2024;
naver/unic). Functions of arrays, in float32.
"""

import jax
import jax.numpy as jnp

_LEAST = 1e-8  # of a length, as in PyTorch's cosine similarity


def distance(student: jax.Array, teacher: jax.Array, cosine: float) -> jax.Array:
    """`cosine` times 1 minus the cosine, and the rest times the smooth L1 distance: its mean over channels of half the
    square of a difference below 1, of a larger one minus a half.

    Args:
      student, teacher: (…, D).
      cosine: share of the first.

    Returns:
      (…) float32.
    """
    student, teacher = student.astype(jnp.float32), teacher.astype(jnp.float32)
    loss = jnp.float32(0)
    if cosine > 0:
        loss += cosine * (1 - cosines(student, teacher))
    if cosine < 1:
        apart = jnp.abs(student - teacher)
        smooth = jnp.where(apart < 1, 0.5 * jnp.square(apart), apart - 0.5)
        loss += (1 - cosine) * smooth.mean(-1)
    return loss


def cosines(x: jax.Array, y: jax.Array) -> jax.Array:
    """The cosine of each pair of vectors (…, D): (…)."""
    # The root of zero has no gradient.
    lengths = [jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(v), axis=-1), _LEAST**2)) for v in (x, y)]
    return jnp.sum(x * y, axis=-1) / (lengths[0] * lengths[1])


def combined(losses: jax.Array, taught: jax.Array) -> jax.Array:
    """The loss of each image, whose mean is that of all pairs of an image and a teacher that it learns from.

    Args:
      losses: of each teacher and image, (T, B).
      taught: which of them count, (T, B), 1 or 0, at least one of an image.

    Returns:
      (B,).
    """
    return (taught * losses).sum(0) * (taught.shape[1] / taught.sum())


def drop(key: jax.Array, losses: jax.Array, rate: float) -> jax.Array:
    """Which teachers each image learns from: the one of the largest loss, each of the others with probability
    1 - `rate`. Losses (T, B) -> (T, B), 1 or 0.
    """
    largest = jnp.arange(len(losses))[:, None] == losses.argmax(0)
    return (largest | jax.random.bernoulli(key, 1 - rate, losses.shape)).astype(losses.dtype)
