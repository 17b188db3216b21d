"""T2T-ViT (arXiv 2101.11986): a deep and narrow ViT whose tokens come from overlapping windows, in
three steps with a transformer layer after the first two; as the authors' code defines it.

What that code has and the paper does not say:
- the layers between the windows add the values v, since their inputs have another width;
- these layers compute with a Performer of 32 fixed random features, unless the name says `_t`: then with
  full attention, its logits scaled by the width of its inputs, and without biases;
- dropout of 0.1 in Performer layers;
- fixed positions, sinusoids over the row number of the table: they are state that is not trained, and a
  checkpoint's are taken as they are, since the authors' fine-tuning script interpolates them.

Weights at another resolution: sinusoids are computed for the new size. Other than there, `position=learned` trains the
table, and `first_split` changes the grid. At 224 pixels (7, 4, 2) gives 14 × 14 tokens, (11, 6, 5) gives 10 × 10 and
(14, 8, 3) gives 7 × 7. This is arXiv 2105.15075, the cascade built on T2T-ViT.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import choices, performer, recompute, stack, windows
from vit_jax.compute.dropout import draw_key, dropout, split
from vit_jax.models import classifier, positions
from vit_jax.models.attention import Attention
from vit_jax.models.embeddings import sinusoids
from vit_jax.models.layers import Linear, Mlp, draw_kernels, layer_norm
from vit_jax.models.zoo.vit_zoo import PublishedViT
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

# depth, width, MLP width, heads (T2T Table 1; its depth of T2T-ViT-7 is 8, the code's and the weights' 7).
SIZES = {
    "7": (7, 256, 512, 4),
    "10": (10, 256, 512, 4),
    "12": (12, 256, 512, 4),
    "14": (14, 384, 1152, 6),
    "19": (19, 448, 1344, 7),
    "24": (24, 512, 1536, 8),
}
# With full attention between the windows.
SIZES_T = ("14", "19", "24")
VARIANTS = [*(f"T2T-ViT-{size}" for size in SIZES), *(f"T2T-ViT_t-{size}" for size in SIZES_T)]
ACCURACY = dict(zip(VARIANTS, (71.7, 75.2, 76.5, 81.5, 81.9, 82.3, 81.7, 82.4, 82.6), strict=True))
SMOKE = ("t2t_vit.py:smoke", 97.5, 193)
FIRST_SPLIT = (7, 4, 2)
# Size, stride and padding of the second and the third split.
LATER_SPLIT = (3, 2, 1)


@dataclasses.dataclass(frozen=True)
class T2TViTConfig(PublishedViTConfig):
    """A ViT that sees tokens of soft splits in place of patches."""

    # The first split normalises all channels of a window together: no kernel is of one channel.
    image_kernels: ClassVar[tuple[str, ...]] = ()
    patch: ClassVar[None] = None
    patch_bias: ClassVar[bool] = True
    crop_to_patches: ClassVar[bool] = False
    native_resize: ClassVar[str] = "bilinear"
    native_aspect: ClassVar[bool] = False
    fixed_size_reason = "its patches overlap, and layers across all of them make tokens"

    first_split: tuple = option(
        FIRST_SPLIT,
        "windows of the image: their side, stride and padding, in pixels",
        minimum=0,
        length=3,
        role="size",
    )
    token_width: int = option(64, "size of a token between the splits", minimum=1, role="size")
    token_attention: str = option(
        "performer",
        "attention between the splits; full: of all pairs of tokens",
        choices=("performer", "full"),
        role="structure",
    )
    random_features: int = option(
        32, "fixed directions of a performer; half of token_width", minimum=1, role="size"
    )
    token_bias: bool = option(
        True, "biases of the QKV projections between the splits", role="structure"
    )
    token_dropout: float = option(
        0.1, "after attention and MLP of the layers between the splits", minimum=0, below=1
    )
    qk_scale: float = option(
        0.0,
        "what multiplies the products of queries and keys in the blocks; 0: 1/√(channels of a head). The "
        "authors' code takes 1/√width where it is called with pretrained=True",
        minimum=0,
        role="convention",
    )
    position: str = option(
        "sinusoid",
        "position embeddings; sinusoid: fixed, over the row number; the others as in ViT",
        choices=(*positions.SINUSOID, *positions.KINDS),
        role="structure",
    )

    def __post_init__(self):
        object.__setattr__(self, "first_split", tuple(self.first_split))
        size, stride, padding = self.first_split
        if not 0 < stride <= size or padding >= size:
            raise ConfigError(
                f"model.first_split={self.first_split} (side, stride, padding): windows must not leave out "
                "pixels nor be of padding alone: 0 < stride <= side, padding < side"
            )
        if self.init == "deit":
            raise ConfigError(
                "model.init=deit draws the kernel of a patch embedding, and T2T-ViT has attention in its place: set vit"
            )
        super().__post_init__()

    @property
    def splits(self) -> tuple[tuple[int, int, int], ...]:
        """Side, stride and padding of each soft split."""
        return self.first_split, LATER_SPLIT, LATER_SPLIT

    @property
    def stride(self) -> int:
        """Pixels from one token to the next."""
        return math.prod(stride for _, stride, _ in self.splits)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Tokens down and across after each split.

        Raises:
          ConfigError: the image size leaves pixels that no window sees.
        """
        counts_by_side = [window_counts(side, self.splits) for side in self.height_width]
        for side, counts in zip(self.height_width, counts_by_side, strict=True):
            if counts is None:
                possible = range(1, 2 * side + self.stride)
                fitting = [n for n in possible if window_counts(n, self.splits)]
                near = sorted(fitting, key=lambda n: abs(n - side))[:2]
                raise ConfigError(
                    f"image size {sizes.size_text(self.image_size)} leaves pixels outside the windows of "
                    f"model.first_split={self.first_split}, on a side of {side}: take "
                    + (" or ".join(map(str, sorted(near))) if near else "another first_split")
                )
        return tuple(zip(*counts_by_side, strict=True))

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens down and across."""
        return self.grids[-1]

    @property
    def table(self) -> tuple[int, int]:
        """Rows and width of the table of positions."""
        return self.prefix + math.prod(self.grid), self.width

    def fit_parameter(
        self, name: str, target: "T2TViTConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        if name.startswith("embedding/first/") and self.channels != target.channels:
            raise ConfigError(
                f"the first layer normalises the {self.channels} channels of its windows together: its "
                f"weights do not fit images of {target.channels}"
            )
        if name != "position" or target.position != "sinusoid":
            return super().fit_parameter(name, target, resize=resize)
        same = (self.table, self.grid) == (target.table, target.grid)
        return (
            None
            if same
            else ("sinusoids computed for the new size", lambda _: sinusoids(*target.table))
        )

    def embedding_flops(self) -> int:
        total, inputs, d, m = 0, self.channels, self.token_width, self.random_features
        *between, last = zip(self.grids, self.splits, strict=True)
        for (rows, columns), (size, _, _) in between:
            n, inputs = rows * columns, size**2 * inputs
            # Features of queries and keys; sums over keys and of them, or logits and sums.
            pairs = 8 * n * m * d if self.token_attention == "performer" else 4 * n * n * d
            total += 6 * n * inputs * d + pairs + 2 * n * d * d + 4 * n * d * d
            inputs = d
        (rows, columns), (size, _, _) = last
        return total + 2 * rows * columns * size**2 * d * self.width


def options_from_name(name: str) -> dict | None:
    """`T2T-ViT-14` -> its size; `None` for a name of another family."""
    match = re.fullmatch(r"T2T-ViT(_t)?-(.+)", name)
    if not match:
        return None
    full, size = match.groups()
    known = SIZES_T if full else tuple(SIZES)
    classifier.check_size(name, f"T2T-ViT{full or ''}", size, known)
    depth, width, mlp_dim, heads = SIZES[size]
    options = dict(depth=depth, width=width, mlp_dim=mlp_dim, heads=heads)
    options |= dict(activation="gelu", epsilon=1e-5, qkv_bias=False)
    return options | (
        dict(token_attention="full", token_bias=False, token_dropout=0.0) if full else {}
    )


class T2TViT(PublishedViT):
    """Images to logits, as `PublishedViT`; kernels begin as in the authors' code, normal with std 0.02."""

    def __init__(self, config: T2TViTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        for module in (self.embedding, self.encoder):
            draw_kernels(module, 0.02, rngs)
        if config.has_class_token:
            draw = nnx.initializers.normal(0.02)
            self.class_token = nnx.Param(draw(rngs.params(), self.class_token.shape))

    def make_patches(self, config: T2TViTConfig, rngs: nnx.Rngs) -> "TokensToToken":
        return TokensToToken(config, rngs=rngs)

    def patches(
        self, images: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Images (B, H, W, C) to patches (B, N, D); with dropout unless deterministic."""
        x = self.embedding(images, draw_key(rngs, deterministic, self.config.token_dropout))
        return self.patch_norm(x) if self.config.patch_norm else x


class TokensToToken(nnx.Module):
    """Images to tokens: soft split, layer, soft split, layer, soft split, linear (T2T §3.1)."""

    def __init__(self, config: T2TViTConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.first = TokenLayer(config.channels, config.splits[0], config, rngs=rngs)
        self.second = TokenLayer(config.token_width, config.splits[1], config, rngs=rngs)
        inputs = config.splits[2][0] ** 2 * config.token_width
        self.project = Linear(inputs, config.width, dtype=dtype, rngs=rngs)
        self.config = config

    def __call__(self, images: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """images (B, H, W, C) -> tokens (B, N, D), row by row; `key` is the randomness of dropout."""
        x, remat = images.astype(self.config.dtype), choices.remat(self.config)
        for layer, layer_key in zip((self.first, self.second), split(key, 2), strict=True):
            x = stack.call(layer, x, layer_key, remat=remat)
        x = _split(x, self.config.splits[2])
        return self.project(x.reshape(x.shape[0], -1, x.shape[-1]))


class TokenLayer(nnx.Module):
    """A soft split of a map, and a transformer layer on its windows, which makes them narrower."""

    def __init__(
        self, channels: int, windows: tuple[int, int, int], config: T2TViTConfig, *, rngs: nnx.Rngs
    ):
        dtype = jnp.dtype(config.dtype)
        width, inputs = config.token_width, windows[0] ** 2 * channels
        attention = {"performer": PerformerAttention, "full": TokenAttention}
        self.attention_norm = layer_norm(inputs, config.epsilon, dtype, rngs)
        self.attention = attention[config.token_attention](inputs, config, rngs=rngs)
        self.mlp_norm = layer_norm(width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(
            width, width, activation=config.activation, dropout=0.0, dtype=dtype, rngs=rngs
        )
        self.windows, self.dropout = windows, config.token_dropout

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """A map (B, H, W, C) -> (B, h, w, D); `key` is the randomness of dropout."""
        keys = split(key, 2)
        x = _split(x, self.windows)
        b, rows, columns, inputs = x.shape
        x = self.attention(self.attention_norm(x.reshape(b, -1, inputs)), key=keys[0])
        x = x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[1])
        return x.reshape(b, rows, columns, -1)


class TokenAttention(Attention):
    """v + out(softmax(q kᵀ / √inputs) v), of one head."""

    def __init__(self, inputs: int, config: T2TViTConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config.token_width,
            1,
            inputs=inputs,
            dropout=config.token_dropout,
            qkv_bias=config.token_bias,
            implementation=config.attention,
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """(B, N, inputs) -> (B, N, D)."""
        q, k, v = self.project(x, None)
        attended = self.merge(self.mix(q, k, v))
        return v[:, :, 0] + dropout(attended, self.dropout, key)

    def mix(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Values (B, N, 1, D), each a mean over all."""
        inputs, *_, size = self.qkv.kernel.shape
        return self.attend(q * (size / inputs) ** 0.5, k, v, key=None)[0]


class PerformerAttention(TokenAttention):
    """v + out(an estimate of softmax(q kᵀ) v); its random features are state that is not trained."""

    def __init__(self, inputs: int, config: T2TViTConfig, *, rngs: nnx.Rngs):
        super().__init__(inputs, config, rngs=rngs)
        self.directions = nnx.Variable(
            performer.orthogonal_directions(
                rngs.params(), config.random_features, config.token_width
            )
        )

    def mix(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        attended = performer.attend(q, k, v, self.directions[...])
        return recompute.keep(attended, recompute.ATTENTION)


def _split(x: jax.Array, split: tuple[int, int, int]) -> jax.Array:
    size, stride, padding = split
    return windows.soft_split(x, size=size, stride=stride, padding=padding)


def window_counts(side: int, splits: Iterable[tuple[int, int, int]]) -> tuple[int, ...] | None:
    """Windows along a side after each split; `None` if they do not see all of it.

    Args:
      side: in pixels.
      splits: side, stride and padding of the windows of each.
    """
    counts = []
    for size, stride, padding in splits:
        count = windows.count_windows(side, size, stride, padding)
        if count < 1 or (count - 1) * stride + size < side + padding:
            return None
        counts.append(count)
        side = count
    return tuple(counts)


Config, Model = T2TViTConfig, T2TViT  # for the registry
