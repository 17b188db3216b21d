"""What DINO, iBOT and DINOv2 compare: outputs of a projection head, as probabilities of prototypes
(arXiv 2104.14294 §3.1, 2111.07832 §3.2, 2304.07193 §4; facebookresearch/dinov2).

Functions of arrays, in float32, and the head. Rows are outputs of an image or a patch, K the number of
prototypes. Where arrays are sharded over devices, sums and means are those of all rows: what a step learns
does not depend on how many devices there are.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.compute.dense import to_float32

_SINKHORN_ITERATIONS = 3
_NORM_EPSILON = 1e-12
_DISTANCE_EPSILON = 1e-8


class Head(nnx.Module):
    """An MLP of three layers with the exact GELU, to a bottleneck of length 1, and its products with
    prototypes of length `scale`: (…, N, D) -> (…, N, K) float32, for several arrays.
    """

    def __init__(
        self,
        inputs: int,
        *,
        hidden: int,
        bottleneck: int,
        prototypes: int,
        std: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """Args:
        std: of the MLP's kernels at first.
        """
        sizes = inputs, hidden, hidden, bottleneck
        self.mlp = nnx.List([
            nnx.Linear(
                sizes[i],
                sizes[i + 1],
                # The authors' code truncates at 2, not at two deviations.
                kernel_init=nnx.initializers.normal(std),
                dtype=dtype,
                rngs=rngs,
            )
            for i in range(3)
        ])  # fmt: skip
        self.prototypes = Prototypes(bottleneck, prototypes, dtype, rngs)

    def __call__(
        self, rows: Sequence[jax.Array], *, frozen: jax.Array | bool = False
    ) -> list[jax.Array]:
        """Args:
        rows: (…, N, D) each, with N of its own; in one call, so that kernels are read once.
        frozen: whether the prototypes get no gradient.
        """
        x = jnp.concatenate(rows, axis=-2)
        for i, layer in enumerate(self.mlp):
            x = layer(jax.nn.gelu(x, approximate=False) if i else x)
        ends = itertools.accumulate(y.shape[-2] for y in rows[:-1])
        return self.prototypes(jnp.split(unit(x.astype(jnp.float32)), list(ends), axis=-2), frozen)


class Prototypes(nnx.Module):
    """A linear layer without bias whose columns have the length `scale`, whatever that of `kernel`'s."""

    def __init__(self, inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        bound = inputs**-0.5
        self.dtype = dtype
        self.kernel = nnx.Param(
            jax.random.uniform(rngs.params(), (inputs, outputs), minval=-bound, maxval=bound)
        )
        self.scale = nnx.Param(jnp.ones(outputs))

    def __call__(self, rows: Sequence[jax.Array], frozen: jax.Array | bool) -> list[jax.Array]:
        """(…, inputs) float32 -> (…, outputs) float32, for each."""
        kernel, scale = (
            jnp.where(frozen, jax.lax.stop_gradient(p[...]), p[...])
            for p in (self.kernel, self.scale)
        )
        kernel *= scale / jnp.linalg.norm(kernel, axis=0)
        kernel = kernel.astype(self.dtype)
        return [to_float32(x.astype(self.dtype), kernel) for x in rows]


def unit(x: jax.Array) -> jax.Array:
    """(…, D) of length 1."""
    squared = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squared, _NORM_EPSILON**2))


