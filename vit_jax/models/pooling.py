"""From tokens to one vector: class token, mean, generalised mean, attention pooling; and from the outputs
of all layers to one, as a weighted sum.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import stack
from vit_jax.models.attention import Attention
from vit_jax.models.contract import PatchBatch
from vit_jax.models.layers import Mlp, layer_norm

SMALLEST = 1e-6  # of what the generalised mean is taken


@dataclasses.dataclass(frozen=True)
class PooledConfig:
    """Of a family whose tokens go through layers of one shape; it has `tokens`, `width`, `mlp_dim`,
    `epsilon` and `activation` too.
    """

    pool: str = option(
        "token",
        "how tokens become one vector; token: the class token (the other kinds have none); gem: generalised "
        "mean, its power learned; map: attention",
        choices=("token", "mean", "gem", "map"),
        role="structure",
    )
    weighted_layers: bool = option(
        False,
        "the last norm reads a sum of all layers' outputs, its weights γ·softmax(s) learned, in place of "
        "the last one's",
        role="structure",
    )

    @property
    def pool_heads(self) -> int:
        """Heads of attention pooling, where layers have none: one for 64 channels."""
        return max(self.width // 64, 1)

    @property
    def pool_mlp_dim(self) -> int:
        """Hidden size of attention pooling's MLP."""
        return self.mlp_dim


@dataclasses.dataclass(frozen=True)
class PatchOptions(PooledConfig):
    """The same where every token is a patch."""

    pool: str = option(
        "mean",
        "how tokens become one vector; gem: generalised mean, its power learned; map: attention",
        choices=("mean", "gem", "map"),
        role="structure",
    )


def check_pooling(config: PooledConfig) -> None:
    """Raises `ConfigError` for attention pooling of a width that its heads do not divide."""
    if config.pool == "map" and config.width % config.pool_heads:
        raise ConfigError(
            f"model.pool=map has a head for 64 channels, {config.pool_heads} in all, and model width "
            f"{config.width} cannot be split into that many"
        )


def make_pooling(
    config: PooledConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
) -> Callable[[jax.Array], jax.Array]:
    """What `config.pool` makes of tokens (B, N, D): (B, D), or (B, 2 D); a module where something of it is
    learned.
    """
    if config.two_heads:
        return mean_of_two
    match config.pool:
        case "mean":
            return mean
        case "token_mean":
            return token_and_mean
        case "gem":
            return GeM()
        case "map":
            return AttentionPooling(
                config.width,
                config.pool_heads,
                config.pool_mlp_dim,
                epsilon=config.epsilon,
                activation=config.activation,
                dtype=dtype,
                rngs=rngs,
            )
    return token


def flops(config: PooledConfig) -> int:
    """Operations of pooling, a multiply-add counted as 2: of attention pooling, the probe's own
    projections, the keys and values of all tokens, the MLP of one token.
    """
    n, d, m = config.tokens, config.width, config.pool_mlp_dim
    return 4 * n * d * d + 4 * n * d + 4 * d * d + 4 * d * m if config.pool == "map" else 0


def pooled(pool: Callable, tokens: jax.Array, native: PatchBatch | None) -> jax.Array:
    """What `make_pooling` made, of tokens (B, N, D) that may end in padding: (B, D).

    Args:
      native: the images where they have sizes of their own; the last tokens are their patches.
    """
    return pool(tokens) if native is None else pool(tokens, native.lengths(tokens.shape[1]))


# `lengths` (B,) of these: how many leading tokens of each image count; `None`: all.


