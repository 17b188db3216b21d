"""Masked autoencoders: most patches of an image are removed, and their pixels predicted from the others
(MAE, arXiv 2111.06377; facebookresearch/mae).

The encoder sees the patches that are left, and nothing of the others. The decoder, which training alone
needs, gets what the encoder makes of these, a learned mask in the place of each removed patch, and positions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.models.embeddings import cut_patches, sincos_2d
from vit_jax.models.registry import Weights
from vit_jax.models.vit import Encoder
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives.contract import (
    Batch,
    Learner,
    Objective,
    ObjectiveContext,
    SavedObjective,
)
from vit_jax.objectives.masked_patches import check_shares

_EPSILON = 1e-6  # of the normalised targets


@dataclasses.dataclass(frozen=True)
class MaeOptions:
    """What `config.objective` says for a masked autoencoder."""

    masked: float = option(0.75, "share of the patches that are removed", above=0, below=1)
    normalize: bool = option(
        True, "targets are a patch's pixels minus their mean, over their deviation"
    )
    width: int = option(512, "size of a token in the decoder", minimum=4)
    depth: int = option(8, "number of blocks in the decoder", minimum=1)
    heads: int = option(16, "attention heads in the decoder", minimum=1)
    mlp_ratio: int = option(4, "hidden size of the decoder's MLPs over its width", minimum=1)


class MaeModules(nnx.Module):
    """The decoder, with the layers before and after it, and the embedding of a removed patch."""

    def __init__(self, model: PublishedViTConfig, decoder: PublishedViTConfig, rngs: nnx.Rngs):
        dtype, outputs = jnp.dtype(decoder.dtype), model.patch**2 * model.channels
        draw = nnx.initializers.xavier_uniform()  # as all layers of the authors' code
        options = dict(kernel_init=draw, dtype=dtype, rngs=rngs)
        self.embed = nnx.Linear(model.width, decoder.width, **options)
        self.mask = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (decoder.width,)))
        self.decoder = Encoder(decoder, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(decoder.width, outputs, **options)


def decoder_of(model: PublishedViTConfig, options: MaeOptions) -> PublishedViTConfig:
    """The decoder's blocks as those of a ViT; they compute as the model's do."""
    shared = ("image_size", "patch", "activation", "epsilon", "attention", "channels")
    shared += ("dtype", "dtype_on_cpu", "remat", "unroll")
    return PublishedViTConfig(
        **{name: getattr(model, name) for name in shared},
        num_classes=0,
        depth=options.depth,
        width=options.width,
        mlp_dim=options.mlp_ratio * options.width,
        heads=options.heads,
    )


class Mae(Objective):
    """The mean squared error of the removed patches' pixels."""

    Options = MaeOptions
    needs_labels = False
    mixes = False

    def __init__(self, options: MaeOptions, context: ObjectiveContext):
        super().__init__(options, context)
        model = context.model
        if type(model) is not PublishedViTConfig:
            raise ConfigError("objective mae needs a ViT or a DeiT, which can do with some patches")
        if model.position_place in ("layers", "shared") or model.rope != "none":
            raise ConfigError(
                "objective mae removes patches after their positions are added: it needs model.position_at=stem, "
                "and no model.position=relative or model.rope"
            )
        if model.crop_to_patches:
            raise ConfigError(
                "objective mae predicts whole images: it needs no model.crop_to_patches"
            )
        self.patches = model.grid[0] * model.grid[1]
        self.visible = int(self.patches * (1 - options.masked))
        check_shares("masked", options.masked, self.patches - self.visible, self.patches)
        if options.width % 4 or options.width % options.heads:
            raise ConfigError(
                f"config.objective.width = {options.width} must be divisible by 4, for positions, and by "
                f"config.objective.heads = {options.heads}"
            )

    @property
    def decoder(self) -> PublishedViTConfig:
        """The decoder's blocks as a ViT's config."""
        return decoder_of(self.context.model, self.options)

    def make_modules(self, rngs: nnx.Rngs) -> MaeModules:
        return MaeModules(self.context.model, self.decoder, rngs)

    def continue_from(
        self, saved: SavedObjective, like: Weights
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """All arrays of the checkpoint's decoder, or none of one of another size; see `Objective`."""
        taken, reset = super().continue_from(saved, like)
        if reset:
            why = next(iter(reset.items()))
            reset = (
                dict.fromkeys(taken, f"the decoder has another size: {why[0]} is {why[1]}") | reset
            )
            return {}, reset
        return taken, reset

    def flops(self) -> int:
        model, decoder = self.context.model, self.decoder
        learned = model.tokens - self.patches
        seen = learned + self.visible
        placed = model.tokens_with_position
        ends = seen * model.width * decoder.width
        ends += (self.patches - self.visible) * decoder.width * model.patch**2 * model.channels
        encoder = model.embedding_flops() + model.block_flops(seen)
        return encoder + decoder.block_flops(placed + self.patches) + 2 * ends

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        noise = jax.random.uniform(rngs.dropout(), (len(batch["image"]), self.patches))
        return self.loss(learner, batch["image"], jnp.argsort(noise, axis=1), rngs), {}

    def loss(self, learner: Learner, images: jax.Array, order: jax.Array, rngs: Any) -> jax.Array:
        """(B,) float32, where these patches are removed; see `predict`."""
        predicted = self.predict(learner, images, order, rngs)
        # The loss alone needs the pixels, in float32.
        pixels = cut_patches(images.astype(jnp.float32), self.context.model.grid)
        target = jnp.take_along_axis(pixels, order[:, self.visible :, None], axis=1)
        if self.options.normalize:
            deviation = jnp.sqrt(target.var(-1, ddof=1, keepdims=True) + _EPSILON)
            target = (target - target.mean(-1, keepdims=True)) / deviation
        return jnp.square(predicted - target).mean((1, 2))

    def predict(
        self, learner: Learner, images: jax.Array, order: jax.Array, rngs: Any
    ) -> jax.Array:
        """The pixels of the removed patches, (B, removed, P²C) float32.

        Args:
          images: (B, H, W, C), normalised.
          order: (B, N) the patches' numbers; the first are seen, the others removed.
        """
        model = learner.model
        modules = learner.modules
        seen = self.visible
        patches = model.patches(images, deterministic=False, rngs=rngs)
        tokens = model.add_positions(patches, order[:, :seen])
        tokens, _ = model.encode(tokens, deterministic=False, rngs=rngs)
        tokens = modules.embed(tokens)
        learned, tokens = tokens[:, :-seen], tokens[:, -seen:]
        b, _, width = tokens.shape
        masks = jnp.broadcast_to(
            modules.mask[...].astype(tokens.dtype), (b, self.patches - seen, width)
        )
        # Attention does not see an order: the removed ones may stay last, each with its position.
        positions = jnp.asarray(
            sincos_2d(self.context.model.grid, width, periods=width // 4)[0], tokens.dtype
        )
        tokens = jnp.concatenate([tokens, masks], axis=1) + positions[order]
        tokens, _ = modules.decoder(jnp.concatenate([learned, tokens], axis=1))
        return modules.head(tokens[:, learned.shape[1] + seen :]).astype(jnp.float32)
