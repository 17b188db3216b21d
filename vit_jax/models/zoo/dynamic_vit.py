"""Dynamic Vision Transformer (arXiv 2105.15075): a cascade of T2T-ViTs or DeiTs, each a network of its own
with its own head, which see an image in more and more tokens. An image leaves at the first exit that
is sure enough.

As the authors' code defines it; what an exit takes over from the previous one is in `reuse`. Where the paper says less:
- exits share nothing; each has its own class token, positions, last norm and head;
- an exit takes over from the previous one alone, and the gradient goes back there.

Published grids are 7 × 7, 10 × 10 and 14 × 14 at 224 pixels. Other grids get the smallest windows that
give them: of T2T's first split 2s - 1 pixels for a stride of s, of DeiT patches with zeros around the
image where they do not divide it. With kept weights, another resolution keeps the windows and has
other grids; learned positions are interpolated, sinusoids computed for the new size.

Operations: `vit_jax models` counts a multiply-add as 2, the paper as 1. Its 0.47, 1.46 and 3.50 G of
DVT-T2T-ViT-12 are 0.94, 2.9 and 6.9 here: norms are not counted here.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.base.sizes import Size
from vit_jax.compute import attend
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.models import classifier
from vit_jax.models.contract import ModelOutput
from vit_jax.models.zoo import cascade, reuse, t2t, vit_zoo

# Backbone and size.
SIZES = {
    "T2T-ViT-12": ("t2t", t2t.SIZES["12"]),
    "T2T-ViT-14": ("t2t", t2t.SIZES["14"]),
    "DeiT-S": ("deit", vit_zoo.SIZES["S"]),
}
VARIANTS = [f"DVT-{size}" for size in SIZES]
ACCURACY = {"DVT-T2T-ViT-12": 80.0}  # of the last exit
SMOKE = ("dynamic_vit.py:smoke", 96.9, 231)
GRIDS = (7, 10, 14)


@dataclasses.dataclass(frozen=True)
class DynamicViTConfig(reuse.ReuseConfig, classifier.ClassifierConfig):
    """A cascade. Exits differ in their grids alone."""

    backbone: str = option("t2t", "network of each exit", choices=("t2t", "deit"), role="structure")
    grids: tuple = option(
        GRIDS,
        "tokens of a side at each exit, such as 7,10,14; or (down, across) of each",
        role="size",
    )
    windows: tuple = option(
        (),
        "side, stride and padding of the windows of the image at each exit; (): those that give the grids",
        role="size",
    )
    depth: int = option(12, "number of blocks of an exit", minimum=1, role="size")
    width: int = option(256, "size of a token", minimum=1, role="size")
    mlp_dim: int = option(512, "hidden size of the MLPs", minimum=1, role="size")
    heads: int = option(4, "attention heads", minimum=1, role="size")
    token_width: int = option(64, "t2t: size of a token between the splits", minimum=1, role="size")
    random_features: int = option(
        32, "t2t: fixed directions of a performer; half of token_width", minimum=1, role="size"
    )
    token_dropout: float = option(
        0.1, "t2t: after attention and MLP of the layers between the splits", minimum=0, below=1
    )
    position: str = option(
        "sinusoid",
        "position embeddings; sinusoid: fixed, t2t alone",
        choices=("sinusoid", "learned"),
        role="structure",
    )
    dropout: float = option(
        0.0, "after positions, attention and MLP layers (ViT B.1)", minimum=0, below=1
    )
    drop_path: float = option(
        0.0, "stochastic depth of an exit's last block, growing linearly from 0", minimum=0, below=1
    )
    attention: str = option(
        "auto",
        "how attention is computed; xla where relations are reused. cudnn: GPU, 16 bits; splash: TPU",
        choices=attend.IMPLEMENTATIONS,
        role="compute",
    )
    qkv_bias: bool = option(
        False,
        "biases of the blocks' QKV projections (T2T has none, DeiT has them)",
        role="structure",
    )
    activation: str = option("gelu", "of the MLPs", choices=ACTIVATIONS, role="convention")
    epsilon: float = option(1e-5, "of the layer norms", role="convention")

    def __post_init__(self):
        grids = tuple(sizes.parse(grid, "model.grids") for grid in self.grids)
        object.__setattr__(self, "grids", grids)
        object.__setattr__(self, "windows", tuple(tuple(w) for w in self.windows))
        pairs = [sizes.height_width(grid) for grid in grids]
        rising = all(
            a[0] <= b[0] and a[1] <= b[1] and a != b for a, b in zip(pairs, pairs[1:], strict=False)
        )
        if not grids or not rising:
            raise ConfigError(
                f"model.grids = {_text(grids)}: each exit must have more tokens than the previous one, such "
                f"as {_text(GRIDS)}"
            )
        given = [len(w) for w in self.windows]
        if given and given != [3] * len(grids):
            raise ConfigError(
                f"model.windows = {self.windows} must be the side, stride and padding of windows for each of "
                f"the {len(grids)} exits of model.grids"
            )
        if self.backbone == "deit" and self.position == "sinusoid":
            raise ConfigError(
                "model.backbone=deit has learned positions: set model.position=learned"
            )
        self.networks  # noqa: B018  refuses grids that the images do not give

    @property
    def networks(self) -> tuple[cascade.T2TNetwork | cascade.DeiTNetwork, ...]:
        """The network of each exit."""
        return _networks(self)

    @property
    def reused(self) -> reuse.ReuseConfig:
        """The options of reuse alone."""
        names = [field.name for field in dataclasses.fields(reuse.ReuseConfig)]
        return reuse.ReuseConfig(**{name: getattr(self, name) for name in names})

    @property
    def image_kernels(self) -> tuple[str, ...]:
        """Kernels whose last axis but one runs over the channels of the images: those of each exit."""
        return tuple(
            f"{name}/{kernel}"
            for name, network in zip(exit_names(self), self.networks, strict=True)
            for kernel in network.image_kernels
        )

    @property
    def tokens(self) -> int:
        """Tokens of the last exit."""
        return self.networks[-1].tokens

    @property
    def layers(self) -> dict[str, dict[str, int]]:
        """The layers, from input to output, for layer-wise decay, of each exit: they stand side by side."""
        return {name: {"encoder/layers": self.depth} for name in exit_names(self)}

    @property
    def exit_flops(self) -> tuple[int, ...]:
        """Operations of one image up to each exit, those before included. Matrix products only."""
        total, flops = 0, []
        for network in self.networks:
            total += network.flops() + network.link.flops(network)
            flops.append(total)
        return tuple(flops)

    def flops(self) -> int:
        """Operations of one image that no exit lets go: those of `exit_flops` up to the last."""
        return self.exit_flops[-1]

    def options_for_image_size(self, image_size: Size) -> dict[str, Any]:
        """The windows of the image stay; so there are other grids."""
        pixels = sizes.height_width(image_size)
        fits = [cascade.at_size(self.backbone, pixels, n.windows) for n in self.networks]
        if not all(fits):
            return {}  # whose error says what does not fit
        windows, grids = zip(*fits, strict=True)
        return {"windows": windows, "grids": tuple(map(sizes.parse, grids))}

    def reset_patterns(self, target: "DynamicViTConfig") -> tuple[str, ...]:
        return tuple(f"exit_\\d+/{pattern}" for pattern in super().reset_patterns(target))

    def fit_parameter(
        self, name: str, target: "DynamicViTConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        """How a parameter becomes that of `target`: each exit as a network of its own."""
        exit_name, _, name = name.partition("/")
        index = exit_names(self).index(exit_name)
        return self.networks[index].fit_parameter(name, target.networks[index], resize=resize)


def exit_names(config: DynamicViTConfig) -> list[str]:
    """The names below which the parameters of each exit are."""
    return [f"exit_{i + 1}" for i in range(len(config.grids))]


def options_from_name(name: str) -> dict | None:
    """`DVT-T2T-ViT-12` -> its backbone and size; `None` for a name of another family."""
    match = re.fullmatch(r"DVT-(.+)", name)
    if not match:
        return None
    classifier.check_size(name, "DVT", match[1], SIZES)
    backbone, (depth, width, mlp_dim, heads) = SIZES[match[1]]
    options = dict(backbone=backbone, depth=depth, width=width, mlp_dim=mlp_dim, heads=heads)
    if backbone == "deit":
        options |= dict(position="learned", qkv_bias=True, epsilon=1e-6)
    return options


class DynamicViT(classifier.Classifier):
    """Images to the logits of every exit, see `contract.Exiting`. The
    parameters of an exit are below `exit_1`, `exit_2`, …
    """

    def __init__(self, config: DynamicViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        for name, network in zip(exit_names(config), config.networks, strict=True):
            setattr(self, name, cascade.MODELS[type(network)](network, rngs=rngs))

    @property
    def num_exits(self) -> int:
        """How many exits there are, one for each grid."""
        return len(self.config.grids)

    def exit(
        self, index: int, images: jax.Array, carried: reuse.Carried | None = None
    ) -> tuple[jax.Array, reuse.Carried]:
        """Logits of one exit, and what the next one needs: `features` (B, M, D), M being the patches of the
        exit, and `relations` (B, layers · heads, N, N), in the dtype of the computation.
        """
        output, carried = self._network(index)(images, carried)
        return output.logits, carried

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        """The last exit's output, with the logits of all as `exits`."""
        carried, exits, last = None, [], self.num_exits - 1
        for index in range(self.num_exits):
            wanted = capture if index == last else False
            output, carried = self._network(index)(
                images, carried, deterministic=deterministic, rngs=rngs, capture=wanted
            )
            exits.append(output.logits)
        return output.replace(exits=jnp.stack(exits) if self.config.num_classes else None)

    def last_norm(self, x: jax.Array, layer: str) -> jax.Array:
        return self._network(self.num_exits - 1).last_norm(x, layer)

    def _network(self, index: int) -> cascade.Exit:
        return getattr(self, exit_names(self.config)[index])


