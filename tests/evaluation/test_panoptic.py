"""Panoptic quality against torchmetrics and the formula, and segments from what queries predict."""

import types

import numpy as np
import pytest

from tests import lazily
from vit_jax.data.labels.masks import IGNORED
from vit_jax.data.labels.segments import classes_of, colored, things_of
from vit_jax.evaluation.panoptic import FALSE, MISSED, TRUE, counts_of, measures, segment_map

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")
detection = lazily.Package("torchmetrics.detection")
CLASSES, THINGS = tuple("abcd"), (False, True, True, False)


def label_map(random, ignored):
    """Blocks of segments whose class follows from their number."""
    numbers = random.integers(0, 6, (6, 7)).repeat(4, 0).repeat(4, 1)
    codes = np.array([0, 3, 1 + 256, 1 + 512, 2 + 768, IGNORED if ignored else 0], np.uint16)
    return codes[numbers]


def test_panoptic_quality_is_that_of_torchmetrics_with_ignored_pixels_and_absent_classes():
    random = np.random.default_rng(0)
    how = dict(things={1, 2}, stuffs={0, 3, 4}, return_sq_and_rq=True)
    expected = detection.PanopticQuality(**how)
    of_classes = detection.PanopticQuality(**how, return_per_class=True)
    counts = np.zeros((5, 4), np.int64)
    for _ in range(12):
        labels = label_map(random, ignored=True)
        predicted = np.where(random.random(labels.shape) < 0.1, 3, labels)
        predicted = np.where(predicted == IGNORED, label_map(random, ignored=False), predicted)
        given = [
            torch.tensor(np.stack([classes_of(x), things_of(x)], -1).astype(int))[None]
            for x in (predicted, labels)
        ]
        expected.update(*given)
        of_classes.update(*given)
        counts += counts_of(predicted.astype(np.uint16), labels, 5)
    found = measures(counts, (*CLASSES, "absent"), (*THINGS, False))
    pq, sq, rq = expected.compute().tolist()
    assert [found[n] for n in ("pq", "sq", "rq")] == pytest.approx([pq, sq, rq], abs=1e-6)
    by_class = {n: found[f"pq/{n}"] for n in CLASSES}
    theirs = dict(zip("bcade", of_classes.compute()[:, 0].tolist(), strict=True))
    assert by_class == pytest.approx({n: theirs[n] for n in CLASSES}, abs=1e-6)
    assert "pq/absent" not in found and 0 < found["pq_things"] < 1


def test_segments_are_matched_missed_and_found_falsely():
    labels = np.array([[0, 0, 257, 257, 513, IGNORED, IGNORED, IGNORED]], np.uint16)
    predicted = np.array([[0, 0, 257, 257, IGNORED, 513, 513, 3]], np.uint16)
    counts = counts_of(predicted, labels, 4)
    assert counts[:, TRUE].tolist() == [1, 1, 0, 0]
    assert counts[:, MISSED].tolist() == [0, 1, 0, 0]
    assert counts[:, FALSE].sum() == 0  # what lies on pixels that do not count is not false
    assert measures(counts, CLASSES, THINGS)["pq/b"] == pytest.approx(2 / 3)
    halves = counts_of(np.array([[257] * 4], np.uint16), np.array([[257, 257, 0, 0]], np.uint16), 4)
    assert halves[1, [TRUE, FALSE, MISSED]].tolist() == [0, 1, 1]  # IoU must be above 1/2


def test_sums_do_not_depend_on_how_images_are_divided_among_hosts():
    random, parts = np.random.default_rng(1), []
    for _ in range(30):
        labels = label_map(random, ignored=True)
        predicted = np.where(random.random(labels.shape) < 0.2, 3, labels).astype(np.uint16)
        parts.append(counts_of(predicted, labels, 4))
    whole = sum(parts)
    np.testing.assert_array_equal(whole, sum(parts[1::3]) + sum(parts[::3]) + sum(parts[2::3]))


