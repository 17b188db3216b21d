"""What is learned once and shared by all examples of a batch: positions, class tokens, registers."""

import jax

from vit_jax.compute.platform import by_platform


@by_platform
def per_example(learned: jax.Array, batch: int) -> jax.Array:
    """Learned rows as they are added to the tokens of each example.

    Args:
      learned: (1, n, D).
      batch: number of examples.

    Returns:
      (1, n, D), or (batch, n, D) on platforms that sum the gradient over the batch their own way.
    """
    return learned
