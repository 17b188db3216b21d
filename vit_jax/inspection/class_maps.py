"""Which patches raise the logit of a class: Grad-CAM (Selvaraju et al. 2017, arXiv 1610.02391, Eq. 1 and 2) of the
tokens before the last block. The patches after it would not do: a head that reads the class token does not depend on
them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.compute.stack import Joining
from vit_jax.data.augmentation import augment
from vit_jax.data.options import Data
from vit_jax.inspection.contract import InspectionContext, Section, picture_of
from vit_jax.inspection.maps import overlay
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.pictures import tiles

_TITLE = "Maps by class"


def has_class_maps(config: ClassifierConfig) -> bool:
    """Whether the model is a ViT with a head, whose tokens before the last block are at hand."""
    if type(config) is not PublishedViTConfig or not config.num_classes:
        return False
    return not (config.weighted_layers or config.token_merging or config.differential)


def class_maps(model: nnx.Module, images: jax.Array, classes: jax.Array) -> jax.Array:
    """Grad-CAM: ReLU(Σ_k α_k A_k), where A_k is channel k of the patches before the last block, and α_k the mean over
    patches of the derivative of the class's logit by A_k.

    Args:
      model: a ViT, see `has_class_maps`.
      images: (B, H, W, C), normalised.
      classes: (B,) numbers.

    Returns:
      (B, h, w) float32, 0 or more.
    """
    config = model.config
    start = model.add_positions(model.patches(images))
    before: list[jax.Array] = []

    def logit(added: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The logits of the classes, summed over images, if `added` is added to the tokens before the last block; and
        those tokens.
        """

        def join(tokens: jax.Array) -> jax.Array:
            before[:] = [tokens]
            return tokens + added

        tokens, _ = model.encode(start, joining=Joining(1, join, lambda number, x: None))
        logits = model.forward_head(_without_registers(tokens, config), {}).logits
        return jnp.take_along_axis(logits, classes[:, None], axis=1).sum(), before[0]

    gradient, tokens = jax.grad(logit, has_aux=True)(jnp.zeros_like(start))
    rows, columns = config.grid
    patches = tokens[:, -rows * columns :].astype(jnp.float32)
    weights = gradient[:, -rows * columns :].astype(jnp.float32).mean(1, keepdims=True)
    return jax.nn.relu((weights * patches).sum(-1)).reshape(-1, rows, columns)


def _without_registers(tokens: jax.Array, config: PublishedViTConfig) -> jax.Array:
    """Tokens as the model reads them: `encode` leaves registers where tokens join."""
    if not config.registers or config.pool_prefix:
        return tokens
    placed = config.tokens_with_position
    return jnp.concatenate([tokens[:, :placed], tokens[:, placed + config.registers :]], axis=1)


def make_class_maps(
    config: ClassifierConfig, weights: registry.Weights, data: Data
) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """Images (B, H, W, C) uint8 and numbers of classes (B,) to `class_maps`; `None` of a model that has none."""
    if not has_class_maps(config):
        return None
    definition = registry.abstract(config)[0]

    @jax.jit
    def compute(weights: registry.Weights, images: jax.Array, classes: jax.Array) -> jax.Array:
        prepared = augment.prepared(images, data, jnp.dtype(config.dtype))
        return class_maps(nnx.merge(definition, *weights), prepared, classes)

    return lambda images, classes: np.asarray(compute(weights, images, classes))


def inspect(context: InspectionContext) -> Section:
    """The maps of the predicted class, or of those that are asked for, over the images shown."""
    section = Section(_TITLE, "")
    if context.class_maps is None:
        section.text = "No meaning here: it needs a ViT of equal blocks with a head."
        return section
    images = context.images[: context.shown]
    named = context.options.map_classes
    chosen = [context.classes.index(name) for name in named] or [None]
    pictures = []
    labels = []
    maps = []
    for number, image in enumerate(images):
        pictures.append(picture_of(image))
        labels.append(context.caption(number))
        predicted = context.classes.index(context.predicted[number])
        for wanted in chosen:
            of_class = predicted if wanted is None else wanted
            found_map = context.class_maps(image[None], np.array([of_class]))[0]
            maps.append(found_map)
            pictures.append(overlay(picture_of(image), found_map))
            labels.append(context.classes[of_class])
    of_classes = ", ".join(named) if named else "the predicted class of each image"
    section.text = (
        f"Grad-CAM of {of_classes}: bright patches raise the logit of the class, by the gradient before the last "
        "block. Each map has its own scale of brightness. --map_classes=NAME,… chooses other classes. A map says what "
        "the logit depends on near this image, and not what would change the prediction."
    )
    section.numbers["class_maps"] = np.stack(maps).reshape(len(images), len(chosen), *context.grid)
    section.figures["class_maps"] = tiles.draw_tiles(
        _TITLE, pictures, names=labels, columns=(1 + len(chosen)) * (3 if len(chosen) == 1 else 1),
        side=150,
    )  # fmt: skip
    return section
