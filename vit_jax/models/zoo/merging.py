"""Token merging (ToMe, arXiv 2210.09461): in each block of a ViT, after attention, the pairs of patches whose keys are
most alike become one token, their mean. Fewer tokens are left for all that follows, after training or in it.

As the authors' code has it: patches are split by turns in two halves; each of the first finds the one of the second
whose key, the mean of the heads, has the largest cosine with its own; of these pairs the `token_merging` most alike are
merged. Turns are counted from the first of all tokens: the first half has the even ones. Its patches that stay keep
their order if there are tokens that are no patches; else the most alike come first.

A token that stands for s patches counts as s: in means, and in softmax, whose logits get log s. Tokens that are no
patches stay. Here patches have their places again after the last block: each gets the token that it is part of, so that
maps, means and heads read as many tokens as without.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.compute import choices, partitioning, recompute
from vit_jax.compute.dropout import by_depth, split
from vit_jax.models import classifier, contract
from vit_jax.models.attention import attention_flops
from vit_jax.models.contract import Capture
from vit_jax.models.layers import mlp_flops
from vit_jax.models.zoo import vit_zoo_blocks as blocks


def check_merging(config: classifier.ClassifierConfig) -> None:
    """Raises `ConfigError` for a model whose tokens cannot be merged; `config` is that of `vit_zoo`, here and below."""
    reasons = {
        f"position_at={config.position_at} (position={config.position})": config.position_place
        not in ("", "stem"),
        f"rope={config.rope}": config.rope != "none",
        "parallel=True": config.parallel,
        f"block_branches={config.block_branches}": config.block_branches,
        "differential=True": config.differential,
        "norm_after=True": config.norm_after,
        "norm_residual=True": config.norm_residual,
        "weighted_layers=True": config.weighted_layers,
        f"attention={config.attention}": config.attention not in ("auto", "xla"),
    }
    if given := [name for name, is_set in reasons.items() if is_set]:
        raise ConfigError(
            f"model.token_merging={config.token_merging} merges tokens between attention and MLP, by keys without "
            f"places, and adds to attention's logits: it does not go with {', '.join(given)}"
        )


def counts(config: classifier.ClassifierConfig) -> Iterator[int]:
    """How many tokens each block merges: at most half of the patches that are left."""
    patches = math.prod(config.grid)
    for _ in range(config.depth):
        merged = min(config.token_merging, patches // 2)
        yield merged
        patches -= merged


def block_flops(config: classifier.ClassifierConfig, n: int) -> int:
    """Operations of all blocks for `n` tokens, as `PublishedViTConfig.block_flops`; with the products of pairs."""
    total, patches = 0, math.prod(config.grid)
    others = n - patches
    for merged in counts(config):
        total += attention_flops(others + patches, config.width)
        if merged:
            pairs = (patches // 2) * (patches - patches // 2)
            total += 2 * pairs * config.width // config.heads
        patches -= merged
        total += mlp_flops(others + patches, config.width, config.mlp_dim, gated=config.gated_mlp)
    return total


class MergingEncoder(blocks.PublishedEncoder):
    """The encoder of a ViT, with the same parameters; blocks run one by one, each with fewer tokens."""

    def __call__(
        self,
        x,
        key=None,
        capture: Capture = False,
        position=None,
        angles=None,
        joining=None,
        lengths=None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As `PublishedEncoder`. What is captured is of all patches: attention to a token that stands for several is
        shared out among them.

        Raises:
          ConfigError: tokens join, or images have sizes of their own.
        """
        config = self.config
        if joining is not None or lengths is not None or x.shape[1] != config.tokens:
            raise ConfigError(
                "model.token_merging needs all patches of images of one size, and no other tokens that join them: set "
                "it to 0"
            )
        patches = math.prod(config.grid)
        first = x.shape[1] - patches
        shape = (x.shape[0], x.shape[1])
        sizes = None
        # Of each token that came in, which one it is part of.
        places = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        rates, keys = by_depth(
            config.drop_path, config.depth, key, constant=config.drop_path_by == "constant"
        )
        definition, parameters = nnx.split(self.layers)
        arrays = []
        for number, merged in enumerate(counts(config)):
            run = functools.partial(
                self._run, definition, first=first, merged=merged, capture=capture
            )
            run = recompute.apply(run, choices.remat(config), prevent_cse=True)
            parameters_here = jax.tree.map(lambda p, i=number: p[i], parameters)
            drawn = split(None if keys is None else keys[number], 4)
            biased = sizes if number else None
            x, sizes, places, captured = run(
                parameters_here, x, biased, places, rates[number], drawn
            )
            arrays.append(captured)
        x = x if self.norm is None else self.norm(x)
        stacked = {name: jnp.stack([a[name] for a in arrays]) for name in arrays[0]}
        return _spread(x, places), stacked

    def _run(self, definition, parameters, x, sizes, places, rate, keys, *, first, merged, capture):
        """One block: tokens, sizes, places, and what is captured. `sizes` are `None` where all are 1."""
        block, x = nnx.merge(definition, parameters), recompute.keep(x, recompute.INPUT)
        normed, bias = block.attention_norm(x), None
        if sizes is not None:
            pairs = (x.shape[0], self.config.heads, x.shape[1], x.shape[1])
            bias = jnp.broadcast_to(jnp.log(sizes)[:, None, None], pairs)
        sizes = jnp.ones(x.shape[:2], jnp.float32) if sizes is None else sizes
        y, weights = block.attention(normed, key=keys[0], bias=bias)
        x = blocks.add_residual(x, y, block.attention_scale, rate, keys[1])
        seen = sizes, places
        if merged:
            # Computed a second time in the text of the program alone.
            metric = block.attention.project(normed.astype(block.attention.dtype), None)[1]
            x, sizes, places = merge(x, sizes, places, metric.mean(2), merged, first)
        y = block.mlp(block.mlp_norm(x), key=keys[2])
        x = blocks.add_residual(x, y, block.mlp_scale, rate, keys[3])
        x = partitioning.constrain_batch(x)
        return x, sizes, places, _captured(capture, weights, seen, x, places)


