"""Losses of segmentation, of each example by itself: of every pixel's class, and of masks with classes that
queries predict (Mask2Former, arXiv 2112.01527 §3; EoMT, arXiv 2503.19108).

Masks are compared at points: random ones for matching; for the loss all of many random ones, and those among them
where the prediction is least certain more (PointRend, arXiv 1912.08193 §3.1). Every pixel of a mask has as many
points, each anywhere in it: so a mask is read at them by shifting it, not by a gather for each point.
"""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning
from vit_jax.compute.convolution import local
from vit_jax.compute.dense import product
from vit_jax.data.labels.masks import IGNORED
from vit_jax.data.labels.segments import classes_of, things_of
from vit_jax.objectives.segmentation.matching import assign

_NOTHING = 1e-6  # less than any point counts


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
      count: of each mask, about: every pixel has as many.
      oversampled: among how many times as many the least certain are chosen.
      uncertain: share of the points that are chosen so.
    """

    count: int = 12544
    oversampled: int = 3
    uncertain: float = 0.75

    def draw(self, key: jax.Array, size: tuple[int, int]) -> jax.Array:
        """Among which to choose, (n, h, w, 2) for masks of a size: x and y in [0, 1] within each pixel."""
        height, width = size
        of_pixel = max(1, round(self.oversampled * self.count / (height * width)))
        return jax.random.uniform(key, (of_pixel, height, width, 2))

    def importance(self, values: jax.Array) -> jax.Array:
        """What each point counts in the loss, (…, P) for a prediction's logits there: the least certain once,
        and all together as much as the rest of the points that are wanted.
        """
        chosen = round(values.shape[-1] * self.uncertain / self.oversampled)
        nearest = smallest(jnp.abs(values), chosen).astype(jnp.float32)
        return nearest + (1 - self.uncertain) / self.oversampled


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


def of_counted(values: jax.Array, labels: jax.Array) -> jax.Array:
    """Values of images (B,), scaled so that their mean over the batch is the mean over images with a pixel that counts.
    An image without such a pixel gets 0.

    Args:
      labels: (B, H, W), see `pixel_loss`.
    """
    counts = (classes_of(labels) != IGNORED).any((1, 2))
    images = jnp.maximum(counts.sum(), 1)
    return values * counts * (len(values) / images)


def segments(
    labels: jax.Array, num_classes: int, most: int, things: int = 0
) -> tuple[jax.Array, jax.Array]:
    """The segments of an image by their numbers in the label map, those with most pixels first, (B, M) int32; and how
    many there are, (B,). A segment is a thing, or all pixels of a class that are of no thing.

    Args:
      labels: (B, H, W) uint8, or uint16 of panoptic masks, see `data.labels.segments`.
      most: M, of which there are not more.
      things: how many an image has at most.
    """
    flat = labels.reshape(len(labels), -1)
    sizes = _counts(jnp.minimum(flat, IGNORED))[:, :num_classes]
    numbers = jnp.broadcast_to(jnp.arange(num_classes), sizes.shape)
    if things:
        of_thing = things_of(flat)
        sizes = jnp.concatenate([sizes, _counts(of_thing)[:, 1 : things + 1]], axis=1)
        inside = of_thing[:, None] == jnp.arange(1, things + 1)[:, None]
        of_things = (inside * flat[:, None].astype(jnp.int32)).max(-1)
        numbers = jnp.concatenate([numbers, of_things], axis=1)
    pixels, places = jax.lax.top_k(sizes, most)
    return jnp.take_along_axis(numbers, places, axis=1), (pixels > 0).sum(-1)


def _counts(numbers: jax.Array) -> jax.Array:
    """How often each of 0 to 255 is among numbers (B, P), (B, 256) float32: as products of the halves of their bits,
    of which there are 2 x 16 to compare with, not 256.
    """
    high, low = (
        (bits[:, None] == jnp.arange(16)[:, None]).astype(jnp.float32)
        for bits in (numbers >> 4, numbers & 15)
    )
    return product("bhp,blp->bhl", high, low).reshape(len(numbers), -1)


@jax.custom_vjp
def sample(maps: jax.Array, within: jax.Array) -> jax.Array:
    """Values of maps (…, h, w) at points in every pixel, see `Points.draw`: bilinear between the centres of pixels,
    with zeros around the map, (…, n h w).
    """
    values = local(maps[..., None, :, :], _neighbours(within))
    return values.reshape(*maps.shape[:-2], -1)


def _sample_backward(within, gradient):
    """Reads what the forward pass has written: differentiated, that would pad for each of the neighbours."""
    kernels = _neighbours(within)
    around = jnp.pad(kernels, ((0, 0), (0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = within.shape[1:3]
    back = [
        [around[2 - i, 2 - j, :, i : i + height, j : j + width] for j in range(3)] for i in range(3)
    ]
    gradient = gradient.reshape(*gradient.shape[:-1], *within.shape[:-1])
    return local(gradient, jnp.stack([jnp.stack(row) for row in back])).sum(-3), None


sample.defvjp(lambda maps, within: (sample(maps, within), within), _sample_backward)


def _neighbours(within):
    """The weights (3, 3, n, h, w) at points (n, h, w, 2) of the pixels around theirs."""
    away = jnp.arange(-1, 2)[:, None, None, None]
    across, down = (jnp.maximum(0, 1 - jnp.abs(within[..., i] - 0.5 - away)) for i in (0, 1))
    return down[:, None] * across


def places(within: jax.Array) -> jax.Array:
    """(n h w, 2) x and y in [0, 1] of points in every pixel (n, h, w, 2)."""
    _, height, width, _ = within.shape
    rows, columns = jnp.meshgrid(jnp.arange(height), jnp.arange(width), indexing="ij")
    corner, size = jnp.stack([columns, rows], axis=-1), jnp.array([width, height])
    return ((corner + within) / size).reshape(-1, 2)


def sample_labels(
    labels: jax.Array, points: jax.Array, numbers: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The masks of segments at points, bilinear as `sample`, and whether a point counts, by the pixel in which it is.

    Args:
      labels: (H, W) uint8 or uint16.
      points: (P, 2), see `places`.
      numbers: (M,), see `segments`.

    Returns:
      (M, P) float32 in [0, 1], and (P,) float32 of zeros and ones.
    """
    corners, weights = _corners(labels.shape, points)
    at_corners = labels.reshape(-1)[corners]  # (4, P)
    inside = ((at_corners[:, None] == numbers[None, :, None]) * weights[:, None]).sum(0)
    height, width = labels.shape
    size = jnp.array([width, height])
    x, y = jnp.moveaxis(jnp.clip((points * size).astype(jnp.int32), 0, size - 1), -1, 0)
    return inside, (classes_of(labels[y, x]) != IGNORED).astype(jnp.float32)


