"""Re-attention (DeepViT §4.2): attention maps that are mixed between heads. `config` is that of `deepvit`."""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.compute import attend
from vit_jax.models import classifier
from vit_jax.models.attention import Attention
from vit_jax.models.batch_norm import BatchNorm


class ReAttention(Attention):
    """Attention whose maps, softmax(q kᵀ / √C) of every head, are mixed by Θ and normalised by head
    before they multiply the values (DeepViT Eq. 3).

    Parameters: those of `Attention`; `theta/kernel` (heads, heads), from heads to heads, and
    `theta/bias` (heads,); with `reattention_norm` a batch norm over heads, `theta/norm`.
    """

    def __init__(self, config: classifier.ClassifierConfig, *, dtype, rngs: nnx.Rngs):
        super().__init__(config.width, config.heads, dtype=dtype, rngs=rngs)
        self.theta = Theta(config, rngs=rngs)

    def __call__(self, x: jax.Array, *, training: bool) -> tuple[jax.Array, jax.Array]:
        """(B, N, D) -> the same, and the mixed maps (B, H, N, N)."""
        q, k, v = self.project(x, None)
        maps = self.theta(attend.weights(q, k), training=training)
        return self.merge(attend.weighted(maps, v)), maps


class Theta(nnx.Module):
    """Mixes heads: a 1x1 convolution over them, begun as PyTorch begins one, and its norm."""

    def __init__(self, config: classifier.ClassifierConfig, *, rngs: nnx.Rngs):
        heads = config.heads
        limit = heads**-0.5

        def draw(*shape):
            return jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit)

        self.kernel, self.bias = nnx.Param(draw(heads, heads)), nnx.Param(draw(heads))
        self.norm = BatchNorm(heads, axis=1) if config.reattention_norm else None
        self.factor = (config.width // heads) ** -0.5 if config.scaled_maps else 1.0

    def __call__(self, maps: jax.Array, *, training: bool) -> jax.Array:
        """(B, H, Q, N) -> the same."""
        kernel, bias = (p[...].astype(maps.dtype) for p in (self.kernel, self.bias))
        maps = jnp.einsum("bhqn,hg->bgqn", maps, kernel) + bias[:, None, None]
        if self.norm is not None:
            maps = self.norm(maps, training=training)
        return maps * self.factor