def merge(
    x: jax.Array, sizes: jax.Array, places: jax.Array, metric: jax.Array, count: int, first: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges the pairs of patches that are most alike.

    Args:
      x: tokens (B, n, D), of which the patches come last.
      sizes: (B, n) float32, how many patches each stands for.
      places: (B, N) int32, of each of the model's tokens which one of x it is part of.
      metric: (B, n, C), what is compared by its cosine.
      count: how many pairs, at most half of the patches.
      first: where patches begin.

    Returns:
      The three of n - count tokens: those that are no patches, those of one half that stay, those of the other.
    """
    # Which tokens go together has no derivative.
    metric = jax.lax.stop_gradient(metric).astype(jnp.float32)
    metric = metric / jnp.linalg.norm(metric, axis=-1, keepdims=True)
    even = first + first % 2
    odd = first + 1 - first % 2
    scores = jnp.einsum("bic,bjc->bij", metric[:, even::2], metric[:, odd::2])
    best, partner = scores.max(-1), scores.argmax(-1)
    order = jnp.argsort(-best, axis=-1)
    going = order[:, :count]
    staying = order[:, count:]
    if first:
        staying = jnp.sort(staying, axis=-1)
    to = jnp.take_along_axis(partner, going, 1)
    rows = jnp.arange(x.shape[0])[:, None]

    def halves(values):
        return values[:, :first], values[:, even::2], values[:, odd::2]

    others, half, other_half = halves(x * sizes[..., None].astype(x.dtype))
    others_sizes, half_sizes, other_sizes = halves(sizes)
    sums = other_half.at[rows, to].add(half[rows, going])
    total = other_sizes.at[rows, to].add(half_sizes[rows, going])
    merged = jnp.concatenate([others, half[rows, staying], sums], axis=1)
    sizes = jnp.concatenate([others_sizes, half_sizes[rows, staying], total], axis=1)
    # Where each token of x is now.
    stay = half.shape[1] - count
    of_half = jnp.zeros(half.shape[:2], jnp.int32).at[rows, staying].set(first + jnp.arange(stay))
    of_half = of_half.at[rows, going].set(first + stay + to)
    now = jnp.zeros(x.shape[:2], jnp.int32).at[:, :first].set(jnp.arange(first))
    now = now.at[:, even::2].set(of_half)
    now = now.at[:, odd::2].set(first + stay + jnp.arange(other_half.shape[1]))
    merged = merged / sizes[..., None].astype(x.dtype)
    return merged, sizes, jnp.take_along_axis(now, places, 1)


def _spread(x: jax.Array, places: jax.Array) -> jax.Array:
    """Tokens (B, n, D) to where they came from: (B, N, D)."""
    return jnp.take_along_axis(x, places[..., None], axis=1)


def _captured(capture: Capture, weights, seen, x, places) -> dict[str, jax.Array]:
    """What is captured of a block: its attention weights (B, H, n, n) among the tokens of `seen`, sizes and places, and
    its output x, of which `places` are the places.
    """
    if not capture:
        return {}
    sizes, before = seen
    shared = weights / sizes[:, None, None].astype(weights.dtype)
    shared = jnp.take_along_axis(shared, before[:, None, :, None], axis=2)
    shared = jnp.take_along_axis(shared, before[:, None, None], axis=3)
    return contract.captured(capture, attention=shared, blocks=_spread(x, places))
