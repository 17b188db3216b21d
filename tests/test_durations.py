"""Durations in steps; the figures of published recipes are facts about their data sets' sizes."""

import pytest

from vit_jax.base.durations import normal, steps
from vit_jax.base.errors import ConfigError

IMAGENET = 1_281_167


def imagenet(duration, total_steps=None):
    return steps(duration, batch_size=4096, examples_per_epoch=IMAGENET, total_steps=total_steps)


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        ("500", 500),
        (500, 500),
        ("500 steps", 500),
        ("1 step", 1),
        ("10_000 steps", 10_000),
        ("1e6 examples", 244),  # 244.14
        ("1 example", 1),
        ("0", 0),
        (0, 0),
        ("0 epochs", 0),
        ("300 epochs", 93_835),  # 93,835.47; ViT Table 3: about 93.8k
        ("1 epoch", 313),  # 312.8
        ("0.5epochs", 156),  # 156.4
        (" 90 Epochs ", 28_151),  # 28,150.6
        ("1e-9 epochs", 1),
        ("1 epoch, at least 100 steps", 313),
        ("1 epoch, at least 500 steps", 500),
    ],
)
def test_any_unit_becomes_steps(duration, expected):
    assert imagenet(duration) == expected


@pytest.mark.parametrize(
    "same",
    [
        ("40 steps", "40steps", " 40 Step ", "40", 40, "4e1 steps", "4_0 steps"),
        ("2 epochs", "2epochs", "2 epoch", "2.0 epochs"),
        ("5%", "5 %", "5 percent"),
        ("10 epochs, at least 300 steps", "300, at least 10epochs"),
        ("0 steps", "0", 0, "0 epochs"),
    ],
)
def test_all_spellings_of_a_duration_have_one_normal_form_that_is_the_same_duration(same):
    (form,) = set(map(normal, same))
    assert normal(form) == form
    assert imagenet(form, 5000) == imagenet(same[0], 5000)


def test_durations_that_differ_have_other_normal_forms():
    other = ("1 steps", "2 steps", "1 epochs", "1 examples", "1%", "1.5 epochs")
    assert len(set(map(normal, other))) == len(other)


@pytest.mark.parametrize(
    ("duration", "expected"),
    [("5%", 500), ("5 %", 500), ("2.5 percent", 250), ("100%", 10_000), ("0%", 0)],
)
def test_percent_is_of_the_whole_run(duration, expected):
    assert imagenet(duration, total_steps=10_000) == expected


def test_halves_round_up_and_nothing_positive_becomes_zero():
    assert steps("15 examples", batch_size=10, examples_per_epoch=None) == 2
    assert steps("25 examples", batch_size=10, examples_per_epoch=None) == 3
    assert steps("1 example", batch_size=10, examples_per_epoch=None) == 1
    assert imagenet("1%", total_steps=10) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "soon",
        "-5 steps",
        "5 minutes",
        "steps",
        "1.5.2",
        "nan",
        "inf epochs",
        "1e999 steps",
        "5 steps 3",
        "_5",
        "1 epoch, at least soon",
        "1 epoch, at least 2 steps, at least 3 steps",
    ],
)
def test_anything_else_is_an_error_that_says_what_is_valid(wrong):
    with pytest.raises(
        ConfigError, match="is not a duration; write for example '500 steps', '90 epochs'"
    ):
        imagenet(wrong)


def test_epochs_of_a_set_of_unknown_size_are_an_error():
    with pytest.raises(ConfigError, match="'2 epochs': the size of the training set is not known"):
        steps("2 epochs", batch_size=8, examples_per_epoch=None)


def test_a_share_of_no_total_is_an_error():
    with pytest.raises(ConfigError, match="'5%': there is no whole"):
        imagenet("5%")