def test_queries_become_segments():
    """Two of one thing, two of one kind of stuff, one that is hidden, one of no object and one that is unsure."""
    masks = np.full((2, 6, 7), 0.1, np.float32)
    for query, columns in enumerate(((0, 1), (1, 2), (2, 3), (3, 4), (3, 4), (4, 5), (5, 6))):
        masks[:, slice(*columns), query] = 0.9
    classes = np.full((7, 5), 0.01)
    for query, label in enumerate((1, 1, 0, 0, 2, 4, 3)):
        classes[query, label] = 0.96 if query != 4 else 0.9
    classes[6] = (0.1, 0.2, 0.1, 0.5, 0.1)
    how = dict(score=0.8, overlap=0.8)
    found = segment_map(masks, classes, THINGS, (2, 6), **how)
    assert found.tolist() == [[257, 513, 0, 0, IGNORED, IGNORED]] * 2
    assert segment_map(masks, classes, THINGS, (4, 12), **how).shape == (4, 12)


def test_random_queries_become_the_segments_of_transformers():
    random = np.random.default_rng(0)
    # Blobs of a few cells; about half of the queries have a class that counts.
    coarse = random.normal(0, 3, (20, 9, 4, 4)).repeat(3, 2).repeat(3, 3)
    masks = (coarse + random.normal(0, 1, coarse.shape)).astype(np.float32)
    classes = random.normal(0, 2, (20, 9, 5)).astype(np.float32)
    size, how = (48, 48), dict(score=0.5, overlap=0.4)
    outputs = types.SimpleNamespace(
        masks_queries_logits=torch.from_numpy(masks), class_queries_logits=torch.from_numpy(classes)
    )
    processor = transformers.EomtImageProcessorPil(size=dict(shortest_edge=48, longest_edge=48))
    expected = processor.post_process_panoptic_segmentation(
        outputs, [size] * 20, threshold=0.5, overlap_mask_area_threshold=0.4,
        stuff_classes=[k for k, thing in enumerate(THINGS) if not thing],
    )  # fmt: skip
    probable = 1 / (1 + np.exp(-masks))
    sums = np.exp(classes) / np.exp(classes).sum(-1, keepdims=True)
    segments = 0
    for mask, of_queries, theirs in zip(probable, sums, expected, strict=True):
        found = segment_map(np.moveaxis(mask, 0, -1), of_queries, THINGS, size, **how)
        numbers = theirs["segmentation"].numpy().astype(int)
        label_of = {-1: IGNORED} | {x["id"]: x["label_id"] for x in theirs["segments_info"]}
        np.testing.assert_array_equal(
            [[classes_of(int(x)) for x in row] for row in found],
            [[label_of[x] for x in row] for row in numbers],
        )
        # The same things, whatever their numbers.
        pairs = {*zip(found.ravel().tolist(), numbers.ravel().tolist(), strict=True)}
        assert len(pairs) == len(np.unique(found)) == len(np.unique(numbers))
        segments += len(pairs)
    assert segments > 40


@pytest.mark.parametrize("count", [255, 256, 300, 1000])
def test_as_many_things_are_predicted_as_there_are_queries(count):
    """Label maps to learn from hold 255; what is predicted beyond those is found falsely, and joins no other."""
    row = np.full((1, count, count), 1e-6, np.float32)
    row[0, np.arange(count), np.arange(count)] = 1 - 1e-6
    classes = np.zeros((count, 3), np.float32)
    classes[:, 0] = 0.99
    found = segment_map(row, classes, (True, False), (1, count), score=0.5, overlap=0.5)
    assert things_of(found)[0].tolist() == list(range(1, count + 1)) and not classes_of(found).any()
    counts = counts_of(found, np.where(found < 2**16, found, IGNORED).astype(np.uint16), 2)
    assert counts[0, TRUE] == 255 and not counts[:, [FALSE, MISSED]].any()
    labels = np.where(found < 2**16, found, 1).astype(
        np.uint16
    )  # beyond 255 things it is all stuff
    counts = counts_of(found, labels, 2)
    assert counts[0].tolist()[1:] == [255, count - 255, 0] and counts[1, MISSED] == (count > 255)
    colors, infos = colored(found)
    ids = (colors.astype(int) * [1, 256, 2**16]).sum(-1)
    assert len(infos) == count == len(np.unique(ids)) and {i["category_id"] for i in infos} == {1}
