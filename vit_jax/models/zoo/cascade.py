"""The networks of a cascade's exits: T2T-ViTs or DeiTs that cut an image into a given grid and reuse
what the exit before has computed. The cascade itself is `dynamic_vit`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.compute.dropout import draw_key, dropout, split
from vit_jax.models import classifier
from vit_jax.models.contract import Capture, ModelOutput
from vit_jax.models.layers import draw_kernels
from vit_jax.models.zoo import reuse, t2t
from vit_jax.models.zoo.vit_zoo import PublishedViT
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

# Side, stride and padding, in pixels.
Windows = tuple[int, int, int]
# First splits of the published T2T-ViTs, for 7 x 7, 10 x 10 and 14 x 14 tokens of 224 pixels.
PUBLISHED_SPLITS = ((14, 8, 3), (11, 6, 5), (7, 4, 2))


@dataclasses.dataclass(frozen=True)
class T2TNetwork(t2t.T2TViTConfig):
    """The network of an exit, as a T2T-ViT."""

    link: reuse.Link | None = None

    @property
    def windows(self) -> Windows:
        """Side, stride and padding of the windows of the image."""
        return self.first_split


@dataclasses.dataclass(frozen=True)
class DeiTNetwork(PublishedViTConfig):
    """The network of an exit, as a DeiT; its images may get zeros around them."""

    padding: int = 0
    link: reuse.Link | None = None
    fixed_size_reason = "its networks take over what others make of the same grid"

    @property
    def windows(self) -> Windows:
        """Side, stride and padding of the windows of the image."""
        return self.patch, self.patch, self.padding

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return tuple(count_tokens("deit", side, self.windows) or 0 for side in self.height_width)


class Exit:
    """A ViT whose blocks reuse what the exit before has computed."""

    def __init__(self, config: T2TNetwork | DeiTNetwork, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)  # pyrefly: ignore  (a mixin: that of the ViT)
        link = config.link
        takes = link.takes_relations
        self.relations = reuse.Relations(config, link, rngs=rngs) if takes else None

    def make_encoder(self, config: T2TNetwork | DeiTNetwork, rngs: nnx.Rngs) -> reuse.Encoder:
        """An encoder that reuses what the exit before gives, as `link` says."""
        return reuse.Encoder(config, config.link, rngs=rngs)

    def __call__(
        self,
        images: jax.Array,
        carried: reuse.Carried | None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        capture: Capture = False,
    ) -> tuple[ModelOutput, reuse.Carried]:
        """The output of this exit alone, and what the next one takes; arguments as in every family."""
        config, carried = self.config, carried or {}
        classifier.check_images(images, config)
        embed_key, key = split(draw_key(rngs, deterministic, config.dropout, config.drop_path), 2)
        x = self.add_positions(self.patches(images, deterministic=deterministic, rngs=rngs))
        x = dropout(x, config.dropout, embed_key)
        features, biases = carried.get("features"), carried.get("relations")
        if biases is not None:
            biases = self.relations(biases)
            shape = (config.depth, config.heads, *biases.shape[2:])
            biases = biases.reshape(images.shape[0], *shape).swapaxes(0, 1)
        tokens, captured, carried = self.encoder(x, features, biases, key, capture)
        return self.forward_head(tokens, captured), carried


class T2TExit(Exit, t2t.T2TViT):
    """An exit that is a T2T-ViT."""


class DeiTExit(Exit, PublishedViT):
    """An exit that is a DeiT. Kernels of its blocks and its class token begin as in the authors' code,
    normal with std 0.02.
    """

    def __init__(self, config: DeiTNetwork, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        draw_kernels(self.encoder, 0.02, rngs)
        draw = nnx.initializers.normal(0.02)
        self.class_token = nnx.Param(draw(rngs.params(), self.class_token.shape))

    def patches(self, images: jax.Array, **_) -> jax.Array:
        """Images (B, H, W, C), with zeros around them, to patches (B, N, D)."""
        config = self.config
        around = [
            (config.padding, count * config.patch - side - config.padding, 0)
            for side, count in zip(config.height_width, config.grid, strict=True)
        ]
        zero = jnp.zeros((), images.dtype)
        return self.embedding(jax.lax.pad(images, zero, [(0, 0, 0), *around, (0, 0, 0)]))


MODELS = {T2TNetwork: T2TExit, DeiTNetwork: DeiTExit}


def network(
    config: classifier.ClassifierConfig, grid: tuple[int, int], windows: Windows, link: reuse.Link
) -> T2TNetwork | DeiTNetwork:
    """The network of an exit.

    Raises:
      ConfigError: the windows do not cut the images into this grid.
    """
    config_of_exit = {"t2t": _t2t, "deit": _deit}[config.backbone](config, windows, link)
    if config_of_exit.grid != grid:
        gives = "x".join(map(str, config_of_exit.grid))
        raise ConfigError(
            f"model.windows = {windows} cut images of {sizes.size_text(config.image_size)} pixels into "
            f"{gives} tokens, not into the {grid[0]}x{grid[1]} of model.grids"
        )
    return config_of_exit


def count_tokens(backbone: str, side: int, windows: Windows) -> int | None:
    """Tokens along a side of an image; `None` if windows leave out pixels."""
    splits = (windows, t2t.LATER_SPLIT, t2t.LATER_SPLIT) if backbone == "t2t" else (windows,)
    counts = t2t.window_counts(side, splits)
    return counts[-1] if counts else None


def at_size(
    backbone: str, height_width: tuple[int, int], windows: Windows
) -> tuple[Windows, tuple[int, int]] | None:
    """The windows for images of another size, and the grid that they give. DeiT's keep their pixels,
    with the least zeros around the image. `None` if there are none.
    """
    side, stride, padding = windows
    for around in (padding,) if backbone == "t2t" else range(side):
        windows_of_size = side, stride, around
        grid = tuple(count_tokens(backbone, length, windows_of_size) for length in height_width)
        if all(grid):
            return windows_of_size, grid
    return None


@functools.cache
def fitting(backbone: str, height_width: tuple[int, int]) -> dict[tuple[int, int], Windows]:
    """The grids that images can be split into, and by which windows."""
    strides = range(1, min(height_width) + 1)
    if backbone == "t2t":
        candidates = [(max(2 * s - 1, 3), s, p) for s in strides for p in range(s + 1)]
        candidates = [*PUBLISHED_SPLITS, *candidates]
    else:
        candidates = [(s, s, p) for s in strides for p in range(s)]
    by_grid = {}
    for windows in candidates:
        grid = tuple(count_tokens(backbone, side, windows) for side in height_width)
        if all(grid):
            by_grid.setdefault(grid, windows)
    return by_grid


def _t2t(config: classifier.ClassifierConfig, windows: Windows, link: reuse.Link) -> T2TNetwork:
    return T2TNetwork(
        **_shared(config),
        first_split=windows,
        token_width=config.token_width,
        random_features=config.random_features,
        token_dropout=config.token_dropout,
        link=link,
    )


def _deit(config: classifier.ClassifierConfig, windows: Windows, link: reuse.Link) -> DeiTNetwork:
    side, stride, padding = windows
    if side != stride:
        raise ConfigError(
            f"model.windows = {windows}: patches of a deit backbone do not overlap, their stride is their side"
        )
    return DeiTNetwork(**_shared(config), patch=side, padding=padding, link=link)


def _shared(config: classifier.ClassifierConfig) -> dict[str, Any]:
    """The options that a cascade and its networks have in common."""
    names = {field.name for field in dataclasses.fields(PublishedViTConfig)}
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name in names
    }
