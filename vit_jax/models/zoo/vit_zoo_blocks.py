"""Blocks and encoder of ViTs that others have published; the paper's are in `vit`.

An oddity that changes the order of a block is a class of its own, in `block_orders`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.compute import attend, choices, rope, stack
from vit_jax.compute.dropout import by_depth, drop_path, split
from vit_jax.models import classifier, contract, pooling, positions, rotary
from vit_jax.models.attention import Attention
from vit_jax.models.contract import Capture
from vit_jax.models.layers import LayerScale, Mlp, norm

# Blocks in another order of norms, attention and MLP, by the option that asks for them.
ORDERS = LazyTable(
    {
        "parallel": "vit_jax.models.zoo.block_orders:ParallelBlock",
        "block_branches": "vit_jax.models.zoo.block_orders:BranchedBlock",
        "norm_after": "vit_jax.models.zoo.block_orders:PostNormBlock",
        "norm_residual": "vit_jax.models.zoo.block_orders:ResidualNormBlock",
    }
)
# Other attentions: differences, and with terms of distances by the kind of positions.
ATTENTION = LazyTable(
    {
        "transformer_xl": "vit_jax.models.zoo.relative_terms:TransformerXLAttention",
        "deberta": "vit_jax.models.zoo.relative_terms:DisentangledAttention",
        "differential": "vit_jax.models.zoo.differential:DifferentialAttention",
    }
)


def check_blocks(config: classifier.ClassifierConfig) -> None:
    """Raises `ConfigError` for blocks that there are not; `config` is that of `vit_zoo`, here and below."""
    if len(chosen := _orders(config)) > 1:
        raise ConfigError(
            f"model.{' and model.'.join(chosen)} are different orders of norms, attention and MLP: take one of them"
        )


def _orders(config: classifier.ClassifierConfig) -> list[str]:
    return [name for name in ORDERS if getattr(config, name)]


def make_norm(
    config: classifier.ClassifierConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
) -> Callable[[int], nnx.Module]:
    """A function that makes the norm of a width, as all norms around and in the blocks are."""
    return functools.partial(
        norm, config.norm, epsilon=config.epsilon, dtype=dtype, rngs=rngs, bias=config.norm_bias
    )


class PublishedAttention(Attention):
    """Attention with norms, without a bias of keys, of another scale, or of rotated queries and keys.

    Parameters: those of `Attention`, with `qkv/bias` (2, H, D/H) without that of keys; with `qk_norm` a
    norm of D/H on queries and keys (ViT-22B §2.1), with `inner_norm` one of D on all heads' results
    together (arXiv 2210.06423), each made by `norm`. `scale` multiplies the products of queries and
    keys; 0 stands for 1/√C of heads of C channels.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        norm: Callable[[int], nnx.Module],
        qk_norm: bool = False,
        inner_norm: bool = False,
        key_bias: bool = True,
        scale: float = 0.0,
        **options,
    ):
        super().__init__(width, heads, **options)
        size = width // heads
        if not key_bias and hasattr(self.qkv, "bias"):
            self.qkv.bias = nnx.Param(jnp.zeros((2, heads, size)))
        self.qk_norm, self.key_bias = qk_norm, key_bias
        if qk_norm:
            self.query_norm, self.key_norm = norm(size), norm(size)
        self.inner_norm = norm(width) if inner_norm else None
        self.query_scale = scale * size**0.5 if scale else 1.0  # what is missing to 1/√C

    @property
    def is_plain(self) -> bool:
        own = type(self).project, type(self).attend
        plain = own == (PublishedAttention.project, PublishedAttention.attend)
        return plain and not self.qk_norm and self.query_scale == 1

    def qkv_parameters(self) -> tuple[jax.Array, jax.Array | None]:
        kernel, bias = super().qkv_parameters()
        if bias is not None and not self.key_bias:
            bias = jnp.stack([bias[0], jnp.zeros_like(bias[0]), bias[1]])
        return kernel, bias

    def project(
        self, x: jax.Array, queries: jax.Array | None, angles: rope.Angles | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values (B, N, H, C): the first two normed, and rotated by `angles` if both are of x."""
        q, k, v = super().project(x, queries)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if angles is not None:
            q, k = rope.turn(q, *angles), rope.turn(k, *angles)
        return q if self.query_scale == 1 else q * self.query_scale, k, v

    def merge(self, heads: jax.Array) -> jax.Array:
        if self.inner_norm is not None:
            heads = self.inner_norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)
        return super().merge(heads)


class PublishedBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with positions, biases, norms and scales as published."""

    def __init__(
        self, config: classifier.ClassifierConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ):
        norm = make_norm(config, dtype=dtype, rngs=rngs)
        own_position = config.position_place == "layers"
        self.position = positions.of(config).variables(rngs) if own_position else None
        self.attention_norm = norm(config.width)
        kind = "differential" if config.differential else config.position
        attention = ATTENTION.get(kind, PublishedAttention)
        self.attention = attention(
            config.width,
            config.heads,
            norm=norm,
            qk_norm=config.qk_norm,
            inner_norm=config.attention_inner_norm,
            key_bias=config.key_bias,
            scale=config.qk_scale,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            qkv_bias=config.qkv_bias,
            out_bias=config.projection_bias,
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
        angles: rope.Angles | None = None,
        added: attend.Bias | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens (B, N, D) -> the same, and the attention weights (B, H, N, N).

        Args:
          position: that all layers share, from `Position.of_layer`.
          angles: what attention takes beside tokens: see `PublishedAttention.project`.
          added: to the logits of attention, in place of what positions add.
          lengths: see `Attention`.
        """
        keys = split(key, 4)
        x, bias = self.add_positions(x, position)
        bias = bias if added is None else added
        more = {} if angles is None else {"angles": angles}  # which few attentions take
        more |= {} if lengths is None else {"lengths": lengths}
        attention = functools.partial(self.attention, bias=bias, **more)
        return self.forward(x, attention, drop_path_rate, keys)

    def forward(self, x, attend: Callable, rate, keys: list) -> tuple[jax.Array, jax.Array]:
        """`__call__` after the positions; `attend` is the attention with biases and angles."""
        y, weights = attend(self.attention_norm(x), key=keys[0])
        x = add_residual(x, y, self.attention_scale, rate, keys[1])
        y = self.mlp(self.mlp_norm(x), key=keys[2])
        return add_residual(x, y, self.mlp_scale, rate, keys[3]), weights

    def add_positions(self, x: jax.Array, position: jax.Array | None) -> tuple:
        """x with positions, and what is added to attention's logits."""
        kind = positions.of(self.config)
        if self.position is not None:
            position = kind.of_layer(self.position, x.dtype)
        if kind.acts_in_logits:
            return x, kind.in_logits(position)
        return x if position is None else x + position, None


def make_block(config: classifier.ClassifierConfig, *, dtype, rngs: nnx.Rngs) -> PublishedBlock:
    """The block that a config asks for."""
    block = ORDERS[chosen[0]] if (chosen := _orders(config)) else PublishedBlock
    return block(config, dtype=dtype, rngs=rngs)


def add_residual(x, y, scale: LayerScale | None, drop_path_rate, key) -> jax.Array:
    """x and a residual y, scaled, with stochastic depth."""
    return x + drop_path(y if scale is None else scale(y), drop_path_rate, key)


class PublishedEncoder(nnx.Module):
    """`depth` blocks and one norm, of the last one's output or of a weighted sum of all, unless
    `last_norm` puts it elsewhere. Every parameter below `layers` has a leading axis of length `depth`.
    """

    def __init__(
        self, config: classifier.ClassifierConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ):
        self.layers = stack.stack(
            lambda rngs: make_block(config, dtype=dtype, rngs=rngs), config.depth, rngs
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
        joining: stack.Joining | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Runs the blocks.

        Args:
          x: (B, N, D).
          key: randomness of dropout and stochastic depth; `None` for none.
          capture: also return `attention` (L, B, H, N, N) and `blocks` (L, B, N, D).
          position: that all layers share, from `Position.of_layer`.
          angles: from `rotary.angles`.
          joining: tokens that join before the last blocks; then nothing is captured.
          lengths: (B,), how many leading tokens of each image count; `None`: all.

        Returns:
          tokens (B, N, D) after the last norm, if there is one, and what was captured.
        """
        config = self.config
        rotations, of_layer = rotary.rotations(angles, by_layer=config.rope == "mixed")
        sized = {} if lengths is None else {"lengths": lengths}  # which few blocks take
        constant = config.drop_path_by == "constant"
        drawn = by_depth(config.drop_path, config.depth, key, constant=constant)

        def step(block, x, rate, key, own, bias=None):
            turned = rotary.with_joined(rotations if own is None else own, x.shape[1])
            x, weights = block(x, rate, key, position, turned, bias, **sized)
            return x, contract.captured(capture, attention=weights, blocks=x)

        loop = dict(remat=choices.remat(config), unroll=config.unroll, joining=joining)
        scan = self.layer_weights.scan if config.weighted_layers else stack.scan
        x, captured = scan(step, self.layers, x, (*drawn, of_layer), **loop)
        return x if self.norm is None else self.norm(x), captured
