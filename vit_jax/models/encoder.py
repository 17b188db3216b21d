"""Transformer encoder: pre-norm blocks, stacked along a leading `layers` axis and run by
`jax.lax.scan`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import jax
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import choices, relative, stack
from vit_jax.compute.dropout import by_depth, drop_path, split
from vit_jax.models import pooling, positions, rotary
from vit_jax.models.attention import Angles, Attention
from vit_jax.models.contract import Capture, kept
from vit_jax.models.layers import NORMS, LayerScale, Mlp, norm

if TYPE_CHECKING:
    from vit_jax.models.vit import Config


@dataclasses.dataclass(frozen=True)
class Options:
    """What blocks are made of; of a family that has `width`, `epsilon` and `activation` too."""

    qk_scale: ClassVar[float] = 0.0  # an option of T2T-ViT alone

    parallel: bool = option(
        False,
        "attention and MLP of a block work side by side on one norm (ViT-22B)",
        role="structure",
    )
    norm: str = option(
        "layer",
        "kind of all norms; rms: without mean and bias (1910.07467)",
        choices=NORMS,
        role="structure",
    )
    norm_bias: bool = option(
        True, "biases of the encoder's layer norms (none in ViT-22B)", role="structure"
    )
    norm_after: bool = option(
        False,
        "blocks norm what attention and MLP give, not what they get (EVA-02-E, Swin V2)",
        role="structure",
    )
    qk_norm: bool = option(False, "norm on queries and keys (ViT-22B)", role="structure")
    attention_inner_norm: bool = option(
        False, "norm on the heads' results before their projection (BEiT-3)", role="structure"
    )
    mlp_inner_norm: bool = option(
        False, "norm on the MLPs' hidden layer (BEiT-3, EVA-02)", role="structure"
    )
    qkv_bias: bool = option(
        True, "biases of the blocks' QKV projections (none in ViT-22B)", role="structure"
    )
    key_bias: bool = option(
        True, "qkv_bias: keys have them too (not in BEiT and EVA)", role="structure"
    )
    projection_bias: bool = option(
        True, "biases of attention's last layer and of the MLPs (none in AIMv2)", role="structure"
    )
    gated_mlp: bool = option(
        False,
        "a further product in the MLPs, whose activation multiplies the first; with "
        "activation=silu SwiGLU (2002.05202)",
        role="structure",
    )
    layer_scale: str = option(
        "none",
        "which residuals are multiplied by a learned number for each channel (2103.17239)",
        choices=("none", "all", "attention"),
        role="structure",
    )
    layer_scale_init: float = option(
        1e-5, "what these numbers begin as (1e-4 in ViT-5)", may_change=True
    )
    drop_path_by: str = option(
        "depth",
        "how drop_path is spread over the blocks; depth: growing linearly from 0; constant: the same in "
        "every block (DeiT III)",
        choices=("depth", "constant"),
    )
    init: str = option(
        "vit",
        "initial weights of patch embedding, tokens and blocks; vit: as the ViT paper's code; deit: as "
        "DeiT's, kernels and tokens normal with std 0.02",
        choices=("vit", "deit"),
        may_change=True,
    )


def check(config: Options) -> None:
    """Raises `ConfigError` for blocks that there are not."""
    if config.parallel and config.norm_after:
        raise ConfigError(
            "model.parallel works on one norm of what attention and MLP get, and model.norm_after norms "
            "what they give: take one of them"
        )


def make_norm(
    config: "Config", *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
) -> Callable[[int], nnx.Module]:
    """A function that makes the norm of a width, as all norms around and in the blocks are."""
    return functools.partial(
        norm, config.norm, epsilon=config.epsilon, dtype=dtype, rngs=rngs, bias=config.norm_bias
    )


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (ViT Eq. 2 and 3).

    With `config.parallel` both work on the same x, of which one norm is taken:
    x + attention(norm(x)) + mlp(norm(x)) (ViT-22B §2). With `config.norm_after` it is
    x + norm(attention(x)), then x + norm(mlp(x)). Before that, x may get positions.
    """

    def __init__(self, config: "Config", *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        norm = make_norm(config, dtype=dtype, rngs=rngs)
        own_position = config.position_place == "layers"
        self.position = positions.variables(config, rngs) if own_position else None
        self.attention_norm = norm(config.width)
        self.attention = Attention(
            config.width,
            config.heads,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            key_bias=config.key_bias,
            out_bias=config.projection_bias,
            inner_norm=config.attention_inner_norm,
            scale=config.qk_scale,
            norm_kind=config.norm,
            norm_bias=config.norm_bias,
            epsilon=config.epsilon,
            implementation=config.attention,
            dtype=dtype,
            rngs=rngs,
        )
        if not config.parallel:
            self.mlp_norm = norm(config.width)
        self.mlp = Mlp(
            config.width,
            config.mlp_dim,
            activation=config.activation,
            dropout=config.dropout,
            gated=config.gated_mlp,
            bias=config.projection_bias,
            inner_norm=norm if config.mlp_inner_norm else None,
            dtype=dtype,
            rngs=rngs,
        )
        scaled, initial = config.layer_scale, config.layer_scale_init
        self.attention_scale = LayerScale(config.width, initial) if scaled != "none" else None
        self.mlp_scale = LayerScale(config.width, initial) if scaled == "all" else None
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        drop_path_rate: jax.Array,
        key: jax.Array | None,
        position: jax.Array | None = None,
        angles: Angles | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens (B, N, D) -> the same, and the attention weights (B, H, N, N).

        Args:
          position: that all layers share, from `positions.of_layer`.
          angles: see `Attention`.
        """
        config, keys = self.config, split(key, 4)
        if self.position is not None:
            position = positions.of_layer(self.position, config, x.dtype)
        bias = None
        if config.biased_attention:
            bias = relative.bias(position)
        elif position is not None:
            x = x + position
        y = x if config.norm_after else self.attention_norm(x)
        attended, weights = self.attention(y, key=keys[0], bias=bias, angles=angles)
        attended = self.attention_norm(attended) if config.norm_after else attended
        attended = attended if self.attention_scale is None else self.attention_scale(attended)
        x = x + drop_path(attended, drop_path_rate, keys[1])
        if not config.parallel:
            y = x if config.norm_after else self.mlp_norm(x)
        y = self.mlp(y, key=keys[2])
        y = self.mlp_norm(y) if config.norm_after else y
        y = y if self.mlp_scale is None else self.mlp_scale(y)
        return x + drop_path(y, drop_path_rate, keys[3]), weights


class Encoder(nnx.Module):
    """`depth` blocks and one norm, of the last one's output or of a weighted sum of all, unless
    `last_norm` puts it elsewhere. Every parameter below `layers` has a leading axis of length `depth`.
    """

    def __init__(self, config: "Config", *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.layers = stack.stack(
            lambda rngs: Block(config, dtype=dtype, rngs=rngs), config.depth, rngs
        )
        if config.weighted_layers:
            self.layer_weights = pooling.LayerWeights(config.depth)
        make = make_norm(config, dtype=dtype, rngs=rngs)
        self.norm = make(config.width) if config.last_norm == "tokens" else None
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        key: jax.Array | None = None,
        capture: Capture = False,
        position: jax.Array | None = None,
        angles: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Runs the blocks.

        Args:
          x: (B, N, D).
          key: randomness of dropout and stochastic depth; `None` for none.
          capture: also return `attention` (L, B, H, N, N) and `blocks` (L, B, N, D).
          position: that all layers share, from `positions.of_layer`.
          angles: from `rotary.angles`.

        Returns:
          tokens (B, N, D) after the last norm, if there is one, and what was captured.
        """
        config = self.config

        rotations, of_layer = rotary.rotations(angles)
        constant = config.drop_path_by == "constant"
        drawn = by_depth(config.drop_path, config.depth, key, constant=constant)

        def step(block, x, rate, key, own):
            x, weights = block(x, rate, key, position, rotations if own is None else own)
            return x, kept(capture, attention=weights, blocks=x)

        scan = self.layer_weights.scan if config.weighted_layers else stack.scan
        x, captured = scan(
            step,
            self.layers,
            x,
            (*drawn, of_layer),
            remat=choices.remat(config),
            unroll=config.unroll,
        )
        return x if self.norm is None else self.norm(x), captured
