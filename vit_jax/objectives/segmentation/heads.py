"""What turns a ViT into a segmenter: heads that give maps of classes, of the model's tokens.

  linear      BatchNorm and a linear layer on the last layer's patches (DINOv2, arXiv 2304.07193 §7.4).
  multilevel  several layers' patches, each normed and projected, summed at four times the resolution, and
              a convolution over them.
  eomt        queries that go through the last blocks with the patches (EoMT, arXiv 2503.19108 §3).

Heads have `scores`, and EoMT's `joined`: maps in which the class with the highest value is the prediction.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.convolution import depthwise
from vit_jax.compute.dense import dense, product
from vit_jax.compute.stack import Joining
from vit_jax.models import layer_features
from vit_jax.models.batch_norm import BatchNorm
from vit_jax.models.layers import Kernel, Linear, layer_norm

_EPSILON = 1e-6
_AT_ONCE = 8  # queries whose enlarged masks are in memory
_HIDDEN = -1e9  # added to the logits of what a query may not attend to
_FUSED = 4  # times the resolution of the patches
_gelu = ACTIVATIONS["gelu"]
_SMALL = nnx.initializers.normal(0.01)
# Kernels as PyTorch's layers begin.
_UNIFORM = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class LinearHead(nnx.Module):
    """BatchNorm and a linear layer."""

    def __init__(self, width: int, num_classes: int, rngs: nnx.Rngs):
        self.norm = BatchNorm(width)
        self.linear = nnx.Linear(width, num_classes, kernel_init=_SMALL, rngs=rngs)

    def logits(
        self, model: nnx.Module, images: jax.Array, *, training: bool, rngs=None
    ) -> jax.Array:
        """(B, h, w, K) float32, of every patch."""
        output = model(images, deterministic=not training, rngs=rngs)
        patches = layer_features.last(output, model.config).map.astype(jnp.float32)
        return self.linear(self.norm(patches, training=training))

    def scores(self, model: nnx.Module, images: jax.Array) -> jax.Array:
        """(B, h, w, K) float32."""
        return self.logits(model, images, training=False)


class MultilevelHead(nnx.Module):
    """Several layers, fused at four times the resolution of the last."""

    def __init__(
        self,
        layers: tuple[str, ...],
        widths: tuple[int, ...],
        width: int,
        num_classes: int,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.layers = layers
        self.norms = nnx.List([layer_norm(w, _EPSILON, dtype, rngs) for w in widths])
        self.projections = nnx.List([_linear(w, width, dtype, rngs) for w in widths])
        self.fuse = nnx.Conv(width, width, (3, 3), kernel_init=_UNIFORM, dtype=dtype, rngs=rngs)
        self.norm = layer_norm(width, _EPSILON, dtype, rngs)
        self.linear = nnx.Linear(width, num_classes, kernel_init=_SMALL, rngs=rngs)

    def logits(
        self, model: nnx.Module, images: jax.Array, *, training: bool, rngs=None
    ) -> jax.Array:
        """(B, 4 h, 4 w, K) float32."""
        call = dict(norm=False, deterministic=not training, rngs=rngs)
        _, layers = layer_features.compute(model, images, self.layers, **call)
        b, h, w, _ = layers[-1].map.shape
        fused = 0.0
        for layer, norm, project in zip(layers, self.norms, self.projections, strict=True):
            x = project(norm(layer.map))
            shape = (b, _FUSED * h, _FUSED * w, x.shape[-1])
            fused += jax.image.resize(x, shape, "linear", antialias=False)
        fused = self.norm(self.fuse(_gelu(fused)))
        return self.linear(_gelu(fused).astype(jnp.float32))

    def scores(self, model: nnx.Module, images: jax.Array) -> jax.Array:
        """(B, 4 h, 4 w, K) float32."""
        return self.logits(model, images, training=False)


class QueryHead(nnx.Module):
    """EoMT: learned queries, what reads classes and masks off them, and what enlarges the patches."""

    def __init__(self, config, num_classes: int, queries: int, blocks: int, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.dtype), config.width
        self.blocks = blocks
        self.queries = nnx.Param(jax.random.normal(rngs.params(), (queries, width)))
        self.class_head = _linear(width, num_classes + 1, dtype, rngs)
        self.mask_head = nnx.List([_linear(width, width, dtype, rngs) for _ in range(3)])
        steps = max(1, int(math.log2(config.patch)) - 2)
        self.upscale = nnx.List([Upscale(width, dtype, rngs) for _ in range(steps)])

    @property
    def enlarged(self) -> int:
        """By how much masks are larger than the grid of patches."""
        return 2 ** len(self.upscale)

    def __call__(
        self,
        model: nnx.Module,
        images: jax.Array,
        *,
        masked: jax.Array | None = None,
        key: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> list[tuple[jax.Array, jax.Array]]:
        """The logits of masks (B, Q, h, w) and of classes (B, Q, K + 1), float32: the last ones, and with
        `masked` those before each of the last blocks too, which come first.

        Args:
          model: a ViT.
          images: (B, H, W, C), normalised.
          masked: (blocks,) the probability that a query attends to its own mask alone; `None`: that is 0,
            nothing is predicted before the end, and nothing is random.
          key: randomness of which queries do.
          rngs: of the model's dropout.
        """
        predictions, count = [], len(self.queries[...])

        def join(x: jax.Array) -> jax.Array:
            queries = self.queries[...].astype(x.dtype)
            return jnp.concatenate(
                [jnp.broadcast_to(queries, (x.shape[0], *queries.shape)), x], axis=1
            )

        def bias(number: int, x: jax.Array) -> jax.Array | None:
            if masked is None:
                return None
            normed = model.last_norm(x, "blocks")
            predictions.append(self.predict(normed, model.config.grid))
            draws = jax.random.uniform(jax.random.fold_in(key, number), (x.shape[0], count, 1))
            return hide(predictions[-1][0], model.config.grid, draws > masked[number])

        joining = Joining(self.blocks, join, bias, training=masked is not None)
        call = dict(deterministic=masked is None, rngs=rngs)
        x = model.add_positions(model.patches(images, **call))
        x, _ = model.encode(x, **call, joining=joining)
        return [*predictions, self.predict(x, model.config.grid)]

    def predict(self, x: jax.Array, grid: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
        """Masks and classes of normed tokens (B, Q + …, D)."""
        queries, features = x[:, : len(self.queries[...])], to_map(x, grid)
        classes = self.class_head(queries).astype(jnp.float32)
        for number, layer in enumerate(self.mask_head):
            queries = layer(queries if not number else _gelu(queries))
        *layers, last = self.upscale
        for layer in layers:
            features = layer(features)
        features = last.before_norm(features)
        b, h, w, width = features.shape
        masks = last.norm.product(features.reshape(b, h * w, width), queries)
        return jnp.moveaxis(masks, -1, 1).reshape(b, -1, h, w), classes

    @staticmethod
    def joined(
        masks: jax.Array, classes: jax.Array, size: tuple[int, int] | None = None
    ) -> jax.Array:
        """Of every class the sum over queries of its probability times the mask's, (B, h, w, K).

        Args:
          masks: (B, Q, h, w) logits.
          classes: (B, Q, K + 1) logits.
          size: (h', w') that each query's mask is enlarged to before its probabilities are taken, as EoMT's authors
            do; the result is of that size. Some queries at a time: all at once are large.
        """
        probable = jax.nn.softmax(classes)[..., :-1]
        if size is None:
            return product("bhwq,bqk->bhwk", jax.nn.sigmoid(jnp.moveaxis(masks, 1, -1)), probable)
        (b, queries, *_), k = masks.shape, probable.shape[-1]

        def add(total: jax.Array, some: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            large = jax.image.resize(some[0], (b, _AT_ONCE, *size), "linear", antialias=False)
            return total + product("bqhw,bqk->bhwk", jax.nn.sigmoid(large), some[1]), None

        none = -queries % _AT_ONCE  # queries of probability 0
        parts = (
            jnp.pad(x, ((0, 0), (0, none), *((0, 0),) * (x.ndim - 2)))
            .reshape(b, -1, _AT_ONCE, *x.shape[2:])
            .swapaxes(0, 1)
            for x in (masks, probable)
        )
        return jax.lax.scan(add, jnp.zeros((b, *size, k)), tuple(parts))[0]


class Upscale(nnx.Module):
    """Twice the resolution: a transposed convolution of stride 2, and one of each channel."""

    def __init__(self, width: int, dtype, rngs: nnx.Rngs):
        def init(key, shape):  # PyTorch counts four inputs for each of the outputs
            return _UNIFORM(key, shape) / 2

        self.expand = Kernel(init, (width, 4 * width), rngs)
        self.bias = nnx.Param(jnp.zeros(width))
        self.depthwise = Kernel(_UNIFORM, (3, 3, 1, width), rngs)
        self.norm = layer_norm(width, _EPSILON, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, h, w, D) -> (B, 2 h, 2 w, D)."""
        return self.norm(self.before_norm(x))

    def before_norm(self, x: jax.Array) -> jax.Array:
        """(B, h, w, D) -> (B, 2 h, 2 w, D), which is normed then."""
        b, h, w, width = x.shape
        x = dense(x, self.expand.kernel[...], None).reshape(b, h, w, 2, 2, width)
        x = x.swapaxes(2, 3).reshape(b, 2 * h, 2 * w, width) + self.bias[...].astype(x.dtype)
        # XLA would store erf for the backward pass, a map as large as x.
        return depthwise(jax.checkpoint(_gelu)(x), self.depthwise.kernel[...])


