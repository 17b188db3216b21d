"""From what queries predict to segments, and how good these are: panoptic quality (Kirillov et al., arXiv 1801.00868
§4) by exact sums.
"""

import numpy as np

from vit_jax.data.decoding import resize
from vit_jax.data.labels.masks import IGNORED
from vit_jax.data.labels.segments import classes_of, numbers
from vit_jax.evaluation import maps

# IoU is counted in such parts, as integers: sums over hosts do not depend on their order.
_UNIT = 2**40
_CODES = 2**24  # of label maps, predicted ones too
# Probabilities from here to 1 minus this have logits that are finite in float32.
_LEAST = 2.0**-24
# Columns of counts: of IoU, and true positives, false ones, false negatives.
SUM, TRUE, FALSE, MISSED = range(4)


def segment_map(
    masks: np.ndarray,
    classes: np.ndarray,
    things: tuple[bool, ...],
    size: tuple[int, int],
    *,
    score: float,
    overlap: float,
) -> np.ndarray:
    """The segments of an image as a label map (H, W) int32, see `data.labels.segments`, as Mask2Former and EoMT join
    queries: each pixel goes to the query with the largest product of class and mask probability.

    Args:
      masks: (h, w, Q) probabilities.
      classes: (Q, K + 1) probabilities, the last one of no object.
      things: of each class.
      size: H, W.
      score: queries whose class is less probable are dropped.
      overlap: so are those that get fewer pixels than this share of their mask, which is where they are above 1/2.
    """
    label_map, best = np.full(size, IGNORED, np.int32), np.zeros(size, np.float32)
    winner, labels = np.full(size, -1, np.int32), classes.argmax(-1)
    above = np.zeros(size, bool)  # whether the winner's mask is
    kept = [q for q, k in enumerate(labels) if k < len(things) and classes[q, k] > score]
    areas = {}
    for q in kept:
        mask = _enlarged(masks[..., q], size)
        inside = mask >= 0.5
        areas[q] = np.count_nonzero(inside)
        product = mask * classes[q, labels[q]]
        better = product > best
        best[better], winner[better], above[better] = product[better], q, inside[better]
    won = _count(winner, len(labels))
    winner[~above] = -1
    seen = _count(winner, len(labels))
    valid = [q for q in kept if seen[q] and won[q] >= overlap * areas[q]]
    for q, number in zip(valid, numbers(labels[valid], things), strict=True):
        label_map[winner == q] = number
    return label_map


def _count(winner: np.ndarray, queries: int) -> np.ndarray:
    """The pixels of each query, of those that each pixel goes to; -1: to none."""
    return np.bincount(winner.ravel() + 1, minlength=queries + 1)[1:]


def _enlarged(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A query's mask of probabilities (h, w) at another size (H, W): its logits are enlarged, as EoMT's authors do."""
    inside = np.clip(mask, _LEAST, 1 - _LEAST)
    return 1 / (1 + np.exp(-resize.enlarged(np.log(inside / (1 - inside)), size)))


def segments_of(
    answers: tuple[np.ndarray, ...],
    size: tuple[int, int],
    things: tuple[bool, ...],
    options: maps.MaskOptions,
) -> np.ndarray:
    """The segments of an image of a size by what the model answers to all of it, see `segment_map`."""
    _, masks, classes = answers
    limits = dict(score=options.score, overlap=options.overlap)
    return segment_map(masks, classes, things, size, **limits)


def counts_of(predicted: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Of each class `SUM`, `TRUE`, `FALSE` and `MISSED`, (K, 4) int64, of an image's label maps (H, W).

    A predicted segment of which more than half does not count is no false one; other pixels that do not count are no
    part of it.
    """
    pairs = predicted.astype(np.int64) * _CODES + labels
    both, areas = np.unique(pairs, return_counts=True)
    inside = {
        (int(p), int(t)): int(n)
        for p, t, n in zip(both // _CODES, both % _CODES, areas, strict=True)
    }
    area_of = [{}, {}]
    for pair, area in inside.items():
        for segment, areas_of_one in zip(pair, area_of, strict=True):
            areas_of_one[segment] = areas_of_one.get(segment, 0) + area
    of_predicted, of_labels = area_of
    counts, matched = np.zeros((classes, 4), np.int64), set()
    for (segment, other), area in inside.items():
        label = classes_of(segment)
        if label == IGNORED or label != classes_of(other):
            continue
        ignored = inside.get((segment, IGNORED), 0)
        union = of_predicted[segment] - ignored + of_labels[other] - area
        if 2 * area > union:
            counts[label, SUM] += round(area * _UNIT / union)
            counts[label, TRUE] += 1
            matched |= {("predicted", segment), ("label", other)}
    for segment, area in of_predicted.items():
        if segment != IGNORED and ("predicted", segment) not in matched:
            counts[classes_of(segment), FALSE] += 2 * inside.get((segment, IGNORED), 0) <= area
    for other in of_labels:
        if other != IGNORED and ("label", other) not in matched:
            counts[classes_of(other), MISSED] += 1
    return counts


def measures(
    counts: np.ndarray, classes: tuple[str, ...], things: tuple[bool, ...]
) -> dict[str, float]:
    """Panoptic quality `pq`, `sq` of what was found and `rq` of finding: means over the classes that occur, of things
    and stuff, and `pq` of each class.
    """
    true = counts[:, TRUE]
    total = true + (counts[:, FALSE] + counts[:, MISSED]) / 2
    occurs, is_thing = total > 0, np.array(things)
    sq = counts[:, SUM] / _UNIT / np.maximum(true, 1)
    rq = true / np.maximum(total, 0.5)
    by_name = {}
    for end, chosen in (
        ("", occurs),
        ("_things", occurs & is_thing),
        ("_stuff", occurs & ~is_thing),
    ):
        for name, values in (("pq", sq * rq), ("sq", sq), ("rq", rq)):
            by_name[name + end] = float(values[chosen].mean()) if chosen.any() else 0.0
    of_class = zip(classes, sq * rq, occurs, strict=True)
    return by_name | {f"pq/{name}": float(value) for name, value, present in of_class if present}
