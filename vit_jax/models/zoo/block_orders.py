"""Blocks of ViTs in another order of norms, attention and MLP than the paper's, which is `vit_zoo_blocks`'."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.compute.dropout import split
from vit_jax.models import classifier
from vit_jax.models.zoo.vit_zoo_blocks import PublishedBlock, add_residual


class PostNormBlock(PublishedBlock):
    """x + norm(attention(x)), then x + norm(mlp(x)) (Swin V2, EVA-02-E)."""

    def forward(self, x, attend: Callable, rate, keys: list) -> tuple[jax.Array, jax.Array]:
        y, weights = attend(x, key=keys[0])
        x = add_residual(x, self.attention_norm(y), self.attention_scale, rate, keys[1])
        y = self.mlp_norm(self.mlp(x, key=keys[2]))
        return add_residual(x, y, self.mlp_scale, rate, keys[3]), weights


class ResidualNormBlock(PublishedBlock):
    """norm(x + attention(x)), then norm(x + mlp(x)) (the Transformer, arXiv 1706.03762 §3.1; BERT)."""

    def forward(self, x, attend: Callable, rate, keys: list) -> tuple[jax.Array, jax.Array]:
        y, weights = attend(x, key=keys[0])
        x = self.attention_norm(add_residual(x, y, self.attention_scale, rate, keys[1]))
        y = self.mlp(x, key=keys[2])
        return self.mlp_norm(add_residual(x, y, self.mlp_scale, rate, keys[3])), weights


class ParallelBlock(PublishedBlock):
    """x + attention(norm(x)) + mlp(norm(x)), by one norm (ViT-22B §2)."""

    def forward(self, x, attend: Callable, rate, keys: list) -> tuple[jax.Array, jax.Array]:
        normed = self.attention_norm(x)
        y, weights = attend(normed, key=keys[0])
        x = add_residual(x, y, self.attention_scale, rate, keys[1])
        y = self.mlp(normed, key=keys[2])
        return add_residual(x, y, self.mlp_scale, rate, keys[3]), weights


class BranchedBlock(PublishedBlock):
    """x + Σ attention_i(norm_i(x)), then x + Σ mlp_i(norm_i(x)) (arXiv 2203.09795 §3).

    Parameters: those of `PublishedBlock` for the first branch; those of the others in `branches/1`, `branches/2`, ….
    Each branch draws its own dropout and stochastic depth. The attention weights (B, I·H, N, N) are those of all
    branches, one after the other.
    """

    def __init__(
        self, config: classifier.ClassifierConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ):
        if config.position_place == "layers":
            raise ConfigError(
                f"model.block_branches={config.block_branches} does not go with positions of each layer's own (model."
                f"position={config.position}): set model.position_at=stem or shared"
            )
        super().__init__(config, dtype=dtype, rngs=rngs)
        others = range(1, config.block_branches)
        self.branches = nnx.Dict(
            {str(i): PublishedBlock(config, dtype=dtype, rngs=rngs) for i in others}
        )

    def forward(self, x, attend: Callable, rate, keys: list) -> tuple[jax.Array, jax.Array]:
        branches = [self, *self.branches.values()]
        keys = [split(key, len(branches)) for key in keys]
        start, weights = x, []
        for i, branch in enumerate(branches):
            attention = functools.partial(branch.attention, **attend.keywords)
            y, weight = attention(branch.attention_norm(start), key=keys[0][i])
            x = add_residual(x, y, branch.attention_scale, rate, keys[1][i])
            weights.append(weight)
        start = x
        for i, branch in enumerate(branches):
            y = branch.mlp(branch.mlp_norm(start), key=keys[2][i])
            x = add_residual(x, y, branch.mlp_scale, rate, keys[3][i])
        return x, jnp.concatenate(weights, axis=1)
