"""Differential attention (arXiv 2410.05258): each head's weights are the difference of two softmaxes, so that what both
give to all tokens alike falls out. Here are the attention and an encoder that gives each layer its λ_init.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.compute import attend, choices, stack
from vit_jax.compute.dropout import by_depth, dropout, split
from vit_jax.models import classifier, contract
from vit_jax.models.contract import Capture
from vit_jax.models.layers import RMSNorm
from vit_jax.models.zoo import vit_zoo_blocks as blocks

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
_EPSILON = 1e-5  # of the norm of heads, whatever that of the others is


class DifferentialAttention(blocks.PublishedAttention):
    """(softmax(q₁k₁ᵀ / √c) - λ softmax(q₂k₂ᵀ / √c)) v, of heads of C = 2c channels, each head's result normed and
    multiplied by 1 - λ_init (§2.1, Eq. 1 to 3); λ = exp(λ_q1·λ_k1) - exp(λ_q2·λ_k2) + λ_init.

    Parameters: those of `PublishedAttention`, with norms of queries and keys of c channels; `lambda_q1`, `lambda_k1`,
    `lambda_q2`, `lambda_k2` (c,), and `head_norm` (C,), all of one layer's heads together.
    """

    def __init__(self, width: int, heads: int, *, norm, qk_norm: bool, rngs: nnx.Rngs, **options):
        super().__init__(width, heads, norm=norm, rngs=rngs, **options)
        size = width // heads
        if size % 2:
            raise ConfigError(
                f"model.differential splits each head's queries and keys in two: heads of {size} channels "
                f"(width={width}, heads={heads}) are not even"
            )
        if self.implementation not in ("auto", "xla"):
            raise ConfigError(
                f"model.differential takes the difference of attention's weights, which the kernel of "
                f"model.attention={self.implementation} does not give: set model.attention=xla"
            )
        draw = nnx.initializers.normal(0.1)
        for name in LAMBDAS:
            setattr(self, name, nnx.Param(draw(rngs.params(), (size // 2,))))
        self.query_norm, self.key_norm = (norm(size // 2) if qk_norm else None for _ in "qk")
        self.head_norm = RMSNorm(size, epsilon=_EPSILON, dtype=self.dtype)

    def __call__(
        self,
        x: jax.Array,
        *,
        angles: jax.Array,
        key: jax.Array | None = None,
        bias: None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """As `Attention`; `angles` is λ_init of the layer, which has no rotations. The weights are differences."""
        keys, x = split(key, 2), x.astype(self.dtype)
        q, k, v = self.project(x, None)
        q, k = (y.reshape(*y.shape[:2], 2 * y.shape[2], y.shape[3] // 2) for y in (q, k))
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        weights = dropout(attend.weights(q, k, lengths=lengths), self.attention_dropout, keys[0])
        weights = weights[:, 0::2] - (self.factor(angles) * weights[:, 1::2]).astype(q.dtype)
        heads = self.head_norm(attend.weighted(weights, v))
        heads = (heads * (1 - angles)).astype(self.dtype)
        return dropout(self.merge(heads), self.dropout, keys[1]), weights

    def factor(self, initial: jax.Array) -> jax.Array:
        """λ, of λ_init."""
        q1, k1, q2, k2 = (getattr(self, name)[...] for name in LAMBDAS)
        return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + initial


class DifferentialEncoder(blocks.PublishedEncoder):
    """The encoder of a ViT whose layer i, from 0, has λ_init = 0.8 - 0.6 exp(-0.3 i) (§2.1)."""

    def __init__(
        self, config: classifier.ClassifierConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ):
        given = {
            f"rope={config.rope}": config.rope != "none",
            f"position={config.position}": config.biased_attention,
            "weighted_layers=True": config.weighted_layers,
        }
        if listed := [name for name, is_set in given.items() if is_set]:
            raise ConfigError(f"model.differential does not go with {', '.join(listed)}")
        super().__init__(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        key: jax.Array | None = None,
        capture: Capture = False,
        position: jax.Array | None = None,
        angles: None = None,
        joining: stack.Joining | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As `PublishedEncoder`."""
        config = self.config
        if joining is not None:
            raise ConfigError(
                "model.differential: no tokens can join before the last layers (segmentation)"
            )
        initial = (0.8 - 0.6 * np.exp(-0.3 * np.arange(config.depth))).astype(np.float32)
        drawn = by_depth(
            config.drop_path, config.depth, key, constant=config.drop_path_by == "constant"
        )

        def step(block, x, rate, key, initial):
            x, weights = block(x, rate, key, position, initial, lengths=lengths)
            return x, contract.captured(capture, attention=weights, blocks=x)

        scan = functools.partial(stack.scan, remat=choices.remat(config), unroll=config.unroll)
        x, captured = scan(step, self.layers, x, (*drawn, initial))
        return x if self.norm is None else self.norm(x), captured
