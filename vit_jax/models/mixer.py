"""MLP-Mixer (arXiv 2105.01601), as the official code defines it, and its rule for larger images."""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.base.sizes import Size
from vit_jax.compute import choices, recompute, stack
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import by_depth, draw, drop_path, split
from vit_jax.models import classifier, pooling
from vit_jax.models.contract import Capture, ModelOutput, kept
from vit_jax.models.embeddings import PatchEmbedding
from vit_jax.models.layers import Linear, layer_norm

# depth, width, MLP width over channels, over tokens (Mixer Table 1).
SIZES = {
    "S": (8, 512, 2048, 256),
    "B": (12, 768, 3072, 384),
    "L": (24, 1024, 4096, 512),
    "H": (32, 1280, 5120, 640),
}
# Listed by `vit_jax models`; any other patch size works as well.
VARIANTS = [
    "Mixer-S/32",
    "Mixer-S/16",
    "Mixer-B/32",
    "Mixer-B/16",
    "Mixer-L/32",
    "Mixer-L/16",
    "Mixer-H/14",
]
ACCURACY = {"Mixer-B/16": 76.4, "Mixer-L/16": 71.8}  # Table 3
SMOKE = ("digits.py:mixer", 98.6, 166)


@dataclasses.dataclass(frozen=True)
class Config(pooling.PatchOptions, classifier.Patches, classifier.Options):
    """A Mixer. The shapes of its parameters depend on the image size."""

    depth: int = option(12, "number of blocks", minimum=1, role="size")
    width: int = option(768, "size of a token", minimum=1, role="size")
    mlp_dim: int = option(3072, "hidden size of the MLPs", minimum=1, role="size")
    token_mlp_dim: int = option(
        384,
        "hidden size of a Mixer's token MLPs; K² times that of weights from images K times smaller",
        minimum=1,
        role="size",
    )
    drop_path: float = option(
        0.0, "stochastic depth of the last block, growing linearly from 0", minimum=0, below=1
    )
    activation: str = option("gelu_tanh", "of the MLPs", choices=ACTIVATIONS, role="convention")
    epsilon: float = option(1e-6, "of the layer norms", role="convention")

    def __post_init__(self):
        classifier.patch_grid(self)
        pooling.check(self)

    @property
    def tokens(self) -> int:
        """Tokens between the blocks."""
        return self.grid[0] * self.grid[1]

    @property
    def layers(self) -> dict[str, int]:
        """See `classifier.Options`."""
        return {"layers": self.depth}

    def at_size(self, image_size: Size) -> dict[str, int]:
        """Images K times as large take K² copies of the MLPs over tokens (Mixer §C)."""
        return {"token_mlp_dim": self.token_mlp_dim * (self._factor(image_size) or 1) ** 2}

    def fit(self, name: str, target: "Config", *, resize: str) -> tuple[str, Callable] | None:
        """See `classifier.Options`."""
        prefix = "layers/token_mlp/"
        if not name.startswith(prefix) or self.grid == target.grid:
            return classifier.fit_patches(name, self, target)
        factor = self._factor(target.image_size)
        if not factor or target.token_mlp_dim != self.token_mlp_dim * factor**2:
            tall, wide = self.height_width
            fitting = [sizes.text(sizes.parse((tall * k, wide * k))) for k in (1, 2, 3)]
            raise ConfigError(
                f"a Mixer has weights for each token: those for images of {sizes.text(self.image_size)} pixels and "
                f"token_mlp_dim {self.token_mlp_dim} do not fit images of {sizes.text(target.image_size)} and "
                f"token_mlp_dim {target.token_mlp_dim}. What fits is {', '.join(fitting)}, …: K times that size, "
                "with K² times the token_mlp_dim"
            )
        part = name.removeprefix(prefix)
        return f"{factor}² copies", lambda x: enlarge_token_mlp(part, x, self.grid, factor)

    def _factor(self, image_size: Size) -> int | None:
        """K, if images of this size are K times as high and wide, and K is whole."""
        pairs = zip(sizes.height_width(image_size), self.height_width, strict=True)
        (factor, rest), (across, rest_across) = (divmod(*pair) for pair in pairs)
        return factor if factor == across and not rest and not rest_across else None

    def flops(self) -> int:
        """Operations of one image's forward pass: matrix products only, a multiply-add counted as
        2.
        """
        n, d = self.tokens, self.width
        block = 4 * n * d * (self.token_mlp_dim + self.mlp_dim)
        patches = 2 * n * self.patch**2 * self.channels * d
        return patches + self.depth * block + pooling.flops(self) + 2 * d * self.num_classes


