"""MLP-Mixer (arXiv 2105.01601), as the official code defines it, and its rule for larger images."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest, option
from vit_jax.compute import choices, recompute, stack
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import drop_path, split
from vit_jax.models import classifier
from vit_jax.models.contract import ModelOutput
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


@dataclasses.dataclass(frozen=True)
class Config(classifier.Options):
    """A Mixer. The shapes of its parameters depend on the image size."""

    patch: int = option(16, "side of a patch in pixels", minimum=1, role="size", fitted=True)
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

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return classifier.patch_grid(self)

    @property
    def tokens(self) -> int:
        """Tokens between the blocks."""
        return self.grid[0] * self.grid[1]

    @property
    def layers(self) -> dict[str, int]:
        """See `classifier.Options`."""
        return {"layers": self.depth}

    def flops(self) -> int:
        """Operations of one image's forward pass: matrix products only, a multiply-add counted as
        2.
        """
        n, d = self.tokens, self.width
        block = 4 * n * d * (self.token_mlp_dim + self.mlp_dim)
        return (
            2 * n * self.patch**2 * self.channels * d
            + self.depth * block
            + 2 * d * self.num_classes
        )


def options_from_name(name: str) -> dict | None:
    """`Mixer-B/16` -> its size and patch; `None` for a name of another family."""
    match = re.fullmatch(r"Mixer-(.+)/([1-9]\d*)", name)
    if not match:
        return None
    size, patch = match.groups()
    if size not in SIZES:
        raise ConfigError(
            f"model {name!r}: there is no Mixer of size {size!r}{nearest(size, SIZES)}"
        )
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
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        if config.num_classes:
            self.head = classifier.head(config.width, config, rngs)

    def __call__(
        self,
        images: jax.Array,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        capture: bool = False,
    ) -> ModelOutput:
        """Classifies images.

        Args:
          images: (B, S, S, 3) float, normalised; S is the config's image size.
          deterministic: no stochastic depth.
          rngs: its randomness (the stream `dropout`) when not deterministic.
          capture: also return every block's output, `blocks` (L, B, N, D).
        """
        config = self.config
        classifier.check_images(images, config)
        stochastic = not deterministic and config.drop_path > 0
        if stochastic and rngs is None:
            raise ValueError("a model with stochastic depth needs rngs unless deterministic=True")
        # Stochastic depth grows linearly from 0 in the first block (arXiv 1603.09382 §3).
        rates = np.linspace(0, config.drop_path, config.depth, dtype=np.float32)
        keys = jax.random.split(rngs.dropout(), config.depth) if stochastic else None

        def step(block, x, rate, key):
            x = block(x, rate, key)
            return x, {"blocks": x} if capture else {}

        x = self.embedding(images)
        x, captured = stack.scan(
            step, self.layers, x, (rates, keys), remat=choices.remat(config), unroll=config.unroll
        )
        tokens = self.norm(x)
        features = tokens.mean(axis=1)
        logits = self.head(features.astype(jnp.float32)) if config.num_classes else None
        return ModelOutput(logits, features, tokens, captured)


class Block(nnx.Module):
    """Mixes tokens, channel by channel, then channels, token by token (Mixer Eq. 1)."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
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
    """Dense, activation, dense over the last axis; drawn as Flax does by default, unlike ViT's
    (official code).
    """

    def __init__(self, width: int, hidden: int, activation: str, *, dtype, rngs: nnx.Rngs):
        self.up = Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden, width, dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (..., D) -> (..., D)."""
        return self.down(ACTIVATIONS[self.activation](recompute.keep(self.up(x), recompute.HIDDEN)))


def enlarge_token_mlp(token_mlp: dict, factor: int) -> dict:
    """The token MLP for images `factor` = K times as large, which it treats as K·K images of the
    old size (Mixer §C).

    The paper writes K² copies of each kernel along a diagonal, for tokens which come sub-image by
    sub-image; here the rows of the first kernel and the columns of the second go where a model has
    its tokens, row by row of the image.

    Args:
      token_mlp: parameters of one layer or a stack: `up/kernel` (..., S, H), `up/bias` (..., H),
        `down/kernel` (..., H, S), `down/bias` (..., S), S tokens being a square.
      factor: K, positive.

    Returns:
      The same with K²·S for S and K²·H for H.
    """
    up, down = token_mlp["up"], token_mlp["down"]
    tokens = up["kernel"].shape[-2]
    side = round(tokens**0.5)
    if side**2 != tokens or factor < 1:
        raise ValueError(
            f"a token MLP over {tokens} tokens cannot be enlarged {factor} times: it takes a square and a whole factor"
        )
    y, x = np.divmod(np.arange(factor**2 * tokens), factor * side)
    # Of every new token: which sub-image it is in, and which token of that.
    image = y // side * factor + x // side
    place = y % side * side + x % side
    inside = image[:, None] == np.arange(factor**2)

    up_kernel = np.take(up["kernel"], place, axis=-2)[..., :, None, :] * inside[:, :, None]
    down_kernel = np.take(down["kernel"], place, axis=-1)[..., None, :, :] * inside.T[:, None, :]
    repeats = (1,) * (up["bias"].ndim - 1) + (factor**2,)
    return {
        "up": {
            "kernel": up_kernel.reshape(*up_kernel.shape[:-2], -1),
            "bias": np.tile(up["bias"], repeats),
        },
        "down": {
            "kernel": down_kernel.reshape(*down_kernel.shape[:-3], -1, len(place)),
            "bias": np.take(down["bias"], place, axis=-1),
        },
    }
