"""What the classifiers of all families have in common: some options, how they are called, the linear
head. Their bodies are not here.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest, option
from vit_jax.base.sizes import Size
from vit_jax.compute import recompute
from vit_jax.compute.choices import AUTO
from vit_jax.models.contract import Capture, ModelOutput, PatchBatch
from vit_jax.models.embeddings import interpolate

# Heads by name: a DeiT has one more for distillation, a Dynamic Vision Transformer those of each exit.
EXIT = r"(exit_\d+/)?"
HEADS = f"{EXIT}head(_distilled)?/.*"
# And with what stands before it.
READOUTS = f"{EXIT}(head|head_distilled|representation)/.*"
# What comes before the first layer in most families; see `ClassifierConfig.inputs`.
INPUTS = ("embedding", "position", r"registers?", r"\w*token", r"(backbone/)?root")


def without_exits(patterns: Iterable[str]) -> list[str]:
    """Patterns for heads as an earlier version had them: it did not know those of exits."""
    return [pattern.replace(EXIT, "") for pattern in patterns]


def besides_heads(patterns: Iterable[str]) -> list[str]:
    """Those patterns that are not for heads, which select nothing of a model without a head."""
    heads = without_exits([HEADS, READOUTS])
    return [pattern for pattern in patterns if without_exits([pattern])[0] not in heads]


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
    """Base of a family's `Config`. `image_size` in pixels, and `channels`, come from the data."""

    # Whether layers are convolutions, which XLA's CPU back end computes in float32 only.
    convolutional: ClassVar[bool] = False
    # Parameters whose last axis but one runs over the channels of the images.
    image_kernels: ClassVar[tuple[str, ...]] = ("embedding/kernel",)
    # The axes that tensor parallelism shards in layers that only this family has: (pattern, axis from
    # the end), as `meshes.TENSOR_RULES` has them for the shared layers.
    tensor_rules: ClassVar[tuple[tuple[str, int], ...]] = ()

    image_size: Size
    num_classes: int = option(
        1000,
        "outputs of the head; 0: no head; in a run by default as many as the data has classes",
        minimum=0,
        fitted=True,
    )
    head_init: str = option(
        "zeros",
        "initial head kernel: zeros, or normal with std 0.02",
        choices=("zeros", "normal"),
        may_change=True,
    )
    head_bias: float = option(0.0, "initial head bias; -10 for sigmoid loss on many classes")
    dtype: str = option(
        "float32",
        "type of the computation; parameters are float32",
        choices=("float32", "bfloat16"),
    )
    dtype_on_cpu: str = option(
        "auto",
        "what CPUs compute in where dtype is bfloat16, which most of them only emulate; auto: float32, or "
        "bfloat16 on CPUs with AMX or AVX-512 BF16; same: as dtype",
        choices=("auto", "float32", "same"),
        role="compute",
    )
    remat: str = option(
        "auto",
        "which activations are stored for the backward pass: all (none), attention's result and the "
        "MLPs' first product (save_products), attention's result (save_attention), only each block's "
        "input (full); auto: save_products on CPUs and TPUs, none on GPUs and for convolutions",
        choices=("auto", *recompute.POLICIES),
        role="compute",
    )
    unroll: int = option(
        AUTO,
        "blocks compiled side by side; 0: all (slowest compile); "
        "-1: on CPUs all of up to 24 blocks where remat recomputes nothing; else one",
        minimum=AUTO,
        role="compute",
    )
    channels: int = 3
    # An option of families with batch norms, see `batch_norm.BatchNormConfig`.
    fixed_statistics: ClassVar[bool] = False

    @property
    def height_width(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return sizes.height_width(self.image_size)

    @property
    def two_heads(self) -> bool:
        """Whether the second of two heads is there to learn from a teacher; those are the model's exits."""
        return False

    @property
    def knows_positions(self) -> bool:
        """Whether the network tells a token's place: by positions, or by convolutions or layers across tokens."""
        return True

    @property
    def fixed_size_reason(self) -> str:
        """Why all images must have the model's own size; '' if it takes a `contract.PatchBatch`."""
        return "its layers work on the whole grid of an image"

    @property
    def known_as(self) -> tuple[str, str]:
        """The paper whose model it is, and its name there, such as ('DINOv3', 'ViT-S+/16'); '' where listed names say
        it.
        """
        return "", ""

    def may_be_called(self, name: str) -> bool:
        """Whether the models that a listed name stands for may have the parts that this one has."""
        return True

    @property
    def exit_flops(self) -> tuple[int, ...]:
        """Operations of one image up to each early exit, all that came before included, counted as
        `flops` are; () for a model without early exits. See `contract.Exiting`.
        """
        return ()

    @property
    def layers(self) -> dict[str, int | dict[str, int]]:
        """The network's layers from input to output, as layer-wise decay counts them: the beginning
        of their parameters' names, and how many there are. Stacked ones end in `layers`. Networks
        that stand side by side have such a dict each, by the beginning of their parameters' names.
        """
        return {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Patterns of the beginnings of the names of parameters that come before the first layer, which layer-wise
        decay slows most; of networks that stand side by side, of the names within one.
        """
        return INPUTS

    def flops(self) -> int | None:
        """Operations of one image's forward pass: matrix products and convolutions only, a multiply-add counted as 2,
        full attention; `None`: as `registry.count_flops` counts them in the model's program.
        """
        return None

    def options_for_image_size(self, image_size: Size) -> dict[str, Any]:
        """The other options that change with the size of the images, if the weights are kept."""
        return {}

    def reset_patterns(self, target: "ClassifierConfig") -> tuple[str, ...]:
        """Patterns of the parameters that `target`, a model of the same family, cannot take from
        this one, and that are re-initialised: those of the head, if it has other classes.
        """
        return ("head/.*",) if target.num_classes != self.num_classes else ()

    def fit_parameter(
        self, name: str, target: "ClassifierConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        """How the parameter `name` of this model becomes that of `target`, of the same family.

        Args:
          resize: how tables of positions are interpolated, see `embeddings.interpolate`.

        Returns:
          The method in words, and a function of the array; `None` if the array is used as it is.

        Raises:
          ConfigError: the parameter has another meaning there, though it may have the same shape.
        """
        return None


class Classifier(nnx.Module):
    """Base of every family's model: images to logits. `config` says what varies; parameters are float32
    whatever the compute dtype.
    """

    config: ClassifierConfig

    def __call__(
        self,
        images: jax.Array | PatchBatch,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        capture: Capture = False,
    ) -> ModelOutput:
        """Classifies images.

        Args:
          images: (B, H, W, C) float, normalised; of the config's image size. Or images of sizes of their own, if
            the config has no `fixed_size_reason`; `tokens` of the output then end in padding.
          deterministic: no dropout, no stochastic depth, and batch norms by running statistics.
          rngs: randomness (the stream `dropout`) when not deterministic.
          capture: also return what layers compute, see `contract.Capture`: every block's output, `blocks`
            (L, B, N, D), and attention weights, `attention` (L, B, H, N, N), if the family has such.
        """
        raise NotImplementedError

    def last_norm(self, x: jax.Array, layer: str) -> jax.Array:
        """The output of a layer after the model's last norm, the one before pooling; as it is where that norm is of
        another width or place, or there is none.

        Args:
          x: tokens (B, N, D), or a map (B, h, w, D).
          layer: its name, see `layer_features.layer_names`.
        """
        return x

    def classify(self, features: jax.Array) -> jax.Array | None:
        """Logits (B, classes) float32 of features (B, D); `None` for a model without a head."""
        return self.head(features.astype(jnp.float32)) if self.config.num_classes else None


def patch_option():
    """The option `patch` of families that split the image itself into patches."""
    return option(16, "side of a patch in pixels", minimum=1, role="size", fitted=True)


class Patches:
    """Beside `ClassifierConfig`, for a family with `patch_option`: its grid, and what changes with it."""

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return patch_grid(self)

    def fit_parameter(
        self, name: str, target: "ClassifierConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        """How a parameter becomes that of `target`: learned positions named `position`, and the patch embedding."""
        if name == "position":
            return fit_positions(self, target, resize)
        return fit_patches(name, self, target, resize)


def check_heads(config: ClassifierConfig) -> None:
    """Raises `ConfigError` unless `config.heads` divide `config.width`."""
    if config.width % config.heads:
        raise ConfigError(f"model width {config.width} cannot be split into {config.heads} heads")


def check_size(name: str, kind: str, size: str, known: Collection[str]) -> None:
    """Refuses the name of a model whose size is none of its family's."""
    if size not in known:
        raise ConfigError(
            f"model {name!r}: there is no {kind} of size {size!r}{nearest(size, known)}"
        )


def patch_grid(config: ClassifierConfig) -> tuple[int, int]:
    """How many patches of side `config.patch` an image has, down and across.

    Raises:
      ConfigError: the patches do not divide the image.
    """
    height, width = config.height_width
    if height % config.patch or width % config.patch:
        raise ConfigError(
            f"image size {sizes.size_text(config.image_size)} cannot be split into patches of "
            f"{config.patch}: choose a multiple of it"
        )
    return height // config.patch, width // config.patch


def fit_patches(
    name: str, source: ClassifierConfig, target: ClassifierConfig, resize: str
) -> tuple[str, Callable] | None:
    """`ClassifierConfig.fit_parameter` of the patch embedding, for families that cut the image itself into patches."""
    if name != "embedding/kernel" or source.patch == target.patch:
        return None
    from vit_jax.models.patch_kernels import resize_patch_embedding

    return "pseudo-inverse", lambda x: resize_patch_embedding(x, target.patch, method=resize)


def fit_positions(
    source: ClassifierConfig, target: ClassifierConfig, resize: str
) -> tuple[str, Callable] | None:
    """`ClassifierConfig.fit_parameter` of learned positions (1, prefix + patches, width), whose first `prefix` rows
    belong to learned tokens.
    """
    rows = [math.prod(config.grid) + config.prefix for config in (source, target)]
    if source.prefix != target.prefix and rows[0] == rows[1]:
        raise ConfigError(
            f"of the {rows[0]} rows of the position embedding, {source.prefix} belong to no patch in the "
            f"checkpoint, {target.prefix} in the model: set position_of_class={source.position_of_class}"
        )
    same = (source.prefix, source.width) == (target.prefix, target.width)
    if not same or source.grid == target.grid:
        return None
    grids = {"new_grid": target.grid, "old_grid": source.grid}
    return resize, lambda x: interpolate(x, method=resize, prefix=source.prefix, **grids)


def check_images(images: jax.Array | PatchBatch, config: ClassifierConfig) -> None:
    """Raises `ValueError` unless images (B, H, W, C) have the one shape that the model is for, or patches of sizes
    of their own those that it can take.
    """
    if isinstance(images, PatchBatch):
        if reason := config.fixed_size_reason:
            raise ConfigError(
                f"the model takes images of {sizes.size_text(config.image_size)} alone, not of sizes of their own: "
                f"{reason}"
            )
        values = config.patch**2 * config.channels
        if images.patches.shape[2] != values:
            raise ValueError(
                f"patches of {images.patches.shape[2]} values given to a model for {values} (patch {config.patch}, "
                f"{config.channels} channels)"
            )
        return
    shape = (*config.height_width, config.channels)
    if images.shape[1:] != shape:
        raise ValueError(f"images of {images.shape[1:]} given to a model for {shape}")


def head(width: int, config: ClassifierConfig, rngs: nnx.Rngs) -> nnx.Linear:
    """The last layer, (B, width) -> (B, num_classes). It computes in float32: logits and loss must
    not be rounded.
    """
    zeros = config.head_init == "zeros"
    return nnx.Linear(
        width,
        config.num_classes,
        kernel_init=nnx.initializers.zeros if zeros else nnx.initializers.normal(0.02),
        bias_init=nnx.initializers.constant(config.head_bias),
        rngs=rngs,
    )
