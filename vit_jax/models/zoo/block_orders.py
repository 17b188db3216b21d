"""Blocks of ViTs in another order of norms, attention and MLP than the paper's, which is `vit_zoo_blocks`'."""

from collections.abc import Callable

import jax

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
