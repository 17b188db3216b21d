"""What augmentation costs beside the step it is a part of, by XLA's own count, and that it gathers
and scatters no images, which TPUs do slowly.

    pytest -s tests/data/test_augment_cost.py     prints the figures
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data.augmentation import pipeline, randaugment, timm_augment
from vit_jax.data.augmentation.three_augment import three_augment
from vit_jax.data.options import Augment

FILL = (124, 116, 104)
TIMM = dict(randaugment_layers=2, randaugment_magnitude=9.0, randaugment_std=0.5)
MIXED = dict(mixup=0.8, cutmix=1.0, erasing=0.25)
CONFIGS = {
    "AugReg": Augment(randaugment_layers=2, randaugment_magnitude=15.0, mixup=0.5),
    "DeiT": Augment(randaugment_kind="timm-inc1", **TIMM, **MIXED),
    "DeiT III": Augment(three_augment=True, color_jitter=0.3, mixup=0.8, cutmix=1.0),
    "AutoAugment": Augment(autoaugment=True, erasing=0.25, erasing_mode="rand"),
}
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")


def lowered(config, batch, size):
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8)
    labels = jax.ShapeDtypeStruct((batch, 1000), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def function(images, labels, key):
        return pipeline.augment(images, labels, key, config, mean=(0.5,) * 3, std=(0.5,) * 3)

    return jax.jit(function).lower(images, labels, key)


def gathered(hlo):
    """Sizes of the results of all gathers and scatters in a program's text."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* (?:gather|scatter)\(", hlo)
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in found]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_gather_or_scatter_is_as_large_as_a_channel_of_an_image(name):
    hlo = lowered(CONFIGS[name], 128, 224).as_text(dialect="hlo")
    assert "select(" in hlo and max(gathered(hlo), default=0) < 224 * 224


def test_nor_is_one_in_the_compiled_program():
    hlo = lowered(CONFIGS["DeiT"], 16, 32).compile().as_text()
    assert "fusion(" in hlo and max(gathered(hlo), default=0) < 32 * 32


def test_the_check_above_would_find_a_gather():
    def by_index(images, index):
        return images[jnp.arange(4)[:, None, None], index, index]

    shapes = jnp.zeros((4, 8, 8, 3)), jnp.zeros((4, 8, 8), int)
    assert gathered(jax.jit(by_index).lower(*shapes).as_text(dialect="hlo")) == [4 * 8 * 8 * 3]


def operations_per_image(function, *args, batch):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"] / batch


@pytest.mark.slow
def test_augmentation_costs_less_than_3_percent_of_the_step_of_vit_s16():
    """The step is 3 times the forward pass, a multiply-add counted as 2; the operations of
    RandAugment are as likely as each other.
    """
    tokens, width = 197, 384
    forward = 12 * (24 * tokens * width**2 + 4 * tokens**2 * width) + 2 * 196 * 768 * width
    step = 3 * forward

    batch = 8
    images = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.uint8)
    level = jax.ShapeDtypeStruct((batch,), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def mean(operations, *args):
        # XLA counts the body of a loop once; a shift loops over the bits of at most 224 + 2 · 113.
        costs = [
            operations_per_image(operation, *args, batch=batch) * (9 if name in GEOMETRIC else 1)
            for name, operation in operations.items()
        ]
        return np.mean(costs)

    rest = Augment(color_jitter=0.4, **MIXED)
    rest = lowered(rest, 128, 224).compile().cost_analysis()["flops"] / 128
    figures = {
        "RandAugment, 2 layers": 2 * mean(randaugment.operations(15.0), images, key),
        "timm's RandAugment, 2 layers": 2
        * mean(timm_augment.operations(FILL, increasing=True), images, level, key),
        "3-Augment": operations_per_image(three_augment, images, key, batch=batch),
        "flip, jitter, erasing, mixup, cutmix": rest,
    }
    for name, cost in figures.items():
        print(f"{name:38}{cost / 1e6:7.1f} MFLOP an image, {cost / step:.2%} of the step")
    # All of it at once, which no recipe does.
    assert sum(figures.values()) < 0.03 * step
