"""Vectors of an image's patches that are compared with those of texts: maps by words.

Of dino.txt they are the patches after its blocks, compared with the half of a text's vector that was trained beside the
mean of patches. Of an image tower that pools its patches they are what it gives of a patch by itself. A class token is
never pooled of patches: without the blocks of dino.txt such a tower has none.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.models import layer_features, layout
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives.image_text.image_text import ImageText, ImageTextModules, unit

_POOLS = ("mean", "gem", "map")


def check_patches(objective: ImageText) -> None:
    """Raises `ConfigError` for an image tower whose patches are not compared with texts."""
    model = objective.context.model
    is_pooled = type(model) is PublishedViTConfig and model.pool in _POOLS
    if not (objective.options.image_blocks or is_pooled):
        raise ConfigError(
            "maps by words need patches that are like texts, and this image tower was trained by a vector that is not "
            f"made of patches alone (config.model.pool = {getattr(model, 'pool', None)!r}): train one with "
            f"config.objective.image_blocks=2, or a ViT with config.model.pool of {', '.join(_POOLS)}"
        )


def patch_vectors(
    objective: ImageText, modules: ImageTextModules, model: nnx.Module, images: jax.Array
) -> jax.Array:
    """Of normalised images (B, H, W, C): (B, h, w, E) float32 of length 1, or with E / 2, see `part_of_texts`."""
    output, config = model(images), objective.context.model
    grid = layout.grid(config)
    if modules.image_head is not None:
        _, vectors = modules.image_head(output, config)
    else:
        patches = layer_features.last(output, config).patches
        alone = patches.reshape(-1, 1, patches.shape[-1])
        # A kept class token is removed before patches are pooled.
        removed = 0 if config.pool_prefix else config.tokens_with_position
        features = model.forward_head(jnp.repeat(alone, 1 + removed, axis=1), {}).features
        vectors = objective.projected(modules, features)
    return unit(vectors.reshape(len(images), *grid, -1))


def part_of_texts(objective: ImageText, vectors: np.ndarray) -> np.ndarray:
    """What of the vectors of texts (n, E) patches are compared with, of length 1."""
    if objective.options.image_blocks:
        vectors = vectors[:, vectors.shape[1] // 2 :]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
