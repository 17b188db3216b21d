"""CrossViT (arXiv 2103.14899): two branches with patches of different sizes, which exchange information
through their class tokens.

It computes what the authors' code and timm compute. Differences and conventions:
- Kernels of the transformer are initialised Xavier-uniform, as in all families here; the authors draw
  them from a normal distribution with std 0.02.
- GFLOPs: `vit_jax models` counts a multiply-add as 2, the paper as 1 (5.6 G for S is 11.2 here).
  Neither counts the resizing of the image.
- Parameters: the paper prints 6.9, 26.7 and 104.7 M for Ti, S and B; the authors' code has 7.0, 26.9
  and 105.0 M, and so has this.
- Image sizes: the authors' file names and the paper give the large branch's, 224 or 384; the images
  have 240 or 408 pixels, which is `image_size` here.

Options and `tokens` without `small_` belong to the large branch, the one with large patches and most
of the layers.
"""

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
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import by_depth, draw_key, split
from vit_jax.compute.learned import per_example
from vit_jax.models import classifier
from vit_jax.models.attention import implementation_option
from vit_jax.models.contract import ModelOutput
from vit_jax.models.embeddings import ConvolutionalStem, PatchEmbedding, prepend, resize_images
from vit_jax.models.layers import layer_norm
from vit_jax.models.vit import VisionTransformerConfig
from vit_jax.models.zoo.branches import TwoBranchStage

# Width of the small branch (the large one has twice that), heads, blocks of the large branch in a
# stage, ratio of MLP width to width (Tables 1 and 2).
SIZES = {
    "Ti": (96, 3, 4, 4),
    "S": (192, 6, 4, 4),
    "B": (384, 12, 4, 4),
    "9": (128, 4, 3, 3),
    "15": (192, 6, 5, 3),
    "18": (224, 7, 6, 3),
}
STAGES = 3
BRANCHES = ("small", "large")
IMAGE_SIZE = 240
# Side, stride and padding of the convolutional stem's layers, by patch (§4.1).
STEMS = {12: ((7, 4, 3), (3, 3, 0), (3, 1, 1)), 16: ((7, 4, 3), (3, 2, 1), (3, 2, 1))}
# Listed by `vit_jax models`.
VARIANTS = [
    "CrossViT-Ti", "CrossViT-S", "CrossViT-B", "CrossViT-9", "CrossViT-15", "CrossViT-18",
    "CrossViT-9-dagger", "CrossViT-15-dagger", "CrossViT-18-dagger",
]  # fmt: skip
ACCURACY = dict(zip(VARIANTS, (73.4, 81.0, 82.2, 73.9, 81.5, 82.5, 77.1, 82.3, 82.8), strict=True))
SMOKE = ("cross_vit.py:smoke", 97.2, 145)


