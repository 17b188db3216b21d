"""Masked patch prediction: learning without labels, as the ViT paper tried it (arXiv 2010.11929,
§4.6 and §B.1.2).

A share of the patch embeddings is corrupted: 80 % of these become a learned embedding, 10 % another
patch of the same image, 10 % stay. What is predicted of each corrupted patch, from its own token:

- `mean_color`: its mean colour of 3 bits a channel, one of 512;
- `downsized`: the colours of its 4 × 4 parts, 16 predictions of 512;
- `full`: every pixel in [0, 1], by the mean squared error.

The corrupted patches of an image are an exact share, drawn without repetition.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.models.embeddings import cut_patches
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives.contract import Batch, Learner, Objective, ObjectiveContext

_BITS = 3
_COLORS = 2 ** (3 * _BITS)
_PARTS = 4  # of a side, `downsized`
_MASKED, _OTHER = 0.8, 0.1  # shares of the corrupted patches


@dataclasses.dataclass(frozen=True)
class MaskedPatchesOptions:
    """What `config.objective` says for masked patch prediction."""

    target: str = option(
        "mean_color",
        "what is predicted of a patch",
        choices=("mean_color", "downsized", "full"),
    )
    corrupted: float = option(0.5, "share of the patches that are corrupted", above=0, below=1)


class MaskedPatchesModules(nnx.Module):
    """The mask's embedding and the layer that predicts."""

    def __init__(self, width: int, outputs: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.mask = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (width,)))
        self.head = nnx.Linear(width, outputs, dtype=dtype, rngs=rngs)


class MaskedPatches(Objective):
    """The loss over corrupted patches; the metric of the discrete targets is `accuracy`."""

    Options = MaskedPatchesOptions
    needs_labels = False
    mixes = False

    def __init__(self, options: MaskedPatchesOptions, context: ObjectiveContext):
        super().__init__(options, context)
        model = context.model
        if not isinstance(model, PublishedViTConfig):
            raise ConfigError(
                "objective masked_patches needs a model of patches: a ViT, a DeiT or a hybrid"
            )
        rows, columns = model.grid
        if model.height_width[0] % rows or model.height_width[1] % columns:
            raise ConfigError(
                f"objective masked_patches predicts as many equal patches as the model has tokens: images of "
                f"{sizes.size_text(model.image_size)} cannot be split into {rows} x {columns}"
            )
        self.patches = rows * columns
        self.count = round(options.corrupted * self.patches)
        check_shares("corrupted", options.corrupted, self.count, self.patches)
        height, width = (s // n for s, n in zip(model.height_width, model.grid, strict=True))
        self.patch = height, width
        if options.target == "downsized" and (height % _PARTS or width % _PARTS):
            raise ConfigError(
                f"config.objective.target = 'downsized' splits patches into {_PARTS} x {_PARTS}, which "
                f"patches of {height} x {width} pixels cannot be"
            )

    @property
    def outputs(self) -> int:
        """Predicted numbers of a patch."""
        height, width = self.patch
        per_patch = {"mean_color": _COLORS, "downsized": _PARTS**2 * _COLORS}
        return per_patch.get(self.options.target, height * width * self.context.model.channels)

    def make_modules(self, rngs: nnx.Rngs) -> MaskedPatchesModules:
        model = self.context.model
        return MaskedPatchesModules(
            model.width, self.outputs, dtype=jnp.dtype(model.dtype), rngs=rngs
        )

    def flops(self) -> int:
        model = self.context.model
        return model.flops() + 2 * self.count * model.width * self.outputs

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        images, key = batch["image"], rngs.dropout()
        chosen, x = corrupt(
            learner.model.patches(images, deterministic=False, rngs=rngs),
            learner.modules.mask[...],
            key,
            count=self.count,
        )
        tokens, _ = learner.model.encode(
            learner.model.add_positions(x), deterministic=False, rngs=rngs
        )
        tokens = tokens[:, tokens.shape[1] - self.patches :]
        tokens = jnp.take_along_axis(tokens, chosen[..., None], axis=1)
        predicted = learner.modules.head(tokens).astype(jnp.float32)
        pixels = self._pixels(images)
        pixels = jnp.take_along_axis(pixels, chosen[:, :, None, None, None], axis=1)
        if self.options.target == "full":
            error = predicted - pixels.reshape(predicted.shape)
            return jnp.square(error).mean((1, 2)), {}
        parts = 1 if self.options.target == "mean_color" else _PARTS
        colors = mean_colors(pixels, parts)
        predicted = predicted.reshape(*colors.shape, _COLORS)
        loss = optax.softmax_cross_entropy_with_integer_labels(predicted, colors)
        accuracy = (predicted.argmax(-1) == colors).astype(jnp.float32)
        return loss.mean((1, 2)), {"accuracy": accuracy.mean((1, 2))}

    def _pixels(self, images: jax.Array) -> jax.Array:
        """Normalised images (B, H, W, C) to patches of pixels in [0, 1], (B, N, P, Q, C) float32."""
        mean, std = (jnp.array(x, jnp.float32) for x in (self.context.mean, self.context.std))
        pixels = images.astype(jnp.float32) * std + mean
        patches = cut_patches(pixels, self.context.model.grid)
        return patches.reshape(*patches.shape[:2], *self.patch, images.shape[-1])


def check_shares(option: str, share: float, predicted: int, patches: int) -> None:
    """Raises `ConfigError` unless some patches are seen and some predicted."""
    if not 0 < predicted < patches:
        raise ConfigError(
            f"config.objective.{option} = {share} of {patches} patches leaves {patches - predicted} to see and "
            f"{predicted} to predict: both must be some"
        )


def corrupt(
    patches: jax.Array, mask: jax.Array, key: jax.Array, *, count: int
) -> tuple[jax.Array, jax.Array]:
    """Corrupts `count` patches of each image.

    Args:
      patches: embeddings (B, N, D).
      mask: the learned embedding (D,).

    Returns:
      The places of the corrupted patches, (B, count) int32 without repetition, and all patches.
    """
    b, n, _ = patches.shape
    place_key, kind_key, other_key = jax.random.split(key, 3)
    # The same places by rank for the loss and for the corruption.
    order = jnp.argsort(jax.random.uniform(place_key, (b, n)), axis=1)
    rank = jnp.argsort(order, axis=1)
    kind = jnp.where(rank < count, jax.random.uniform(kind_key, (b, n)), 1.0)[..., None]
    shift = jax.random.randint(other_key, (b, n), 1, max(n, 2))
    other = jnp.take_along_axis(patches, ((jnp.arange(n) + shift) % n)[..., None], axis=1)
    corrupted = jnp.where(kind < _MASKED + _OTHER, other, patches)
    corrupted = jnp.where(kind < _MASKED, mask.astype(patches.dtype), corrupted)
    return order[:, :count], corrupted


def mean_colors(pixels: jax.Array, parts: int) -> jax.Array:
    """The mean colours of `parts` × `parts` parts of patches (B, n, P, Q, 3) of pixels in [0, 1], 3
    bits a channel: (B, n, parts²) int32 in [0, 512), red first.
    """
    b, n, height, width, channels = pixels.shape
    cut = pixels.reshape(b, n, parts, height // parts, parts, width // parts, channels)
    mean = cut.mean((3, 5)).reshape(b, n, parts**2, channels)
    levels = 2**_BITS
    bits = jnp.clip(jnp.floor(mean * levels), 0, levels - 1).astype(jnp.int32)
    return (bits * jnp.array([levels**2, levels, 1])).sum(-1)