def centred(logits: jax.Array, centre: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """The teacher's probabilities, softmax((logits - centre) / temperature): logits (…, K), centre (K,)."""
    return jax.nn.softmax((logits - centre) / temperature, axis=-1)


def sum_of_logits(logits: jax.Array, weights: jax.Array | None = None) -> dict[str, jax.Array]:
    """Observations of a part of a batch for the centre: `sum` (K,) of the teacher's logits (…, K), and their `count`.

    Args:
      weights: (…) 1 for the rows that count, 0 for padding; by default all count.
    """
    axes = tuple(range(logits.ndim - 1))
    if weights is None:
        return {"sum": logits.sum(axes), "count": jnp.float32(logits.size // logits.shape[-1])}
    return {"sum": (logits * weights[..., None]).sum(axes), "count": weights.sum()}


def moved_centre(centre: jax.Array, sums: dict[str, jax.Array], momentum: float) -> jax.Array:
    """The centre (K,) for the next step, moved towards the mean of the teacher's logits.

    Args:
      sums: the results of `sum_of_logits`, stacked over the parts: (parts, K) and (parts,).
    """
    mean = sums["sum"].sum(0) / jnp.maximum(sums["count"].sum(0), 1)
    return momentum * centre + (1 - momentum) * mean


def sinkhorn(
    logits: jax.Array,
    temperature: jax.Array | float,
    present: jax.Array | None = None,
    *,
    iterations: int = _SINKHORN_ITERATIONS,
) -> jax.Array:
    """The teacher's probabilities by Sinkhorn-Knopp: all prototypes are used equally by all rows together
    (arXiv 2006.09882 §3.1).

    Args:
      logits: (…, K).
      present: (…) 1 for rows, 0 for what only fills the array, which gets zeros.

    Returns:
      (…, K), of which each row that is present adds up to 1.
    """
    axes, prototypes = tuple(range(logits.ndim - 1)), logits.shape[-1]
    rows = jnp.ones(logits.shape[:-1]) if present is None else present
    row_weights, count = rows[..., None], jnp.maximum(rows.sum(), 1)
    scaled = logits / temperature
    # Whatever is taken from all logits falls out of the first division.
    largest = jax.lax.stop_gradient(jnp.where(row_weights > 0, scaled, -jnp.inf).max())
    q = jnp.exp(jnp.where(row_weights > 0, scaled - largest, -jnp.inf))
    q /= q.sum()
    for _ in range(iterations):
        q /= jnp.maximum(q.sum(axes), jnp.finfo(q.dtype).tiny) * prototypes
        q /= jnp.maximum(q.sum(-1, keepdims=True), jnp.finfo(q.dtype).tiny) * count
    return q * count


def cross_entropy(probabilities: jax.Array, logits: jax.Array, temperature: float) -> jax.Array:
    """-Σ p log softmax(logits / temperature) of teacher and student: both (…, K) -> (…)."""
    scaled = logits / temperature
    # The logarithm of each probability need not be in memory.
    sums = probabilities.sum(-1) * jax.nn.logsumexp(scaled, axis=-1)
    return sums - jnp.sum(probabilities * scaled, axis=-1)


def class_token_loss(
    probabilities: jax.Array, of_global: jax.Array, of_local: list[jax.Array], temperature: float
) -> jax.Array:
    """DINO's loss of each image (B,): the mean cross-entropy over all pairs of a view that the teacher saw
    and another that the student did.

    Args:
      probabilities: of the teacher, (B, 2, K), for the global views.
      of_global: logits of the student, (B, 2, K).
      of_local: logits of the student, (B, V, K) each, for local views.
    """
    total = cross_entropy(probabilities[:, ::-1], of_global, temperature).sum(1)
    both, pairs = probabilities.sum(1, keepdims=True), 2
    for logits in of_local:
        total += cross_entropy(both, logits, temperature).sum(1)
        pairs += 2 * logits.shape[1]
    return total / pairs


def patch_loss(
    probabilities: jax.Array, logits: jax.Array, present: jax.Array, temperature: float
) -> jax.Array:
    """iBOT's loss of each crop (…): the mean cross-entropy over its masked patches, 0 where it has none.

    Args:
      probabilities, logits: of teacher and student, (…, N, K).
      present: (…, N) 1 for masked patches, 0 for what only fills the array.
    """
    each = cross_entropy(probabilities, logits, temperature) * present
    return each.sum(-1) / jnp.maximum(present.sum(-1), 1)


def koleo(features: jax.Array) -> jax.Array:
    """KoLeo's loss of each of several features (…, N, D) -> (…, N): minus the logarithm of the distance
    to the nearest other one of the N, both at length 1 (arXiv 1806.03198; 2304.07193 §4).
    """
    x = unit(features.astype(jnp.promote_types(features.dtype, jnp.float32)))
    products = jnp.einsum(
        "...nd,...md->...nm", *[jax.lax.stop_gradient(x)] * 2, precision=jax.lax.Precision.HIGHEST
    )
    others = jnp.where(jnp.eye(x.shape[-2], dtype=bool), -1.0, products)
    nearest = jnp.take_along_axis(x, others.argmax(-1)[..., None], axis=-2)
    squared = jnp.sum(jnp.square(x - nearest + _DISTANCE_EPSILON), axis=-1)
    return -jnp.log(jnp.sqrt(squared) + _DISTANCE_EPSILON)