def to_map(tokens: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """The patches (B, h, w, D) of tokens (B, N, D), which end with them."""
    rows, columns = grid
    return tokens[:, -rows * columns :].reshape(tokens.shape[0], rows, columns, -1)


def hide(masks: jax.Array, grid: tuple[int, int], free: jax.Array) -> jax.tree_util.Partial:
    """What keeps queries to their own masks: a function that attention adds to its logits.

    Args:
      masks: (B, Q, h, w) logits.
      grid: of the patches.
      free: (B, Q, 1) queries that may attend to everything.
    """
    b, queries = masks.shape[:2]
    small = jax.image.resize(masks, (b, queries, *grid), "linear", antialias=False)
    shown = (small.reshape(b, queries, -1) > 0) | free
    return jax.tree_util.Partial(_added, jnp.where(shown, 0.0, _HIDDEN))


def _added(hidden: jax.Array, q: jax.Array) -> jax.Array:
    """(B, Q, N) for the first queries and the last keys, among all: (B, H, T, T) for q (B, T, H, C)."""
    (b, queries, patches), (tokens, heads) = hidden.shape, q.shape[1:3]
    everywhere = jnp.pad(hidden, ((0, 0), (0, tokens - queries), (tokens - patches, 0)))
    return jnp.broadcast_to(everywhere[:, None], (b, heads, tokens, tokens))


def _linear(inputs: int, outputs: int, dtype, rngs: nnx.Rngs) -> Linear:
    return Linear(inputs, outputs, kernel_init=_UNIFORM, dtype=dtype, rngs=rngs)
