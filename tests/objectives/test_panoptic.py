"""EoMT on panoptic masks: single things are segments that queries learn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.objectives.test_segmentation import CLASSES, QUERIES, batch, made
from vit_jax.base.errors import ConfigError
from vit_jax.data.labels.masks import IGNORED
from vit_jax.data.labels.segments import PanopticTable
from vit_jax.objectives.segmentation import losses
from vit_jax.objectives.segmentation.segmentation import (
    Segmentation,
    SegmentationOptions,
)


def test_things_and_stuff_are_segments_and_the_largest_come_first():
    labels = jnp.asarray(
        [[[0, 0, 0, 0], [257, 257, 257, IGNORED], [513, 513, 2, IGNORED]]], jnp.uint16
    )
    segments = jax.jit(lambda labels: losses.segments(labels, CLASSES, 5, things=3))
    numbers, count = segments(labels)
    assert count.tolist() == [4] and numbers[0, :4].tolist() == [0, 257, 513, 2]


def test_of_classes_alone_panoptic_masks_are_the_case_without_things():
    random, found = np.random.default_rng(0), {}
    masks = jnp.asarray(random.normal(size=(2, 2, QUERIES, 8, 8)), jnp.float32)
    logits = jnp.asarray(random.normal(size=(2, 2, QUERIES, CLASSES + 1)), jnp.float32)
    labels = batch()["label"]
    how = dict(most=CLASSES, points=losses.Points(64), weights=losses.Weights())
    for things, given in ((0, labels), (2, labels.astype(jnp.uint16))):
        loss = jax.jit(functools.partial(losses.query_loss, things=things, **how))
        found[things] = loss(masks, logits, given, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, found[0], found[2])


def test_each_thing_has_a_query_of_its_own():
    """Queries that predict two digits of one class apart cost less than one that predicts both."""
    labels = np.zeros((1, 16, 16), np.uint16)
    labels[:, 2:7, 2:7], labels[:, 9:14, 9:14] = 1 + 256, 1 + 512
    apart = np.stack([labels == value for value in (0, 257, 513)], 1) * 20.0 - 10
    joined = np.stack([labels == 0, labels > 0, labels > 999], 1) * 20.0 - 10
    logits = np.full((1, 1, 3, 3), -10.0, np.float32)
    logits[..., [0, 1, 2], [0, 1, 1]] = 10
    how = dict(most=3, points=losses.Points(256), weights=losses.Weights(), things=3)
    loss = jax.jit(functools.partial(losses.query_loss, **how))
    total = [
        sum(loss(masks[None].astype(np.float32), logits, labels, jax.random.key(0)).values())
        for masks in (apart, joined)
    ]
    apart, joined = (float(x[0, 0]) for x in total)
    assert apart + 1 < joined, (apart, joined)


def test_an_image_of_more_segments_than_queries_is_refused_by_its_name():
    table = PanopticTable(
        tuple("abcde"), (), (), things=(True,) * 5, most=7, crowded="masks/street.png"
    )
    objective = made()
    context = dataclasses.replace(objective.context, segments=table)
    with pytest.raises(ConfigError, match=r"masks/street.png has 7 segments.*queries = 6"):
        Segmentation(objective.options, context)
    enough = dataclasses.replace(context, segments=dataclasses.replace(table, most=6))
    assert Segmentation(objective.options, enough).panoptic
    Segmentation(SegmentationOptions(head="linear"), context)  # which learns classes alone
