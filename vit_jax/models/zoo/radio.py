"""C-RADIO (arXiv 2312.06709, 2412.07679, 2601.17237): ViTs that learned the features of several teachers, for images of
any size.
"""

# Cropped positions: there is one table, for the largest image. An image of h x w patches has the table of max(h, w)
# rows and columns that it is resized to, linearly and without antialiasing, from its first row and column on. So a
# model has the same parameters at every size, and nothing is interpolated when it is loaded for another.
#
# The class tokens are one for each teacher whose summary was learned; without positions they begin as different ones.
# `summary` of them, one after the other, are the image's vector. There is no bias of patches, and no last norm.

import dataclasses
import re
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.models import classifier
from vit_jax.models.contract import PatchBatch
from vit_jax.models.embeddings import corner_aligned, prepend
from vit_jax.models.zoo.vit_zoo import SIZES, PublishedViT
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

# LayerScale and the rule of the corners as timm has them.
_V3 = {
    "B": dict(layer_scale="all", table_corners=True),
    "L": dict(layer_scale="all"),
    "H": dict(table_corners=True),
    "g": dict(depth=40, width=1536, mlp_dim=6144, heads=24),
}
_V4 = {"So400m": {}, "H": {}}
VERSIONS = {"v3": (_V3, dict(class_tokens=1, summary=(0,))), "v4": (_V4, {})}
VARIANTS = [f"C-RADIO{version}-{size}/16" for version, (sizes, _) in VERSIONS.items() for size in sizes]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RadioConfig(PublishedViTConfig):
    """A C-RADIO."""

    position: ClassVar[str] = "learned"
    position_at: ClassVar[str] = "auto"
    position_of_class: ClassVar[bool] = False
    position_of_registers: ClassVar[bool] = False
    native_resize: ClassVar[str] = "linear"
    native_aspect: ClassVar[bool] = True
    distilled: ClassVar[bool] = False
    pool_prefix: ClassVar[bool] = False

    pool: str = option(
        "token",
        "how tokens become one vector; token: the class tokens of model.summary, one after the other; the others read "
        "the patches",
        choices=("token", "mean", "gem", "map"),
        role="structure",
    )
    class_tokens: int = option(
        3, "class tokens, one for each teacher of summaries", minimum=1, role="structure"
    )
    summary: tuple = option(
        (0, 1), "which class tokens are the image's vector, from 0", minimum=0, role="structure"
    )
    registers: int = option(7, "learned tokens without a position", minimum=0, role="structure")
    table_side: int = option(
        128, "rows and columns of the table of positions", minimum=1, role="structure"
    )
    table_corners: bool = option(
        False,
        "the table is resized with its corners in place (C-RADIOv3-B and -H)",
        role="convention",
    )
    activation: str = option("gelu", "of the MLPs", choices=ACTIVATIONS, role="convention")
    patch_bias: bool = option(False, "bias of the patch embedding", role="structure")
    last_norm: str = option(
        "none",
        "what the last norm norms: all tokens, or their one vector (pooled); none: there is none",
        choices=("tokens", "pooled", "none"),
        role="structure",
    )

    def __post_init__(self):
        object.__setattr__(self, "summary", tuple(self.summary))  # JSON has no tuples
        super().__post_init__()
        object.__setattr__(self, "keep_class_token", False)
        if not self.summary or max(self.summary) >= self.class_tokens:
            raise ConfigError(
                f"model.summary={self.summary} must name class tokens from 0 to {self.class_tokens - 1} (model."
                f"class_tokens={self.class_tokens})"
            )

    has_class_token = property(lambda self: True)
    tokens_with_position = property(lambda self: self.class_tokens)

    @property
    def pooled_width(self) -> int:
        """Size of the one vector."""
        return len(self.summary) * self.width if self.pool == "token" else self.width

    @property
    def fixed_size_reason(self) -> str:
        """Why images cannot have sizes of their own."""
        return "its positions are resized with their corners in place" if self.table_corners else ""

    @property
    def of_table(self) -> "RadioConfig":
        """The same model for images that have the whole table."""
        return dataclasses.replace(self, image_size=self.table_side * self.patch)

    def fit_parameter(
        self, name: str, target: "RadioConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        """The table of positions is the same at every size."""
        return None if name == "position" else super().fit_parameter(name, target, resize=resize)


def options_from_name(name: str) -> dict | None:
    """`C-RADIOv4-H/16` -> its size, tokens and patch; `None` for a name of another family.

    A v3 has one class token here and seven registers, as timm has it; its files do not contain how many of the eight
    were learned from summaries.
    """
    match = re.fullmatch(r"C-RADIO(v\d)-(.+)/([1-9]\d*)", name)
    if not match:
        return None
    version, size, patch = match.groups()
    if version not in VERSIONS:
        raise ConfigError(f"model {name!r}: of C-RADIO there are here {', '.join(VERSIONS)}")
    sizes, common = VERSIONS[version]
    classifier.check_size(name, f"C-RADIO{version}", size, sizes)
    names = ("depth", "width", "mlp_dim", "heads")
    known = dict(zip(names, SIZES[size], strict=True))
    return known | common | sizes[size] | {"patch": int(patch)}


class Radio(PublishedViT):
    """Images to logits, as `PublishedViT`.

    Parameters: `class_token` (1, class_tokens + registers, D) has the registers too, as the authors have them.
    """

    def __init__(self, config: RadioConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        shape = (1, config.class_tokens + config.registers, config.width)
        self.class_token = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))
        if config.registers:
            del self.registers

    def make_position(self, config: RadioConfig, rngs: nnx.Rngs) -> nnx.Param:
        """The table (1, rows · columns, D) of the largest image."""
        shape = (1, config.table_side**2, config.width)
        return nnx.Param(nnx.initializers.normal(config.width**-0.5)(rngs.params(), shape))

    def make_pool(self, config: RadioConfig, rngs: nnx.Rngs) -> Callable:
        pool = super().make_pool(config, rngs)
        if config.pool != "token":
            return pool
        chosen = np.asarray(config.summary)
        return lambda tokens, lengths=None: tokens[:, chosen].reshape(tokens.shape[0], -1)

    def add_positions(
        self,
        patches: jax.Array,
        visible: jax.Array | None = None,
        native: PatchBatch | None = None,
    ) -> jax.Array:
        if native is None:
            return super().add_positions(patches, visible)
        from vit_jax.models import native_sizes

        table = self.position[...].astype(patches.dtype)
        x = patches + native_sizes.resized_table(table, native, self.config.of_table)
        return prepend([self.class_token[...].astype(x.dtype)], x)

    def positions(self, dtype: jnp.dtype) -> jax.Array:
        config = self.config
        side, old = max(config.grid), config.table_side
        resize = corner_aligned if config.table_corners else _half_pixel
        down, across = (resize(side, old)[:n].astype(np.float32) for n in config.grid)
        table = self.position[...].astype(jnp.float32).reshape(old, old, -1)
        # Accelerators round the operands of products by default.
        exact = jax.lax.Precision.HIGHEST
        table = jnp.einsum("yh,xw,hwd->yxd", down, across, table, precision=exact)
        return table.reshape(1, -1, config.width).astype(dtype)


def _half_pixel(new: int, old: int) -> np.ndarray:
    """(new, old) float64 weights of linear interpolation at half-pixel centres, without antialiasing."""
    at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)))


NAME, Config, Model = "radio", RadioConfig, Radio  # for the registry