def token(tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """The class token (ViT Eq. 4): tokens (B, N, D) -> (B, D)."""
    return tokens[:, 0]


def mean_of_two(tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """The mean of class and distillation token (DeiT §5.1): tokens (B, N, D) -> (B, D)."""
    return tokens[:, :2].mean(axis=1)


def mean(tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """Global average pooling (ViT §D.3): tokens (B, N, D) -> (B, D)."""
    if lengths is None:
        return tokens.mean(axis=1)
    return tokens.mean(axis=1, where=_counting(tokens, lengths))


def token_and_mean(tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """The class token, then the mean of all others: tokens (B, N, D) -> (B, 2 D)."""
    others = None if lengths is None else lengths - 1
    return jnp.concatenate([token(tokens), mean(tokens[:, 1:], others)], axis=-1)


def _counting(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Which tokens (B, N, D) count: (B, N, 1)."""
    return (jnp.arange(tokens.shape[1]) < lengths[:, None])[..., None]


class GeM(nnx.Module):
    """Generalised mean of each channel, (mean of max(x, 1e-6)^p)^(1/p), with a learned `p` (1,) that begins
    as 3 (arXiv 1711.02512; cnnimageretrieval-pytorch).

    Of positive tokens p = 1 gives the mean, a large p the maximum. Negative ones count as 1e-6.
    """

    def __init__(self):
        self.p = nnx.Param(jnp.full((1,), 3.0))

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """tokens (B, N, D) -> (B, D)."""
        p = self.p[...]
        # By logarithms: 1e-6 to the power of 7 is nothing in float32, of which a root has no gradient.
        powers = p * jnp.log(jnp.maximum(tokens.astype(jnp.float32), SMALLEST))
        if lengths is None:
            log_mean = jax.nn.logsumexp(powers, axis=1) - jnp.log(tokens.shape[1])
        else:
            log_mean = jax.nn.logsumexp(powers, axis=1, where=_counting(tokens, lengths))
            log_mean -= jnp.log(lengths)[:, None]
        return jnp.exp(log_mean / p).astype(tokens.dtype)


class LayerWeights(nnx.Module):
    """The layers' outputs h as one, γ·Σ softmax(s)·h: `scores` s (L,), which begin as 0, and `gain` γ (1,),
    as 1 (ScalarMix of AllenNLP; arXiv 1802.05365 Eq. 1). No layer has a norm of its own: one norm
    follows, which takes γ away again but for its epsilon.
    """

    def __init__(self, layers: int):
        self.scores = nnx.Param(jnp.zeros((layers,)))
        self.gain = nnx.Param(jnp.ones((1,)))

    def __call__(self) -> jax.Array:
        """(L,) float32."""
        return self.gain[...] * jax.nn.softmax(self.scores[...])

    def scan(self, step: Callable, layers: nnx.Module, x, arguments: tuple = (), **options):
        """`stack.scan`, whose result is this sum in place of the last layer's output."""
        arguments = (self(), *arguments)
        (_, total), captured = stack.scan(weighted(step), layers, with_sum(x), arguments, **options)
        return total, captured


def with_sum(x):
    """x, and the weighted sum of what layers make of it, before the first."""
    return x, jax.tree.map(jnp.zeros_like, x)


def weighted(step: Callable) -> Callable:
    """The step of `stack.scan` for what `with_sum` gives; its first argument is the layer's weight."""

    def wrapped(layer, carried, weight, *arguments):
        x, total = carried
        x, captured = step(layer, x, *arguments)
        total = jax.tree.map(lambda total, y: total + weight.astype(y.dtype) * y, total, x)
        return (x, total), captured

    return wrapped


class AttentionPooling(nnx.Module):
    """MAP head: a learned probe attends to the tokens, then a residual MLP (Scaling ViT §3.2;
    big_vision's MAPHead).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        epsilon: float,
        activation: str,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.probe = nnx.Param(nnx.initializers.xavier_uniform()(rngs.params(), (1, 1, width)))
        self.attention = Attention(width, heads, dtype=dtype, rngs=rngs)
        self.norm = layer_norm(width, epsilon, dtype, rngs)
        self.mlp = Mlp(width, hidden, activation=activation, dropout=0.0, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """tokens (B, N, D) -> (B, D)."""
        probe = jnp.broadcast_to(
            self.probe[...].astype(tokens.dtype), (tokens.shape[0], 1, tokens.shape[-1])
        )
        x, _ = self.attention(tokens, queries=probe, lengths=lengths)
        return (x + self.mlp(self.norm(x)))[:, 0]
