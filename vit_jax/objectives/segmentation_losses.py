"""Losses of segmentation, of each example by itself: of every pixel's class, and of masks with classes that
queries predict (Mask2Former, arXiv 2112.01527 §3; EoMT, arXiv 2503.19108).

Masks are compared at points: random ones for matching; for the loss those of many random ones where the
prediction is least certain, and some others (PointRend, arXiv 1912.08193 §3.1).
"""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.data.masks import IGNORED
from vit_jax.data.segments import classes_of, things_of
from vit_jax.objectives.matching import assign


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of the parts of the loss, which are those of the costs of matching too.

    Attributes:
      mask: binary cross-entropy of a mask's points.
      dice: 1 - 2 |A ∩ B| / (|A| + |B|) of a mask's points.
      label: cross-entropy of the queries' classes.
      no_object: within `label`, of queries without a segment.
    """

    mask: float = 5.0
    dice: float = 5.0
    label: float = 2.0
    no_object: float = 0.1


@dataclasses.dataclass(frozen=True)
class Points:
    """At how many points masks are compared.

    Attributes:
      count: of each mask.
      oversampled: among how many times as many the least certain are chosen.
      uncertain: share of the points that are chosen so.
    """

    count: int = 12544
    oversampled: int = 3
    uncertain: float = 0.75


def pixel_loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the pixels that count, and the share of them that is right, (B,) each.

    Args:
      logits: (B, h, w, K), enlarged to the size of the labels.
      labels: (B, H, W) uint8, or uint16, of which the classes are learned.
    """
    shape = (*labels.shape, logits.shape[-1])
    logits = jax.image.resize(logits.astype(jnp.float32), shape, "linear", antialias=False)
    labels = classes_of(labels)
    counted = (labels != IGNORED).astype(jnp.float32)
    classes = jnp.where(labels == IGNORED, 0, labels).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, classes[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    right = logits.argmax(-1) == classes
    total = jnp.maximum(counted.sum((1, 2)), 1)
    return (losses * counted).sum((1, 2)) / total, (right * counted).sum((1, 2)) / total


def segments(
    labels: jax.Array, num_classes: int, most: int, things: int = 0
) -> tuple[jax.Array, jax.Array]:
    """The segments of an image by their numbers in the label map, those with most pixels first, (B, M) int32; and how
    many there are, (B,). A segment is a thing, or all pixels of a class that are of no thing.

    Args:
      labels: (B, H, W) uint8, or uint16 of panoptic masks, see `data.segments`.
      most: M, of which there are not more.
      things: how many an image has at most.
    """
    found = (labels[..., None] == jnp.arange(num_classes)).sum((1, 2))
    numbers = jnp.broadcast_to(jnp.arange(num_classes), found.shape)
    if things:
        inside = things_of(labels)[..., None] == jnp.arange(1, things + 1)
        found = jnp.concatenate([found, inside.sum((1, 2))], axis=1)
        of_things = (inside * labels[..., None].astype(jnp.int32)).max((1, 2))
        numbers = jnp.concatenate([numbers, of_things], axis=1)
    pixels, places = jax.lax.top_k(found, most)
    return jnp.take_along_axis(numbers, places, axis=1), (pixels > 0).sum(-1)


def sample(maps: jax.Array, points: jax.Array) -> jax.Array:
    """Values of maps (h, w) at points (P, 2), x and y in [0, 1]: bilinear between the centres of pixels, with
    zeros around the map. Further leading axes are the same for both.
    """
    if maps.ndim > 2:
        return jax.vmap(sample)(maps, points)
    corners, weights = _corners(maps.shape, points)
    return (maps.reshape(-1)[corners] * weights).sum(0)


def sample_labels(
    labels: jax.Array, points: jax.Array, numbers: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`sample` of the masks of segments, and whether a point counts, by the pixel in which it is.

    Args:
      labels: (H, W) uint8 or uint16.
      points: (P, 2), or (M, P, 2) of each segment its own.
      numbers: (M,), see `segments`.

    Returns:
      (M, P) float32 in [0, 1], and (P,) or (M, P) float32 of zeros and ones.
    """
    corners, weights = _corners(labels.shape, points)
    found = labels.reshape(-1)[corners]  # (4, …, P)
    wanted = numbers[:, None] if points.ndim == 3 else numbers[None, :, None]
    if points.ndim == 2:
        found, weights = found[:, None], weights[:, None]
    inside = ((found == wanted) * weights).sum(0)
    height, width = labels.shape
    size = jnp.array([width, height])
    x, y = jnp.moveaxis(jnp.clip((points * size).astype(jnp.int32), 0, size - 1), -1, 0)
    return inside, (classes_of(labels[y, x]) != IGNORED).astype(jnp.float32)


def _corners(shape: tuple[int, int], points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The four pixels around points (…, 2), as places in the flat map, and their weights, (4, …) each."""
    height, width = shape
    x, y = points[..., 0] * width - 0.5, points[..., 1] * height - 0.5
    left, top = jnp.floor(x), jnp.floor(y)
    places, weights = [], []
    for down in (0, 1):
        for across in (0, 1):
            row, column = top + down, left + across
            weight = (1 - jnp.abs(y - row)) * (1 - jnp.abs(x - column))
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = jnp.clip(row, 0, height - 1) * width + jnp.clip(column, 0, width - 1)
            places.append(place.astype(jnp.int32))
            weights.append(jnp.where(inside, weight, 0))
    return jnp.stack(places), jnp.stack(weights)


def cross_entropy(logits: jax.Array, targets: jax.Array, counted: jax.Array) -> jax.Array:
    """Binary, the mean over the points (…, P) that count."""
    losses = jax.nn.softplus(logits) - logits * targets
    return (losses * counted).sum(-1) / jnp.maximum(counted.sum(-1), 1)


def dice(logits: jax.Array, targets: jax.Array, counted: jax.Array) -> jax.Array:
    """1 - (2 Σ p t + 1) / (Σ p + Σ t + 1) over the points (…, P) that count."""
    p, targets = jax.nn.sigmoid(logits) * counted, targets * counted
    return 1 - (2 * (p * targets).sum(-1) + 1) / (p.sum(-1) + targets.sum(-1) + 1)


def costs(
    masks: jax.Array,
    logits: jax.Array,
    targets: jax.Array,
    counted: jax.Array,
    classes: jax.Array,
    weights: Weights,
) -> jax.Array:
    """Of learning segment m by query q, (M, Q), for an example.

    Args:
      masks: (Q, P) logits at points.
      logits: (Q, K + 1) of classes.
      targets: (M, P), masks of the segments.
      counted: (P,).
      classes: (M,).
    """
    total = jnp.maximum(counted.sum(), 1)
    targets, p = targets * counted, jax.nn.sigmoid(masks) * counted
    # Σ t softplus(-z) + (1 - t) softplus(z) = Σ softplus(z) - t z
    mask = ((jax.nn.softplus(masks) * counted).sum(-1) - targets @ masks.T) / total
    sums = p.sum(-1) + targets.sum(-1)[:, None]
    dice = 1 - (2 * targets @ p.T + 1) / (sums + 1)
    label = -jax.nn.softmax(logits)[:, classes].T
    return weights.mask * mask + weights.dice * dice + weights.label * label


def match(
    masks: jax.Array,
    logits: jax.Array,
    labels: jax.Array,
    numbers: jax.Array,
    count: jax.Array,
    points: jax.Array,
    weights: Weights,
) -> jax.Array:
    """The query of each segment of an example, (M,) int32; Q for those beyond `count`.

    Args:
      masks: (Q, h, w) logits.
      logits: (Q, K + 1).
      labels: (H, W) uint8 or uint16.
      numbers, count: see `segments`.
      points: (P, 2).
    """
    at_points = jax.vmap(sample, (0, None))(masks, points)
    targets, counted = sample_labels(labels, points, numbers)
    return assign(costs(at_points, logits, targets, counted, classes_of(numbers), weights), count)


def uncertain_points(masks: jax.Array, key: jax.Array, points: Points) -> jax.Array:
    """(M, P, 2) for masks (M, h, w): most where the logits are nearest to 0, the others anywhere."""
    chosen, (first, second) = int(points.uncertain * points.count), jax.random.split(key)
    many = jax.random.uniform(first, (len(masks), points.oversampled * points.count, 2))
    _, places = jax.lax.top_k(-jnp.abs(sample(masks, many)), chosen)
    some = jnp.take_along_axis(many, places[..., None], axis=1)
    others = jax.random.uniform(second, (len(masks), points.count - chosen, 2))
    return jnp.concatenate([some, others], axis=1)


def matched_loss(
    masks: jax.Array,
    logits: jax.Array,
    labels: jax.Array,
    numbers: jax.Array,
    count: jax.Array,
    queries: jax.Array,
    key: jax.Array,
    points: Points,
    weights: Weights,
) -> dict[str, jax.Array]:
    """The parts of the loss of an example, scalars, each already weighted: `mask`, `dice`, `label`.

    Args:
      masks, logits, labels, numbers, count: see `match`.
      queries: from `match`.
    """
    num_queries = len(masks)
    valid = jnp.arange(len(numbers)) < count
    chosen = masks[jnp.minimum(queries, num_queries - 1)]
    places = uncertain_points(jax.lax.stop_gradient(chosen), key, points)
    at_points = sample(chosen, places)
    targets, counted = sample_labels(labels, places, numbers)
    found = {
        "mask": cross_entropy(at_points, targets, counted),
        "dice": dice(at_points, targets, counted),
    }
    means = {name: (x * valid).sum() / jnp.maximum(count, 1) for name, x in found.items()}
    nothing = logits.shape[-1] - 1
    wanted = jnp.full(num_queries, nothing, jnp.int32)
    wanted = wanted.at[queries].set(classes_of(numbers), mode="drop")
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[:, None], axis=1)[:, 0]
    weight = jnp.where(wanted == nothing, weights.no_object, 1.0)
    means["label"] = (losses * weight).sum() / weight.sum()
    return {name: getattr(weights, name) * x for name, x in means.items()}


def query_loss(
    masks: jax.Array,
    logits: jax.Array,
    labels: jax.Array,
    key: jax.Array,
    *,
    most: int,
    points: Points,
    weights: Weights,
    things: int = 0,
) -> dict[str, jax.Array]:
    """The parts of the loss, (L, B) each, of predictions of L layers.

    Args:
      masks: (L, B, Q, h, w) float32 logits.
      logits: (L, B, Q, K + 1) float32.
      labels: (B, H, W) uint8, or uint16 of panoptic masks.
      most: segments of an image that are learned, at most Q.
      things: see `segments`.
    """
    layers, batch = masks.shape[:2]
    numbers, count = segments(labels, logits.shape[-1] - 1, most, things)
    first, second = jax.random.split(key)
    places = jax.random.uniform(first, (batch, points.count, 2))
    given = jax.lax.stop_gradient((masks, logits))
    of_batch = jax.vmap(lambda *x: match(*x, weights))
    queries = jax.vmap(lambda m, c: of_batch(m, c, labels, numbers, count, places))(*given)
    keys = jax.random.split(second, (layers, batch))

    def of_layer(masks, logits, queries, keys):
        def of_example(*arguments):
            return matched_loss(*arguments, points, weights)

        return jax.vmap(of_example)(masks, logits, labels, numbers, count, queries, keys)

    return jax.vmap(of_layer)(masks, logits, queries, keys)
