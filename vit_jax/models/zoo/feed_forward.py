"""Feed-forward-only networks ("Do You Even Need Attention?", arXiv 2105.02723): ViTs whose attention is
an MLP over the tokens.

Sources: the paper and the authors' code (lukemelas/do-you-even-need-attention). Where these differ, the
code decides: FF-L has patches of 32 pixels, and its table of positions stays 14 × 14, resized to the 7 × 7
patches at every use. `position_grid` says the size of the table.

Weights at another resolution: each token has weights of its own, and neither paper nor code says what to
do with others. So the grid of patches stays: larger images take larger patches, whose embedding is
resized, or are refused with the sizes that fit.

Ours: without a class token (`pool`) there is one token less; linear layers begin normal with std 0.02, which
is truncated there at ±2.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import drop_path, split
from vit_jax.compute.learned import per_example
from vit_jax.models import classifier, stacked
from vit_jax.models.embeddings import prepend
from vit_jax.models.layers import Mlp, draw_kernels, layer_norm, mlp_flops

# depth, width; MLPs four times as wide as what they mix (the authors' code).
SIZES = {"Ti": (12, 192), "B": (12, 768), "L": (24, 1024)}
# Listed by `vit_jax models`; any other patch size works as well.
VARIANTS = ["FF-Ti/16", "FF-B/16", "FF-L/32"]
ACCURACY = dict(zip(VARIANTS, (61.4, 74.9, 71.4), strict=True))
SMOKE = ("feed_forward.py:smoke", 98.9, 132)


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig(stacked.StackedConfig, classifier.ClassifierConfig):
    """A feed-forward-only network. The shapes of its parameters depend on the number of patches."""

    token_mlp_dim: int = option(
        0,
        "hidden size of the MLPs over tokens; 0: four times the tokens",
        minimum=0,
        role="size",
    )
    position_grid: tuple = option(
        (14, 14),
        "rows and columns of the table of positions, which is resized to those of the patches",
        minimum=1,
        length=2,
        role="size",
    )
    dropout: float = option(
        0.0, "after the embedding and in the MLPs, after both layers", minimum=0, below=1
    )
    activation: str = option("gelu", "of the MLPs", choices=ACTIVATIONS, role="convention")
    epsilon: float = option(1e-6, "of the layer norms", role="convention")

    def __post_init__(self):
        # JSON has no tuples.
        object.__setattr__(self, "position_grid", tuple(self.position_grid))
        super().__post_init__()

    @property
    def token_hidden(self) -> int:
        """Hidden size of the MLPs over tokens."""
        return self.token_mlp_dim or 4 * self.tokens

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, "class_position")

    def fit_parameter(
        self, name: str, target: "FeedForwardConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        if name.startswith("layers/token_") and self.grid != target.grid:
            tall, wide = self.height_width
            fitting = [
                f"{sizes.size_text(sizes.parse((tall * k, wide * k)))} with model.patch={self.patch * k}"
                for k in (1, 2, 3)
            ]
            raise ConfigError(
                f"a feed-forward-only network has weights for each token: those for {self.grid[0]} × "
                f"{self.grid[1]} patches do not fit images of {sizes.size_text(target.image_size)} in patches "
                f"of {target.patch}. What fits is {', '.join(fitting)}, …: the same number of patches"
            )
        return classifier.fit_patches(name, self, target, resize)

    def block_flops(self) -> int:
        n, d = self.tokens, self.width
        return mlp_flops(d, n, self.token_hidden) + mlp_flops(n, d, self.mlp_dim)


def options_from_name(name: str) -> dict | None:
    """`FF-B/16` -> its size and patch; `None` for a name of another family."""
    match = re.fullmatch(r"FF-(.+)/([1-9]\d*)", name)
    if not match:
        return None
    size, patch = match.groups()
    classifier.check_size(name, "FF", size, SIZES)
    depth, width = SIZES[size]
    return dict(patch=int(patch), depth=depth, width=width, mlp_dim=4 * width)


class FeedForwardBlock(nnx.Module):
    """x + mlp(norm(x)) over channels, then the same over tokens, where the norm too is over tokens."""

    def __init__(self, config: FeedForwardConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        common = dict(activation=config.activation, dropout=config.dropout, dtype=dtype, rngs=rngs)
        self.channel_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.channel_mlp = Mlp(config.width, config.mlp_dim, **common)
        self.token_norm = layer_norm(config.tokens, config.epsilon, dtype, rngs)
        self.token_mlp = Mlp(config.tokens, config.token_hidden, **common)

    def __call__(self, x, drop_path_rate, key, *, training: bool) -> tuple[jax.Array, dict]:
        """Adds the MLP of the channels, then the MLP across tokens: (B, N, D) to the same; nothing is captured."""
        keys = split(key, 4)
        y = self.channel_mlp(self.channel_norm(x), keys[0])
        x = x + drop_path(y, drop_path_rate, keys[1])
        y = self.token_mlp(self.token_norm(x.swapaxes(1, 2)), keys[2]).swapaxes(1, 2)
        return x + drop_path(y, drop_path_rate, keys[3]), {}


class FeedForward(stacked.StackedModel):
    """Images to logits; linear layers begin normal with std 0.02."""

    Block = FeedForwardBlock

    def make_positions(self, config: FeedForwardConfig, rngs: nnx.Rngs) -> None:
        """Makes what `place` reads: a learned table; the class token has a position of its own."""
        draw, width = nnx.initializers.normal(0.02), config.width
        if config.prefix:
            self.class_token = nnx.Param(draw(rngs.params(), (1, 1, width)))
            self.class_position = nnx.Param(draw(rngs.params(), (1, 1, width)))
        self.position = nnx.Param(draw(rngs.params(), (1, *config.position_grid, width)))

    def make_layers(self, config: FeedForwardConfig, *, dtype, rngs: nnx.Rngs) -> None:
        super().make_layers(config, dtype=dtype, rngs=rngs)
        draw_kernels(self.layers, 0.02, rngs)

    def add_positions(self, patches: jax.Array) -> jax.Array:
        """Patches (B, N, D) with positions, resized to their grid, after the class token."""
        table = self.position[...]
        # Half-pixel centres, without antialiasing: PyTorch's `interpolate`.
        shape = (1, *self.config.grid, table.shape[-1])
        table = jax.image.resize(table, shape, "linear", antialias=False)
        table = table.reshape(1, -1, table.shape[-1]).astype(patches.dtype)
        x = patches + per_example(table, patches.shape[0])
        if not self.config.prefix:
            return x
        return prepend([(self.class_token[...] + self.class_position[...]).astype(x.dtype)], x)


Config, Model = FeedForwardConfig, FeedForward  # for the registry
