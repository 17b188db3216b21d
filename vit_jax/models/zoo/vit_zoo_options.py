"""The options of ViTs that others have published, beside those of the paper in `vit`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.models import classifier, embeddings, pooling, positions, rotary
from vit_jax.models.attention import attention_flops
from vit_jax.models.layers import NORMS, mlp_flops
from vit_jax.models.vit import VisionTransformerConfig
from vit_jax.models.zoo import vit_zoo_blocks as blocks

_structure = functools.partial(option, role="structure", published=True)
_convention = functools.partial(option, role="convention", published=True)
# DINOv3's sizes with gated MLPs, which no other ViT has: depth, width, hidden size, heads.
_DINOV3 = {
    (12, 384, 1536, 6): "S+",
    (24, 1024, 4096, 16): "L+",
    (32, 1280, 5120, 20): "H+",
    (40, 4096, 8192, 32): "7B",
}


@dataclasses.dataclass(frozen=True)
class PublishedViTConfig(VisionTransformerConfig):
    """A ViT as others have published it. Conversions set these options; few recipes need them."""

    qk_scale: ClassVar[float] = 0.0  # an option of T2T-ViT alone

    pool: str = option(
        "token",
        "how tokens become one vector; token: the class token; token_mean: beside it the mean of the others "
        "(DINOv2); first: the first patch, without one; gem: generalised mean, its power learned; map: attention",
        choices=("token", "mean", "map", "first", "gem", "token_mean"),
        role="structure",
    )
    keep_class_token: bool = _structure(
        False, "a class token also where pool reads none: blocks do (EVA, DINOv3)"
    )
    pool_prefix: bool = _structure(
        False, "pool=mean, gem and map read class token and registers beside the patches"
    )
    map_heads: int = _structure(0, "heads of attention pooling; 0: as the blocks", minimum=0)
    map_mlp_dim: int = _structure(
        0, "hidden size of attention pooling's MLP; 0: as the blocks'", minimum=0
    )
    last_norm: str = _structure(
        "tokens",
        "what the last norm norms: all tokens, or their one vector (pooled); none: there is none",
        choices=("tokens", "pooled", "none"),
    )
    weighted_layers: bool = _structure(
        False,
        "the last norm reads a sum of all layers' outputs, its weights γ·softmax(s) learned, in place of "
        "the last one's",
    )
    distillation_head: bool = _convention(
        True, "distilled: the second token has its head; else no head reads it"
    )
    patch_bias: bool = _structure(True, "bias of the patch embedding (none in CLIP)")
    patch_norm: bool = _structure(False, "norm on the patches before their positions (AIMv2)")
    pre_norm: bool = _structure(False, "norm on all tokens before the blocks (CLIP)")
    crop_to_patches: bool = _convention(
        False,
        "images that the patches do not divide lose their last rows and columns (SigLIP So400m/14 at 384)",
    )
    position: str = option(
        "learned",
        "position embeddings; learned: 1-D; learned2d, factorized: columns and rows; coordinates: of patches' centres; "
        "relative, bias2d, transformer_xl, deberta: in attention's logits",
        choices=positions.KINDS,
        role="structure",
    )
    position_at: str = option(
        "auto",
        "where positions are added: at the stem, in all layers each its own, in all layers the same (shared); "
        "auto: of deberta shared, of others in attention's logits in layers, else at the stem",
        choices=positions.PLACES,
        role="structure",
    )
    position_of_class: bool = _structure(
        True, "the class token has a learned position too (official code; not big_vision)"
    )
    position_of_registers: bool = _structure(
        False, "registers have learned positions too (timm's reg_tokens)"
    )
    native_resize: str = _convention(
        "bilinear",
        "how learned positions become those of an image of a size of its own; bilinear and bicubic with "
        "antialiasing, linear without",
        choices=positions.RESIZES,
    )
    native_aspect: bool = _convention(
        False,
        "images of sizes of their own have positions of the square of their longer side, from its first row and column "
        "on (timm's par)",
    )
    rope: str = _structure(
        "none",
        "rotary positions; axial: integer places (EVA-02); centred: from -1 to 1 (DINOv3); mixed: learned "
        "frequencies (2403.13298)",
        choices=rotary.KINDS,
    )
    rope_theta: float = _convention(
        10_000.0,
        "base of their frequencies (100 in DINOv3); mixed: what these begin with",
        above=0,
    )
    rope_grid: tuple = _convention(
        (),
        "axial: rows and columns of the grid whose places are spread over the patches, as a rule that "
        "of pre-training; (): each grid has its own",
        minimum=1,
        length=(0, 2),
    )
    rope_offset: float = _convention(
        0.0, "axial: the first row and column (1 in Perception Encoders)"
    )
    rope_registers: float = _convention(
        0.0,
        "axial: base of the frequencies of registers, rotated as a square grid of their own (100 in "
        "ViT-5); 0: they are not rotated",
        minimum=0,
    )
    rope_shift: float = option(
        0.0,
        "centred: in training, places are shifted by up to this much, rows and columns apart (DINOv3)",
        minimum=0,
        published=True,
    )
    rope_jitter: float = option(
        0.0,
        "centred: in training, rows and columns are each multiplied by a factor between this and its inverse; 0: none",
        minimum=0,
        published=True,
    )
    rope_rescale: float = option(
        0.0,
        "centred: in training, rows and columns are multiplied by one factor between this and its inverse (2 in "
        "DINOv3); 0: none",
        minimum=0,
        published=True,
    )
    parallel: bool = _structure(False, "attention and MLP side by side on one norm (ViT-22B)")
    block_branches: int = _structure(0, "attentions and MLPs side by side (2203.09795)", minimum=0)
    differential: bool = _structure(False, "attention is a difference of two (2410.05258)")
    norm: str = _structure(
        "layer", "kind of all norms; rms: without mean and bias (1910.07467)", choices=NORMS
    )
    norm_bias: bool = _structure(True, "biases of the encoder's layer norms (none in ViT-22B)")
    norm_after: bool = _structure(
        False, "post-norm: normalise the outputs of attention and MLP (EVA-02-E, Swin V2)"
    )
    norm_residual: bool = _structure(False, "normalise sums of input and output (BERT)")
    qk_norm: bool = _structure(False, "norm on queries and keys (ViT-22B)")
    attention_inner_norm: bool = _structure(
        False, "norm on the heads' results before their projection (BEiT-3)"
    )
    mlp_inner_norm: bool = _structure(False, "norm on the MLPs' hidden layer (BEiT-3, EVA-02)")
    qkv_bias: bool = _structure(True, "biases of the blocks' QKV projections (none in ViT-22B)")
    key_bias: bool = _structure(True, "qkv_bias: keys have them too (not in BEiT and EVA)")
    projection_bias: bool = _structure(
        True, "biases of attention's last layer and of the MLPs (none in AIMv2)"
    )
    gated_mlp: bool = _structure(
        False,
        "a further product in the MLPs, whose activation multiplies the first; with "
        "activation=silu SwiGLU (2002.05202)",
    )
    layer_scale: str = _structure(
        "none",
        "which residuals are multiplied by a learned number for each channel (2103.17239)",
        choices=("none", "all", "attention"),
    )
    layer_scale_init: float = option(
        1e-5, "what these numbers begin as (1e-4 in ViT-5)", may_change=True, published=True
    )
    token_merging: int = option(
        0,
        "patches that each block merges with those most like them (ToMe, 2210.09461): less work",
        minimum=0,
        may_change=True,
        role="structure",
        published=True,
    )
    drop_path_by: str = option(
        "depth",
        "how drop_path is spread over the blocks; depth: growing linearly from 0; constant: the same in "
        "every block (DeiT III)",
        choices=("depth", "constant"),
        published=True,
    )
    init: str = option(
        "vit",
        "initial weights of patch embedding, tokens and blocks; vit: as the ViT paper's code; deit: as "
        "DeiT's, kernels and tokens normal with std 0.02",
        choices=("vit", "deit"),
        may_change=True,
        published=True,
    )

    def __post_init__(self):
        # JSON has no tuples.
        object.__setattr__(self, "rope_grid", tuple(self.rope_grid))
        # Where the class token is read, it is there anyway.
        keep = self.keep_class_token and not self.reads_class_token
        object.__setattr__(self, "keep_class_token", keep)
        super().__post_init__()
        blocks.check_blocks(self)
        rotary.check_rotation(self)
        positions.check_positions(self)
        if self.token_merging:
            from vit_jax.models.zoo import merging

            merging.check_merging(self)
        if self.distilled and self.last_norm != "tokens":
            raise ConfigError(
                "model.distilled reads class and distillation token with a linear head each: it needs "
                f"model.last_norm=tokens, not {self.last_norm}"
            )
        if self.width % self.pool_heads:
            raise ConfigError(
                f"model width {self.width} cannot be split into model.map_heads={self.map_heads}"
            )

    @property
    def of_paper(self) -> bool:
        """Whether it is a ViT of `vit`: no option has a value that only published weights need."""
        paper = {field.name: field for field in schema.options(VisionTransformerConfig)}
        return all(
            getattr(self, field.name) in paper[field.name].metadata["choices"]
            if field.name in ("pool", "position")
            else field.name in paper or getattr(self, field.name) == field.default
            for field in schema.options(PublishedViTConfig)
        )

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        if self.crop_to_patches:
            return tuple(side // self.patch for side in self.height_width)
        return super().grid

    @property
    def fixed_size_reason(self) -> str:
        if self.position_place in ("", "stem"):
            return ""
        return f"its layers have {self.position} positions of one grid (model.position_at={self.position_at})"

    @property
    def knows_positions(self) -> bool:
        """Whether tokens have positions of any kind."""
        return bool(self.position_place) or self.rope != "none"

    @property
    def known_as(self) -> tuple[str, str]:
        """'DINOv3' and its name there for models of its structure; the name '' where ViTs of that size are listed."""
        if self.rope != "centred" or self.layer_scale != "all" or self.norm != "layer":
            return "", ""
        sizes = (self.depth, self.width, self.mlp_dim, self.heads)
        size = _DINOV3.get(sizes) if self.gated_mlp else None
        return "DINOv3", f"ViT-{size}/{self.patch}" if size else ""

    def may_be_called(self, name: str) -> bool:
        """Whether it is no DeiT's name, or it has neither rotary positions, registers nor gated MLPs."""
        later = self.rope != "none" or self.registers or self.gated_mlp
        return not (later and name.startswith("DeiT-"))

    @property
    def reads_class_token(self) -> bool:
        """Whether what is pooled has the class token apart."""
        return self.pool in ("token", "token_mean")

    @property
    def has_class_token(self) -> bool:
        """Whether a class token stands before the patches."""
        return self.reads_class_token or self.keep_class_token

    @property
    def pooled_width(self) -> int:
        """Size of the one vector."""
        return 2 * self.width if self.pool == "token_mean" else self.width

    @property
    def pool_heads(self) -> int:
        """Heads of attention pooling: `map_heads`, or as many as a layer has."""
        return self.map_heads or self.heads

    @property
    def pool_mlp_dim(self) -> int:
        """Hidden size of attention pooling's MLP: `map_mlp_dim`, or that of a layer."""
        return self.map_mlp_dim or self.mlp_dim

    @property
    def two_heads(self) -> bool:
        return self.distilled and self.distillation_head

    @property
    def position_place(self) -> str:
        """Where positions are added: `stem`, `layers` or `shared`; '' for none. See `positions.place`."""
        return positions.place(self.position, self.position_at)

    @property
    def prefix(self) -> int:
        """Rows of the position embedding that stand for no patch."""
        if not positions.kind_of(self.position).has_prefix:
            return 0
        registers = self.registers if self.position_of_registers else 0
        return (self.tokens_with_position if self.position_of_class else 0) + registers

    @property
    def biased_attention(self) -> bool:
        """Whether something is added to attention's logits, which the kernels cannot do."""
        return positions.kind_of(self.position).acts_in_logits

    @property
    def layers(self) -> dict[str, int]:
        return {"encoder/layers": self.depth}

    @property
    def inputs(self) -> tuple[str, ...]:
        """What comes before the first layer, norms and the frequencies of a mixed rotation (of all layers) included."""
        return (*super().inputs, "patch_norm", "pre_norm", "rope")

    def reset_patterns(self, target: "PublishedViTConfig") -> tuple[str, ...]:
        same_layer = target.representation == self.representation
        same_head = same_layer and target.num_classes == self.num_classes
        has_head = target.num_classes or self.num_classes
        reset = () if same_head or not has_head else ("head(_distilled)?/.*",)
        return reset if same_layer else (*reset, "representation/.*")

    def fit_parameter(
        self, name: str, target: "PublishedViTConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        fitted = positions.fit_parameter(name, self, target, resize)
        return fitted or classifier.fit_patches(name, self, target, resize)

    def flops(self) -> int:
        """Operations of one image's forward pass: matrix products only, a multiply-add counted as 2, full attention."""
        heads = (1 + self.two_heads) * (self.representation or self.pooled_width) * self.num_classes
        head = pooling.flops(self) + 2 * (self.pooled_width * self.representation + heads)
        return self.embedding_flops() + self.block_flops(self.tokens) + head

    def embedding_flops(self) -> int:
        """Those of `flops` that make tokens of an image."""
        return embeddings.flops(self)

    def block_flops(self, n: int) -> int:
        """Those of `flops` of all blocks, for `n` tokens."""
        if self.token_merging:
            from vit_jax.models.zoo import merging

            return merging.block_flops(self, n)
        block = attention_flops(n, self.width)
        block += mlp_flops(n, self.width, self.mlp_dim, gated=self.gated_mlp)
        block += 2 * n * n * self.width * positions.kind_of(self.position).logit_products
        return self.depth * max(self.block_branches, 1) * block
