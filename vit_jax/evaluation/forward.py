"""From images to what a model says of them: what evaluation, prediction and the benchmark of
inference share.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.compute import choices
from vit_jax.data.augmentation.augment import normalize
from vit_jax.models import registry
from vit_jax.models.contract import ModelOutput
from vit_jax.models.registry import Weights


def make_forward(
    definition: nnx.GraphDef, model_config, data
) -> Callable[[Weights, jax.Array], ModelOutput]:
    """The forward pass, to be compiled.

    Args:
      definition: the model's, from `registry.abstract` or `registry.split`.
      model_config: the family's config.
      data: that section of a run's config; `mean` and `std` are used.

    Returns:
      `forward(weights, images)`: uint8 (B, H, W, C) to what the model gives, computed in the type that
      suits the devices that are traced for.
    """

    def forward(weights: Weights, images: jax.Array) -> ModelOutput:
        dtype = jnp.dtype(choices.with_compute_dtype(model_config).dtype)
        images = normalize(images, data.mean, data.std, dtype)
        return nnx.merge(registry.for_devices(definition, model_config), *weights)(images)

    return forward