@dataclasses.dataclass(frozen=True)
class CrossViTConfig(classifier.ClassifierConfig):
    """A CrossViT. `image_size` is that of the small branch; the large one resizes the images."""

    patch: int = option(16, "side of a patch in pixels", minimum=1, role="size")
    width: int = option(384, "size of a token", minimum=1, role="size")
    mlp_dim: int = option(1536, "hidden size of the MLPs", minimum=1, role="size")
    heads: int = option(6, "attention heads", minimum=1, role="size")
    small_patch: int = option(
        12, "side of a patch of the small branch, in pixels", minimum=1, role="size"
    )
    small_width: int = option(192, "size of a token of the small branch", minimum=1, role="size")
    small_mlp_dim: int = option(
        768, "hidden size of the small branch's MLPs", minimum=1, role="size"
    )
    depths: tuple = option(
        ((1, 4),) * STAGES,
        "blocks in each stage: (of the small branch, of the large branch)",
        role="size",
    )
    large_image_size: int | str | tuple = option(
        0,
        "image size of the large branch, in the form of image_size; "
        "0: one patch less than image_size, in whole patches (240: 224, 408: 384, 504: 480)",
        role="structure",
        fitted=True,
    )
    convolutional_stem: bool = option(
        False, "patches are embedded by three convolutions (the paper's †)", role="structure"
    )
    drop_path: float = option(
        0.0, "stochastic depth of the last block, growing linearly from 0", minimum=0, below=1
    )
    attention: str = implementation_option()
    activation: str = option(
        "gelu",
        "of the MLPs and of the projections of class tokens",
        choices=ACTIVATIONS,
        role="convention",
    )
    epsilon: float = option(1e-6, "of the layer norms", role="convention")

    def __post_init__(self):
        # JSON has no tuples.
        depths = tuple(tuple(stage) for stage in self.depths)
        if not depths or any(len(stage) != 2 or min(stage) < 1 for stage in depths):
            raise ConfigError(
                f"model.depths = {self.depths}: each stage needs two numbers of blocks, both at least 1"
            )
        object.__setattr__(self, "depths", depths)
        if self.large_image_size:
            size = sizes.parse(self.large_image_size, "model.large_image_size")
            object.__setattr__(self, "large_image_size", size)
        _check_size("image_size", self.image_size, self.small_patch)
        _check_size("model.large_image_size", self.large_size, self.patch)
        if self.convolutional_stem and not {self.small_patch, self.patch} <= STEMS.keys():
            raise ConfigError(
                f"model.convolutional_stem is for patches of {' and '.join(map(str, STEMS))}, not "
                f"model.small_patch={self.small_patch} and model.patch={self.patch}"
            )
        self.branches  # noqa: B018  refuses widths that heads do not divide

    @property
    def large_size(self) -> Size:
        """Image size of the large branch, in pixels."""
        return self.large_image_size or default_large_size(self.image_size, self.patch)

    @property
    def branches(self) -> dict[str, VisionTransformerConfig]:
        """`small` and `large`, each as a ViT without a head."""
        options = ("heads", "drop_path", "attention", "activation", "epsilon", "channels")
        options += ("dtype", "dtype_on_cpu", "remat", "unroll")
        shared = {name: getattr(self, name) for name in options}
        of_branch = (
            (self.image_size, self.small_patch, self.small_width, self.small_mlp_dim),
            (self.large_size, self.patch, self.width, self.mlp_dim),
        )
        return {
            name: VisionTransformerConfig(
                size, 0, patch=patch, width=width, mlp_dim=mlp_dim, depth=sum(depths), **shared
            )
            for name, (size, patch, width, mlp_dim), depths in zip(
                BRANCHES, of_branch, zip(*self.depths, strict=True), strict=True
            )
        }

    @property
    def image_kernels(self) -> tuple[str, ...]:
        """Kernels whose last axis but one runs over the channels of the images, one for each branch."""
        first = "conv1/kernel" if self.convolutional_stem else "kernel"
        return tuple(f"embedding/{name}/{first}" for name in BRANCHES)

    @property
    def tokens(self) -> int:
        """Tokens of the large branch, its class token included."""
        return self.branches["large"].tokens

    @property
    def layers(self) -> dict[str, int]:
        """The layers for layer-wise decay. Branches run side by side, so each stage counts as one."""
        return {f"stages/{i + 1}": 1 for i in range(len(self.depths))}

    def options_for_image_size(self, image_size: Size) -> dict[str, Size]:
        """Both branches' image sizes change by the same factor, rounded to whole patches."""
        if not self.large_image_size:
            return {}
        return {
            "large_image_size": _scaled(image_size, self.image_size, self.large_size, self.patch)
        }

    def fit_parameter(
        self, name: str, target: "CrossViTConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        """How a parameter becomes that of `target`: each branch's positions are interpolated."""
        for branch in BRANCHES:
            if name == f"position/{branch}":
                return classifier.fit_positions(
                    self.branches[branch], target.branches[branch], resize
                )
        return None

    def flops(self) -> int:
        """Operations of one image's forward pass: matrix products and convolutions of the stem only,
        a multiply-add counted as 2.
        """
        small, large = self.branches.values()
        # Each branch by itself, then its class token in the other branch.
        products = sum(self._stem_products(branch) for branch in (small, large))
        for branch in (small, large):
            n, d, m = branch.tokens, branch.width, branch.mlp_dim
            products += branch.depth * (4 * n * d * d + 2 * n * n * d + 2 * n * d * m)
            products += d * self.num_classes
        for own, other in ((small, large), (large, small)):
            n, d = other.tokens, other.width
            products += len(self.depths) * (
                2 * own.width * d + 2 * d * d + 2 * n * d * d + 2 * n * d
            )
        return 2 * products

    def _stem_products(self, branch: VisionTransformerConfig) -> int:
        """Multiply-adds of a branch's patch embedding."""
        down, across = branch.grid
        if not self.convolutional_stem:
            return down * across * branch.patch**2 * self.channels * branch.width
        products, inputs, places = 0, self.channels, down * across * branch.patch**2
        for outputs, kernel, stride, _ in _stem(branch):
            places //= stride**2
            products += places * kernel**2 * inputs * outputs
            inputs = outputs
        return products


def default_large_size(image_size: Size, patch: int) -> Size:
    """The large branch's image size where only `image_size` is given: the paper's 224, 384 and 480 for
    240, 408 and 504.
    """
    sides = sizes.height_width(image_size)
    return sizes.parse(tuple(max(side // patch - 1, 1) * patch for side in sides))


def options_from_name(name: str) -> dict | None:
    """`CrossViT-15-dagger` -> its sizes and stem; `None` for a name of another family."""
    match = re.fullmatch(r"CrossViT-([^-]+)(-dagger)?", name)
    if not match:
        return None
    size, dagger = match.groups()
    classifier.check_size(name, "CrossViT", size, SIZES)
    small_width, heads, depth, ratio = SIZES[size]
    width = 2 * small_width
    return dict(
        image_size=IMAGE_SIZE,
        width=width,
        mlp_dim=ratio * width,
        heads=heads,
        small_width=small_width,
        small_mlp_dim=ratio * small_width,
        depths=((1, depth),) * STAGES,
        convolutional_stem=bool(dagger),
    )


class CrossViT(classifier.Classifier):
    """Images to logits. Parameters of a branch are named `…/small` or `…/large`."""

    def __init__(self, config: CrossViTConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        branches = config.branches
        draw = nnx.initializers.normal(0.02)
        self.config = config

        def of_each(make: Callable) -> nnx.Dict:
            return nnx.Dict({name: make(branch) for name, branch in branches.items()})

        def stem(branch: VisionTransformerConfig) -> nnx.Module:
            if config.convolutional_stem:
                layers = _stem(branch)
                return ConvolutionalStem(config.channels, layers, dtype=dtype, rngs=rngs)
            return PatchEmbedding(
                branch.patch, config.channels, branch.width, dtype=dtype, rngs=rngs
            )

        self.embedding = of_each(stem)
        self.class_token = of_each(lambda b: nnx.Param(draw(rngs.params(), (1, 1, b.width))))
        self.position = of_each(lambda b: nnx.Param(draw(rngs.params(), (1, b.tokens, b.width))))
        # Strings: integers would come back as such from some checkpoint formats only.
        self.stages = nnx.Dict(
            {
                str(i + 1): TwoBranchStage(branches, depths, dtype=dtype, rngs=rngs)
                for i, depths in enumerate(config.depths)
            }
        )
        self.norm = of_each(lambda b: layer_norm(b.width, config.epsilon, dtype, rngs))
        if config.num_classes:
            self.head = of_each(lambda b: classifier.head(b.width, config, rngs))

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        """Classifies by both branches. Captured are `attention` and `blocks` of the large one, `small_attention`,
        `small_blocks` and `small_tokens` of the small one, the last after its norm.

        Returns:
          `exits` are the logits of the small and of the large branch, `logits` their mean. `features`
          are both class tokens, concatenated; `tokens` are the large branch's, class token first.
        """
        config = self.config
        classifier.check_images(images, config)
        keys = split(draw_key(rngs, deterministic, config.drop_path), len(config.depths))
        small, large = (
            self._embed(name, resize_images(images, branch.height_width))
            for name, branch in config.branches.items()
        )
        captured = []
        for stage, rates, key in zip(
            self.stages.values(), _drop_path_rates(config), keys, strict=True
        ):
            small, large, of_stage = stage(small, large, rates, key, capture)
            captured.append(of_stage)
        small, large = self.norm["small"](small), self.norm["large"](large)
        intermediates = jax.tree.map(lambda *x: jnp.concatenate(x), *captured)
        if capture:
            intermediates["small_tokens"] = small
        class_tokens = small[:, 0], large[:, 0]
        features = jnp.concatenate(class_tokens, axis=-1)
        if not config.num_classes:
            return ModelOutput(None, features, large, intermediates)
        exits = jnp.stack(
            [
                self.head[name](x.astype(jnp.float32))
                for name, x in zip(BRANCHES, class_tokens, strict=True)
            ]
        )
        return ModelOutput(exits.mean(axis=0), features, large, intermediates, exits)

    def last_norm(self, x: jax.Array, layer: str) -> jax.Array:
        """A layer's tokens after the last norm of their branch; `small_tokens` are normed already."""
        if layer == "small_tokens":
            return x
        return self.norm["small" if layer.startswith("small_") else "large"](x)

    def _embed(self, name: str, images: jax.Array) -> jax.Array:
        """Images (B, H, W, C) -> class token and patches of a branch with positions, (B, N, D)."""
        x = self.embedding[name](images)
        class_token = self.class_token[name][...].astype(x.dtype)
        position = self.position[name][...].astype(x.dtype)
        return prepend([class_token], x) + per_example(position, x.shape[0])


def _check_size(name: str, size: Size, patch: int) -> None:
    sides = sizes.height_width(size)
    if any(side % patch for side in sides):
        fits = [
            sizes.size_text(
                sizes.parse(tuple(max(side // patch + up, 1) * patch for side in sides))
            )
            for up in (0, 1)
        ]
        raise ConfigError(
            f"{name} {sizes.size_text(size)} cannot be split into patches of {patch}: take {' or '.join(fits)}"
        )


def _scaled(size: Size, old: Size, new: Size, patch: int) -> Size:
    """`size` times `new` / `old`, rounded to whole patches."""
    sides = zip(*map(sizes.height_width, (size, old, new)), strict=True)
    # Half a patch rounds up.
    counts = ((2 * side * b + patch * a) // (2 * patch * a) for side, a, b in sides)
    return sizes.parse(tuple(max(count, 1) * patch for count in counts))


def _stem(branch: VisionTransformerConfig) -> list[tuple[int, int, int, int]]:
    """Channels, side, stride and padding of the layers of a branch's convolutional stem."""
    channels = (branch.width // 4, branch.width // 2, branch.width)
    return [(c, *layer) for c, layer in zip(channels, STEMS[branch.patch], strict=True)]


def _drop_path_rates(config: CrossViTConfig) -> list[np.ndarray]:
    """For each stage, the rates of its deeper branch's blocks, which grow over all stages."""
    deepest = [max(stage) for stage in config.depths]
    rates, _ = by_depth(config.drop_path, sum(deepest), None)
    return np.split(rates, np.cumsum(deepest)[:-1])


Config, Model = CrossViTConfig, CrossViT  # for the registry
