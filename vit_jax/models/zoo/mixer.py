"""MLP-Mixer (arXiv 2105.01601), as the official code defines it, and its rule for larger images. It is isotropic: every
layer has the same shapes, and maps patches (N, D) to the same. Its cost is linear in their number: Mixer-B/16 takes
25.2, 100.8 and 403.2 GFLOPs at 224, 448 and 896 pixels, ViT-B/16 35.1, 157.0 and 899.4.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.base.sizes import Size
from vit_jax.compute import recompute
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import drop_path, split
from vit_jax.models import classifier, pooling, stacked
from vit_jax.models.layers import Linear, layer_norm, mlp_flops

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
class MixerConfig(pooling.PatchOptions, stacked.StackedConfig, classifier.ClassifierConfig):
    """A Mixer. The shapes of its parameters depend on the image size."""

    fixed_size_reason = "its MLPs over tokens have a weight for each token of one grid"

    token_mlp_dim: int = option(
        384,
        "hidden size of a Mixer's token MLPs; K² times that of weights from images K times smaller",
        minimum=1,
        role="size",
    )
    activation: str = option("gelu_tanh", "of the MLPs", choices=ACTIVATIONS, role="convention")
    epsilon: float = option(1e-6, "of the layer norms", role="convention")

    def options_for_image_size(self, image_size: Size) -> dict[str, int]:
        """Images K times as large take K² copies of the MLPs over tokens (Mixer §C)."""
        return {"token_mlp_dim": self.token_mlp_dim * (self._factor(image_size) or 1) ** 2}

    def fit_parameter(
        self, name: str, target: "MixerConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        prefix = "layers/token_mlp/"
        if not name.startswith(prefix) or self.grid == target.grid:
            return classifier.fit_patches(name, self, target, resize)
        factor = self._factor(target.image_size)
        if not factor or target.token_mlp_dim != self.token_mlp_dim * factor**2:
            tall, wide = self.height_width
            fitting = [sizes.size_text(sizes.parse((tall * k, wide * k))) for k in (1, 2, 3)]
            raise ConfigError(
                f"a Mixer has weights for each token: those for images of {sizes.size_text(self.image_size)} pixels "
                f"and token_mlp_dim {self.token_mlp_dim} do not fit images of {sizes.size_text(target.image_size)} and "
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

    def block_flops(self) -> int:
        n, d = self.tokens, self.width
        return mlp_flops(d, n, self.token_mlp_dim) + mlp_flops(n, d, self.mlp_dim)


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


class MixerBlock(nnx.Module):
    """Mixes tokens, channel by channel, then channels, token by token (Mixer Eq. 1)."""

    def __init__(self, config: MixerConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.token_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.token_mlp = Mlp(
            config.tokens, config.token_mlp_dim, config.activation, dtype=dtype, rngs=rngs
        )
        self.channel_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.channel_mlp = Mlp(
            config.width, config.mlp_dim, config.activation, dtype=dtype, rngs=rngs
        )

    def __call__(self, x, drop_path_rate, key, *, training: bool) -> tuple[jax.Array, dict]:
        """Adds the MLP across tokens, then the MLP of the channels: (B, N, D) to the same; nothing is captured."""
        keys = split(key, 2)
        y = self.token_mlp(self.token_norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + drop_path(y, drop_path_rate, keys[0])
        y = self.channel_mlp(self.channel_norm(x))
        return x + drop_path(y, drop_path_rate, keys[1]), {}


class Mixer(stacked.StackedModel):
    """Images to logits; tokens have no positions."""

    Block = MixerBlock

    def make_positions(self, config: MixerConfig, rngs: nnx.Rngs) -> None:
        """Makes none: a Mixer has no positions and no class token."""

    def add_positions(self, patches: jax.Array) -> jax.Array:
        return patches


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


Config, Model = MixerConfig, Mixer  # for the registry


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
