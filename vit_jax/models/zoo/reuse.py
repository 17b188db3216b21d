"""What a Transformer takes over from a smaller one that has seen the same image in fewer tokens (arXiv
2105.15075 §3.2): its features, as a context for MLPs, and its attention logits, its relations, as
biases of the new ones. The cascade that consists of such Transformers is in `dynamic_vit`.

Maps go from one grid of tokens to another as the authors' code does it: repeated to the next
multiple of their size, then averaged over windows.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.compute import attend, choices, stack
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import by_depth, drop_path, dropout, split
from vit_jax.models import attention, contract
from vit_jax.models.contract import Capture
from vit_jax.models.layers import Mlp, layer_norm
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

# What an exit hands to the next: `features` and `relations`, those that are reused, (B, ...) each.
Carried = dict[str, jax.Array]
PREFIX = 1  # the class token
WIDENING = 3  # hidden maps of the MLP that maps relations, over those of all layers
_CAPTURED = "captured"  # of what a layer gives, that which the caller captures


@dataclasses.dataclass(frozen=True)
class ReuseConfig:
    """What is reused."""

    # The paper's ablations, which earlier versions had: the values that checkpoints of them may have.
    removed: ClassVar[dict[str, object]] = {
        "feature_source": "last", "feature_layers": "all", "feature_class_token": False, "feature_norm": True,
        "relation_source": "all", "relation_map": "mlp", "relation_resize": "grid",
    }  # fmt: skip

    feature_reuse: bool = option(True, "MLPs see the features of the exit before", role="structure")
    feature_hidden: int = option(
        128, "hidden size of the MLPs that prepare features", minimum=1, role="size"
    )
    feature_width: int = option(48, "size of prepared features", minimum=1, role="size")
    relation_reuse: bool = option(
        True, "attention logits of the exit before become biases", role="structure"
    )


@dataclasses.dataclass(frozen=True)
class Link:
    """Between an exit and its neighbours.

    Attributes:
      options: what is reused.
      before: the grid of the exit before, down and across; `None` for the first.
      last: whether no exit follows.
    """

    options: ReuseConfig
    before: tuple[int, int] | None
    last: bool

    @property
    def takes_features(self) -> bool:
        """Whether features come from the exit before."""
        return self.options.feature_reuse and self.before is not None

    @property
    def takes_relations(self) -> bool:
        """Whether relations come from the exit before."""
        return self.options.relation_reuse and self.before is not None

    @property
    def gives_features(self) -> bool:
        """Whether the next exit takes features."""
        return self.options.feature_reuse and not self.last

    @property
    def gives_relations(self) -> bool:
        """Whether the next exit takes relations."""
        return self.options.relation_reuse and not self.last

    def flops(self, config: PublishedViTConfig) -> int:
        """Operations of taking over, for one image, counted as `PublishedViTConfig.flops` counts."""
        total = 0
        if self.takes_features:
            width, hidden = self.options.feature_width, self.options.feature_hidden
            of_layer = math.prod(self.before) * hidden * (config.width + width)
            total += config.depth * (of_layer + config.tokens * width * config.mlp_dim)
        if self.takes_relations:
            maps = config.depth * config.heads
            total += (math.prod(self.before) + PREFIX) ** 2 * 2 * maps * WIDENING * maps
        return 2 * total


class Encoder(nnx.Module):
    """Blocks that reuse, and one last norm."""

    def __init__(self, config: PublishedViTConfig, link: Link, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.layers = stack.stack(
            lambda rngs: ReusingBlock(config, link, dtype=dtype, rngs=rngs), config.depth, rngs
        )
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs, bias=config.norm_bias)
        self.config, self.link = config, link

    def __call__(
        self,
        x: jax.Array,
        features: jax.Array | None,
        biases: jax.Array | None,
        key: jax.Array | None = None,
        capture: Capture = False,
    ) -> tuple[jax.Array, dict[str, jax.Array], Carried]:
        """Runs the blocks.

        Args:
          x: (B, N, D).
          features: (B, M, D) of the exit before.
          biases: (L, B, H, N, N) for the attention logits.
          key: randomness of dropout and stochastic depth; `None` for none.
          capture: also return `attention` (L, B, H, N, N) and `blocks` (L, B, N, D).

        Returns:
          tokens (B, N, D) after the last norm, what was captured, and what the next exit takes.
        """
        config, link = self.config, self.link

        def step(block, x, rate, key, bias):
            x, weights, logits = block(x, rate, key, bias, features)
            relations = {"relations": logits} if link.gives_relations else {}
            return x, relations | {
                _CAPTURED: contract.captured(capture, attention=weights, blocks=x)
            }

        arguments = (*by_depth(config.drop_path, config.depth, key), biases)
        x, outputs = stack.scan(
            step, self.layers, x, arguments, remat=choices.remat(config), unroll=config.unroll
        )
        carried = {"features": x[:, PREFIX:]} if link.gives_features else {}
        if link.gives_relations:
            relations = outputs["relations"].swapaxes(0, 1)  # (B, L, H, N, N)
            carried["relations"] = relations.reshape(x.shape[0], -1, *relations.shape[-2:])
        return self.norm(x), outputs[_CAPTURED], carried


class ReusingBlock(nnx.Module):
    """A block of the ViT whose attention logits get biases, and whose MLP sees features beside its
    tokens.
    """

    def __init__(self, config: PublishedViTConfig, link: Link, *, dtype, rngs: nnx.Rngs):
        features = link.takes_features
        width = config.width + (link.options.feature_width if features else 0)
        common = dict(dropout=config.dropout, dtype=dtype, rngs=rngs)
        own = dict(qkv_bias=config.qkv_bias, implementation=config.attention)
        self.attention_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.attention = Attention(config.width, config.heads, **own, **common)
        self.mlp_norm = layer_norm(width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(
            config.width, config.mlp_dim, inputs=width, activation=config.activation, **common
        )
        self.features = Features(config, link, dtype=dtype, rngs=rngs) if features else None
        self.gives_relations = link.gives_relations

    def __call__(
        self,
        x: jax.Array,
        drop_path_rate: jax.Array,
        key: jax.Array | None,
        bias: jax.Array | None,
        features: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Tokens (B, N, D) -> the same, the attention weights (B, H, N, N), and the logits (B, H, N, N)
        with what was added to them, if the next exit takes them.

        Args:
          bias: (B, H, N, N).
          features: (B, M, D) of the exit before.
        """
        keys = split(key, 5)
        y = self.attention_norm(x)
        attended, weights, logits = self.attention.relate(y, bias, keys[0], self.gives_relations)
        x = y = x + drop_path(attended, drop_path_rate, keys[1])
        if self.features is not None:
            y = jnp.concatenate([x, self.features(features, keys[4])], axis=-1)
        y = self.mlp(self.mlp_norm(y), key=keys[2])
        return x + drop_path(y, drop_path_rate, keys[3]), weights, logits


