"""From images to what a model says of them: what evaluation, prediction and the benchmark of
inference share.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.data.augmentation.augment import normalize
from vit_jax.models import execution, registry
from vit_jax.models.registry import Weights


def make_logits(
    definition: nnx.GraphDef, model_config, data
) -> Callable[[Weights, jax.Array], jax.Array]:
    """The forward pass, to be compiled.

    Args:
      definition: the model's, from `registry.abstract` or `nnx.split`.
      model_config: the family's config.
      data: that section of a run's config; `mean` and `std` are used.

    Returns:
      `logits(weights, images)`: uint8 (B, S, S, 3) -> float32 (B, classes), computed in the type that
      suits the devices that are traced for.
    """

    def logits(weights: Weights, images: jax.Array) -> jax.Array:
        dtype = jnp.dtype(execution.computed(model_config).dtype)
        images = normalize(images, data.mean, data.std, dtype)
        return nnx.merge(registry.here(definition, model_config), *weights)(images).logits

    return logits