def options_from_name(name: str) -> dict | None:
    """`Mixer-B/16` -> its size and patch; `None` for a name of another family."""
    match = re.fullmatch(r"Mixer-(.+)/([1-9]\d*)", name)
    if not match:
        return None
    size, patch = match.groups()
    classifier.check_size(name, "Mixer", size, SIZES)
    depth, width, mlp_dim, token_mlp_dim = SIZES[size]
    return dict(
        patch=int(patch), depth=depth, width=width, mlp_dim=mlp_dim, token_mlp_dim=token_mlp_dim
    )


class Model(nnx.Module):
    """Images to logits; see `Config` for what varies. Parameters are float32 whatever the compute
    dtype.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.embedding = PatchEmbedding(
            config.patch, config.channels, config.width, dtype=dtype, rngs=rngs
        )
        self.layers = stack.stack(
            lambda rngs: Block(config, dtype=dtype, rngs=rngs), config.depth, rngs
        )
        if config.weighted_layers:
            self.layer_weights = pooling.LayerWeights(config.depth)
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.pool = pooling.make(config, dtype=dtype, rngs=rngs)
        if config.num_classes:
            self.head = classifier.head(config.width, config, rngs)

    def __call__(
        self,
        images: jax.Array,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        capture: Capture = False,
    ) -> ModelOutput:
        """Classifies images.

        Args:
          images: (B, H, W, C) float, normalised; of the config's image size.
          deterministic: no stochastic depth.
          rngs: its randomness (the stream `dropout`) when not deterministic.
          capture: also return every block's output, `blocks` (L, B, N, D).
        """
        config = self.config
        classifier.check_images(images, config)
        key = draw(rngs, deterministic, config.drop_path)
        rates, keys = by_depth(config.drop_path, config.depth, key)

        def step(block, x, rate, key):
            x = block(x, rate, key)
            return x, kept(capture, blocks=x)

        x = self.embedding(images)
        scan = self.layer_weights.scan if config.weighted_layers else stack.scan
        x, captured = scan(
            step, self.layers, x, (rates, keys), remat=choices.remat(config), unroll=config.unroll
        )
        tokens = self.norm(x)
        features = self.pool(tokens)
        logits = self.head(features.astype(jnp.float32)) if config.num_classes else None
        return ModelOutput(logits, features, tokens, captured)


class Block(nnx.Module):
    """Mixes tokens, channel by channel, then channels, token by token (Mixer Eq. 1)."""

    def __init__(self, config: Config, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.token_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.token_mlp = Mlp(
            config.tokens, config.token_mlp_dim, config.activation, dtype=dtype, rngs=rngs
        )
        self.channel_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.channel_mlp = Mlp(
            config.width, config.mlp_dim, config.activation, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array, drop_path_rate: jax.Array, key: jax.Array | None) -> jax.Array:
        """(B, N, D) -> the same."""
        keys = split(key, 2)
        y = self.token_mlp(self.token_norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + drop_path(y, drop_path_rate, keys[0])
        return x + drop_path(self.channel_mlp(self.channel_norm(x)), drop_path_rate, keys[1])


class Mlp(nnx.Module):
    """Dense, activation, dense over the last axis; initialised by Flax's defaults, unlike ViT's
    (official code).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.up = Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden, width, dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (..., D) -> (..., D)."""
        return self.down(ACTIVATIONS[self.activation](recompute.keep(self.up(x), recompute.HIDDEN)))


def enlarge_token_mlp(
    part: str, array: np.ndarray, grid: tuple[int, int], factor: int
) -> np.ndarray:
    """The token MLP for images `factor` = K times as high and wide, which it treats as K·K images of
    the old size (Mixer §C).

    The paper writes K² copies of each kernel along a diagonal, for tokens which come sub-image by
    sub-image; here the rows of the first kernel and the columns of the second go where a model has
    its tokens, row by row of the image.

    Args:
      part: `up/kernel` (..., S, H), `up/bias` (..., H), `down/kernel` (..., H, S) or `down/bias`
        (..., S), of one layer or a stack, S tokens being a grid.
      array: it.
      grid: tokens down and across.
      factor: K, positive.

    Returns:
      The same with K²·S for S and K²·H for H.
    """
    rows, columns = grid
    y, x = np.divmod(np.arange(factor**2 * rows * columns), factor * columns)
    # Of every new token: which sub-image it is in, and which token of that.
    image = y // rows * factor + x // columns
    place = y % rows * columns + x % columns
    inside = image[:, None] == np.arange(factor**2)
    match part:
        case "up/kernel":
            kernel = np.take(array, place, axis=-2)[..., :, None, :] * inside[:, :, None]
            return kernel.reshape(*kernel.shape[:-2], -1)
        case "up/bias":
            return np.tile(array, (1,) * (array.ndim - 1) + (factor**2,))
        case "down/kernel":
            kernel = np.take(array, place, axis=-1)[..., None, :, :] * inside.T[:, None, :]
            return kernel.reshape(*kernel.shape[:-3], -1, len(place))
        case "down/bias":
            return np.take(array, place, axis=-1)
    raise ValueError(f"a token MLP has no {part!r}")