class Attention(attention.Attention):
    """Attention that hands on its logits."""

    def relate(
        self, x: jax.Array, bias: jax.Array | None, key: jax.Array | None, give: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Attends to x (B, N, D), with a bias (B, H, N, N) on the logits.

        Returns:
          (B, N, D), the weights (B, H, N, N), and if `give` the logits (B, H, N, N), with the bias.
        """
        q, k, v = self.project(x, None)
        if give:
            logits = attend.logits(q, k, bias=bias)
            weights = jax.nn.softmax(logits).astype(x.dtype)
            heads, logits = attend.weighted(weights, v), logits.astype(x.dtype)
        else:
            (heads, weights), logits = self.attend(q, k, v, key=None, bias=bias), None
        return dropout(self.merge(heads), self.dropout, key), weights, logits


class Features(nnx.Module):
    """Features of the exit before, prepared for one layer: norm, MLP, another grid."""

    def __init__(self, config: PublishedViTConfig, link: Link, *, dtype, rngs: nnx.Rngs):
        options = link.options
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(
            options.feature_width,
            options.feature_hidden,
            inputs=config.width,
            activation=config.activation,
            dropout=config.dropout,
            dtype=dtype,
            rngs=rngs,
        )
        self.grids = link.before, config.grid

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """(B, M, D) -> (B, N, C) with a row of zeros for the class token; `key` is the randomness of dropout."""
        x = self.mlp(self.norm(x), key=key)
        resize = with_class_token(resizing(*self.grids))[:, PREFIX:]
        return jnp.einsum("nm,bmc->bnc", resize.astype(x.dtype), x)


class Relations(nnx.Module):
    """Attention logits of the exit before, mapped across layers and heads, and resized."""

    def __init__(self, config: PublishedViTConfig, link: Link, *, rngs: nnx.Rngs):
        maps = config.depth * config.heads
        self.up = MapMixing(maps, WIDENING * maps, rngs=rngs)
        self.down = MapMixing(WIDENING * maps, maps, rngs=rngs)
        self.activation = config.activation
        self.grids = link.before, config.grid

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, maps, M, M) -> (B, maps, N, N)."""
        x = self.down(ACTIVATIONS[self.activation](self.up(x)))
        resize = with_class_token(resizing(*self.grids)).astype(x.dtype)
        x = jnp.einsum("qm,bnmk->bnqk", resize, x)
        return jnp.einsum("bnqm,km->bnqk", x, resize)


class MapMixing(nnx.Module):
    """A linear layer over the maps of every pair of tokens, which is a 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        # As PyTorch draws convolutions: uniform within ±1/√inputs.
        draw = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.kernel = nnx.Param(draw(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(
            jax.random.uniform(rngs.params(), (outputs,), minval=-1, maxval=1) / inputs**0.5
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, inputs, M, M) -> (B, outputs, M, M), in the dtype of x."""
        batch, _, *pairs = x.shape
        kernel, bias = self.kernel[...].astype(x.dtype), self.bias[...].astype(x.dtype)
        # A product for each image: one for all would transpose the maps, on CPUs twice the time.
        kernel = jnp.broadcast_to(kernel.T, (batch, *kernel.T.shape))
        y = kernel @ x.reshape(batch, kernel.shape[-1], -1) + bias[:, None]
        return y.reshape(batch, -1, *pairs)


def resizing(old: tuple[int, int], new: tuple[int, int]) -> np.ndarray:
    """The matrix (new tokens, old tokens) float32 from one grid to another, tokens row by row."""
    rows, columns = (averaging(*sides) for sides in zip(old, new, strict=True))
    return np.kron(rows, columns)


def with_class_token(matrix: np.ndarray) -> np.ndarray:
    """The matrix (1 + new tokens, 1 + old tokens) that leaves the class token as it is."""
    return np.block([
        [np.ones((1, 1), np.float32), np.zeros((1, matrix.shape[1]), np.float32)],
        [np.zeros((len(matrix), 1), np.float32), matrix],
    ])  # fmt: skip


def averaging(old: int, new: int) -> np.ndarray:
    """The matrix (new, old) float32 that repeats each of `old` places alike, until there are at least
    `new`, and averages them over `new` windows, from ⌊i n / new⌋ to ⌈(i + 1) n / new⌉ of n places.
    """
    times = -(-new // old)
    count = times * old
    matrix = np.zeros((new, old))
    for i in range(new):
        start, stop = i * count // new, -(-(i + 1) * count // new)
        np.add.at(matrix[i], np.arange(start, stop) // times, 1 / (stop - start))
    return matrix.astype(np.float32)