def _corners(shape: tuple[int, int], points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The four pixels around points (P, 2), as places in the flat map, and their weights, (4, P) each."""
    height, width = shape
    x, y = points[..., 0] * width - 0.5, points[..., 1] * height - 0.5
    left, top = jnp.floor(x), jnp.floor(y)
    corner_places, weights = [], []
    for down in (0, 1):
        for across in (0, 1):
            row, column = top + down, left + across
            weight = (1 - jnp.abs(y - row)) * (1 - jnp.abs(x - column))
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            place = jnp.clip(row, 0, height - 1) * width + jnp.clip(column, 0, width - 1)
            corner_places.append(place.astype(jnp.int32))
            weights.append(jnp.where(inside, weight, 0))
    return jnp.stack(corner_places), jnp.stack(weights)


def smallest(values: jax.Array, count: int) -> jax.Array:
    """Which of the values (…, P), none below 0, are the `count` smallest, bool; to eight bits of their fraction: all
    that are equal so far to the last of them are among them.

    By bisection: sorting takes several times as long on every kind of device.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32) >> 15  # floats are ordered as integers

    def add_bit(number, bound):
        higher = bound | (1 << (15 - number))
        return jnp.where((bits < higher).sum(-1, keepdims=True) < count, higher, bound)

    bound = jax.lax.fori_loop(0, 16, add_bit, jnp.zeros((*values.shape[:-1], 1), jnp.int32))
    return bits <= bound


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Binary, the mean over points (…, P) by weights; 0 if none counts."""
    losses = jax.nn.softplus(logits) - logits * targets
    return (losses * weights).sum(-1) / jnp.maximum(weights.sum(-1), _NOTHING)


def dice(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """1 - (2 Σ w p t + 1) / (Σ w p + Σ w t + 1) over points (…, P) with weights."""
    p = jax.nn.sigmoid(logits) * weights
    return 1 - (2 * (p * targets).sum(-1) + 1) / (p.sum(-1) + (weights * targets).sum(-1) + 1)


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """The masks of an example that are to be learned, at points.

    Attributes:
      within: the points, see `Points.draw`.
      targets, counted: see `sample_labels`.
      classes: (M,).
      count: how many of the M there are.
    """

    within: jax.Array
    targets: jax.Array
    counted: jax.Array
    classes: jax.Array
    count: jax.Array


def matching_costs(
    masks: jax.Array, logits: jax.Array, wanted: Segments, weights: Weights
) -> jax.Array:
    """`costs` of an example, at one point of each pixel.

    Args:
      masks: (Q, h, w) logits.
      logits: (Q, K + 1).
    """
    at_points = sample(masks, wanted.within[:1])
    first = at_points.shape[-1]
    targets, counted = wanted.targets[:, :first], wanted.counted[:first]
    return costs(at_points, logits, targets, counted, wanted.classes, weights)


def matched_loss(
    masks: jax.Array,
    logits: jax.Array,
    wanted: Segments,
    queries: jax.Array,
    points: Points,
    weights: Weights,
) -> dict[str, jax.Array]:
    """The parts of the loss of an example, scalars, each already weighted: `mask`, `dice`, `label`. They are 0 of one
    without segments.

    Args:
      masks, logits: see `matching_costs`.
      queries: of each segment, from `assign`.
    """
    num_queries, count = len(masks), wanted.count
    valid = jnp.arange(len(queries)) < count
    at_points = sample(masks[jnp.minimum(queries, num_queries - 1)], wanted.within)
    importance = points.importance(jax.lax.stop_gradient(at_points)) * wanted.counted
    query_losses = {
        "mask": cross_entropy(at_points, wanted.targets, importance),
        "dice": dice(at_points, wanted.targets, importance),
    }
    means = {name: (x * valid).sum() / jnp.maximum(count, 1) for name, x in query_losses.items()}
    nothing = logits.shape[-1] - 1
    classes = jnp.full(num_queries, nothing, jnp.int32)
    classes = classes.at[queries].set(wanted.classes, mode="drop")
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), classes[:, None], axis=1)[:, 0]
    # An image without a pixel that counts may show anything: it is no evidence of "no object".
    has_target = count > 0
    weight = jnp.where(classes == nothing, weights.no_object, 1.0) * has_target
    total = jnp.maximum(weight.sum(), _NOTHING)
    means["label"] = (losses * weight).sum() / total
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
    numbers, count = segments(labels, logits.shape[-1] - 1, most, things)

    def costs_of_example(masks, logits, labels, numbers, count, key):
        within = points.draw(key, masks.shape[-2:])
        targets, counted = sample_labels(labels, places(within), numbers)
        wanted = Segments(within, targets, counted, classes_of(numbers), count)
        # Layer by layer: each needs much memory.
        given = jax.lax.stop_gradient((masks, logits))
        return wanted, jax.lax.map(lambda layer: matching_costs(*layer, wanted, weights), given)

    keys = jax.random.split(key, len(labels))
    wanted, layer_costs = jax.vmap(costs_of_example, in_axes=(1, 1, 0, 0, 0, 0))(
        masks, logits, labels, numbers, count, keys
    )
    # The search is one for all layers and images of a device, which are as long as the longest.
    queries = partitioning.by_batch(jax.vmap(jax.vmap(assign, (0, None))), layer_costs, count)

    def loss_of_example(masks, logits, wanted, queries):
        def of_layer(layer):
            masks, logits, queries = layer
            return matched_loss(masks, logits, wanted, queries, points, weights)

        return jax.lax.map(of_layer, (masks, logits, queries))

    over_batch = jax.vmap(loss_of_example, in_axes=(1, 1, 0, 0), out_axes=1)
    return over_batch(masks, logits, wanted, queries)