@functools.lru_cache(maxsize=64)
def _networks(config: DynamicViTConfig) -> tuple[cascade.T2TNetwork | cascade.DeiTNetwork, ...]:
    grids = [sizes.height_width(grid) for grid in config.grids]
    links = [
        reuse.Link(config.reused, before, grid == grids[-1])
        for before, grid in zip([None, *grids], grids, strict=False)
    ]
    windows = config.windows or tuple(_windows_for(config, grid) for grid in grids)
    return tuple(map(functools.partial(cascade.network, config), grids, windows, links))


def _windows_for(config: DynamicViTConfig, grid: tuple[int, int]) -> cascade.Windows:
    """The windows that cut the images into a grid.

    Raises:
      ConfigError: there are none.
    """
    by_grid = cascade.fitting(config.backbone, config.height_width)
    if grid not in by_grid:
        near = sorted(by_grid, key=lambda g: abs(math.prod(g) - math.prod(grid)))[:3]
        near = _text(tuple(sizes.parse(g) for g in sorted(near)))
        raise ConfigError(
            f"model.grids: images of {sizes.size_text(config.image_size)} pixels cannot be split into "
            f"{grid[0]}x{grid[1]} tokens by the windows of a {config.backbone} backbone; nearest grids "
            f"that fit: {near or 'none'}"
        )
    return by_grid[grid]


def _text(grids: tuple[Size, ...]) -> str:
    return ",".join(map(sizes.size_text, grids))


Config, Model = DynamicViTConfig, DynamicViT  # for the registry
