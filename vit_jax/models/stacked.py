"""The body that families of equal blocks share: embedding → place → blocks → norm → pool → head.

A family is its block and its options, see `mixer` for the shortest. ViTs, whose parts objectives use one by
one, are in `vit`.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.compute import choices, stack
from vit_jax.compute.dropout import by_depth, draw_key, dropout, split
from vit_jax.compute.learned import per_example
from vit_jax.models import classifier, contract, embeddings, pooling
from vit_jax.models.contract import Capture, ModelOutput
from vit_jax.models.embeddings import PatchEmbedding, prepend
from vit_jax.models.layers import layer_norm


@dataclasses.dataclass(frozen=True)
class StackedConfig(pooling.PooledConfig, classifier.Patches):
    """Beside `classifier.ClassifierConfig`: sizes, pooling, stochastic depth."""

    # The rate of dropout after the positions; `None` for a family without dropout.
    dropout: ClassVar[float | None] = None
    epsilon: ClassVar[float] = 1e-6  # of the layer norms
    constant_drop_path: ClassVar[bool] = False  # whether `drop_path` is that of all blocks

    patch: int = classifier.patch_option()
    depth: int = option(12, "number of blocks", minimum=1, role="size")
    width: int = option(768, "size of a token", minimum=1, role="size")
    mlp_dim: int = option(3072, "hidden size of the MLPs", minimum=1, role="size")
    drop_path: float = option(
        0.0, "stochastic depth of the last block, growing linearly from 0", minimum=0, below=1
    )

    def __post_init__(self):
        classifier.patch_grid(self)
        pooling.check_pooling(self)

    @property
    def prefix(self) -> int:
        """Rows of the position embedding without a patch: the class token's."""
        return int(self.pool == "token")

    @property
    def tokens(self) -> int:
        """The class token, if it is read, and the patches."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def layers(self) -> dict[str, int]:
        """The layers, from input to output, for layer-wise decay: the stack of blocks."""
        return {"layers": self.depth}

    def block_flops(self) -> int | None:
        """Operations of one block, counted as in `flops`; `None`: all are counted in the model's program."""
        return None

    def flops(self) -> int | None:
        block = self.block_flops()
        if block is None:
            return None
        head = pooling.flops(self) + 2 * self.width * self.num_classes
        return embeddings.flops(self) + self.depth * block + head


class StackedModel(classifier.Classifier):
    """A model of equal blocks.

    A subclass names its `Block`, made by `Block(config, dtype=, rngs=)` and called as
    `block(x, drop_path_rate, key, training=)`: tokens (B, N, D) to the same, and what may be captured by
    name. `training` says whether batch norms use the statistics of the batch. It overrides what else differs.
    """

    Block: ClassVar[Callable[..., nnx.Module]]

    def __init__(self, config: classifier.ClassifierConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.embedding = self.make_embedding(config, dtype=dtype, rngs=rngs)
        self.make_positions(config, rngs)
        self.make_layers(config, dtype=dtype, rngs=rngs)
        if config.weighted_layers:
            self.layer_weights = pooling.LayerWeights(config.depth)
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.pool = pooling.make_pooling(config, dtype=dtype, rngs=rngs)
        if config.num_classes:
            self.head = classifier.head(config.width, config, rngs)

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        """Classifies images (B, H, W, C). `tokens` are the class token, if there is one, then the patches."""
        config = self.config
        classifier.check_images(images, config)
        key = draw_key(rngs, deterministic, config.dropout or 0.0, config.drop_path)
        first_key, key = (None, key) if config.dropout is None else split(key, 2)
        depths = by_depth(config.drop_path, config.depth, key, constant=config.constant_drop_path)
        training = not deterministic and not config.fixed_statistics
        x = self.add_positions(self.embed(images, training))
        x = self.to_blocks(dropout(x, config.dropout or 0.0, first_key))
        x, captured = self.run_blocks(x, depths, self.step(training, capture))
        tokens = self.norm(self.from_blocks(x))
        features = self.pool(tokens)
        return ModelOutput(self.classify(features), features, tokens, captured)

    def last_norm(self, x: jax.Array, layer: str) -> jax.Array:
        return self.norm(x)

    def make_embedding(self, config, *, dtype, rngs: nnx.Rngs) -> nnx.Module:
        """From images to patches."""
        return PatchEmbedding(config.patch, config.channels, config.width, dtype=dtype, rngs=rngs)

    def make_positions(self, config, rngs: nnx.Rngs) -> None:
        """What `place` reads: a learned table, and the class token."""
        draw = nnx.initializers.normal(0.02)
        if config.prefix:
            self.class_token = nnx.Param(draw(rngs.params(), (1, 1, config.width)))
        self.position = nnx.Param(draw(rngs.params(), (1, config.tokens, config.width)))

    def make_layers(self, config, *, dtype, rngs: nnx.Rngs) -> None:
        """The blocks, stacked."""
        make = lambda rngs: self.Block(config, dtype=dtype, rngs=rngs)  # noqa: E731
        self.layers = stack.stack(make, config.depth, rngs)

    def embed(self, images: jax.Array, training: bool) -> jax.Array:
        """Images (B, H, W, C) -> patches (B, N, D), row by row."""
        return self.embedding(images)

    def add_positions(self, patches: jax.Array) -> jax.Array:
        """Patches (B, N, D) -> the same with positions, after the class token."""
        x = patches
        if self.config.prefix:
            x = prepend([self.class_token[...].astype(x.dtype)], x)
        return x + per_example(self.position[...].astype(x.dtype), x.shape[0])

    def to_blocks(self, x: jax.Array) -> jax.Array:
        """Tokens (B, N, D) in the shape that blocks take."""
        return x

    def from_blocks(self, x: jax.Array) -> jax.Array:
        """The inverse of `to_blocks`."""
        return x

    def run_blocks(
        self, x: jax.Array, depths: tuple, step: Callable
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The last block's output, or a weighted sum of all; and what was captured.

        Args:
          depths: each block's rate and key of stochastic depth, see `by_depth`.
          step: see `step`.
        """
        config = self.config
        scan = self.layer_weights.scan if config.weighted_layers else stack.scan
        remat = choices.remat(config)
        return scan(step, self.layers, x, depths, remat=remat, unroll=config.unroll)

    def step(self, training: bool, capture: Capture) -> Callable:
        """One block, as `stack.scan` runs it."""

        def step(block, x, rate, key):
            x, arrays = block(x, rate, key, training=training)
            if not capture:
                return x, {}
            return x, contract.captured(capture, **arrays, blocks=self.from_blocks(x))

        return step
