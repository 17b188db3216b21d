"""The learning rate at named points of published recipes (ViT Table 3 and 4, Scaling ViT §3.5)."""

import math

import numpy as np
import pytest

from vit_jax import optim
from vit_jax.base.durations import steps
from vit_jax.base.errors import ConfigError


def relative(kit, total_steps, make=optim.schedule, **fields):
    def to_steps(duration):
        return steps(
            duration, batch_size=4096, examples_per_epoch=1_281_167, total_steps=total_steps
        )

    return make(kit.config(**fields), total_steps=total_steps, to_steps=to_steps)


def at(schedule, counts):
    return np.asarray([schedule(np.int32(count)) for count in counts], np.float64)


def test_fine_tuning_cosine_rises_for_500_steps_and_ends_at_zero(kit):
    schedule = relative(kit, 20_000, lr=0.03, schedule="cosine", warmup="500 steps")
    half_way = 500 + 19_500 // 2
    last = 0.5 * (1 + math.cos(math.pi * 19_499 / 19_500))
    values = at(schedule, [0, 1, 250, 500, half_way, 500 + 19_500 // 4, 19_999, 20_000, 30_000])
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    np.testing.assert_allclose(
        values, [0, 1 / 500, 0.5, 1, 0.5, quarter, last, 0, 0], rtol=1e-5, atol=2e-7
    )


def test_pre_training_linear_ends_at_an_absolute_learning_rate(kit):
    schedule = relative(
        kit, 517_800, lr=8e-4, schedule="linear", warmup="10_000 steps", lr_end=1e-5
    )
    e = 1e-5 / 8e-4
    values = at(schedule, [0, 5_000, 10_000, 263_900, 517_800, 600_000])
    # Warm-up multiplies a shape that has not begun to fall.
    np.testing.assert_allclose(values, [0, 0.5, 1, e + (1 - e) / 2, e, e], rtol=1e-6)


def test_cosine_with_an_end_stays_above_it(kit):
    schedule = relative(kit, 100, lr=1e-3, schedule="cosine", lr_end=1e-4)
    np.testing.assert_allclose(at(schedule, [0, 50, 100]), [1, 0.55, 0.1], rtol=1e-6)


def test_the_polynomial_of_eomt_falls_by_its_power(kit):
    schedule = relative(kit, 100, lr=1e-3, schedule="polynomial", warmup="20", lr_end=1e-4)
    expected = [0, 0.5, 1, 0.1 + 0.9 * 0.5**0.9, 0.1 + 0.9 * 0.25**0.9, 0.1, 0.1]
    np.testing.assert_allclose(at(schedule, [0, 10, 20, 60, 80, 100, 120]), expected, rtol=1e-6)
    squared = relative(kit, 100, schedule="polynomial", power=2.0)
    np.testing.assert_allclose(at(squared, [0, 50, 100]), [1, 0.25, 0], rtol=1e-6)


def test_late_parameters_rest_in_the_warmup_and_then_have_their_own(kit):
    """The two-stage warm-up of EoMT, of 500 and 1,000 steps of 10,000."""
    fields = dict(schedule="polynomial", warmup="500", late=(".*",), late_warmup="1000")
    schedule = relative(kit, 10_000, optim.late_schedule, **fields)
    half = 0.5**0.9
    counts = [0, 499, 500, 1000, 1500, 1500 + 8500 // 2, 10_000]
    np.testing.assert_allclose(at(schedule, counts), [0, 0, 0, 0.5, 1, half, 0], rtol=1e-5)


def test_rsqrt_of_scaling_vit_warms_up_decays_and_cools_down(kit):
    schedule = relative(
        kit,
        1_000_000,
        lr=8e-4,
        schedule="rsqrt",
        warmup="10_000",
        timescale="10_000",
        cooldown="50_000",
    )
    counts = [0, 5_000, 10_000, 20_000, 40_000, 950_000, 975_000, 1_000_000]
    # 1/sqrt(1 + (t - 10k)/10k) = 1/sqrt(t/10k).
    expected = [0, 0.5, 1, 1 / math.sqrt(2), 0.5, 1 / math.sqrt(95), 0.5 / math.sqrt(97.5), 0]
    np.testing.assert_allclose(at(schedule, counts), expected, rtol=1e-6)


def test_constant_is_one_between_warmup_and_cooldown_in_any_unit(kit):
    schedule = relative(kit, 1000, schedule="constant", warmup="10%", cooldown="819_200 examples")
    np.testing.assert_allclose(
        at(schedule, [0, 50, 100, 800, 900, 1000]), [0, 0.5, 1, 1, 0.5, 0], rtol=1e-6
    )


def test_the_staircase_of_bit_falls_by_ten_at_its_boundaries_in_any_unit(kit):
    stairs = {
        "schedule": "staircase",
        "warmup": "500",
        "boundaries": ("30%", "6000", "36_864_000 examples"),
    }
    schedule = relative(kit, 10_000, **stairs)
    counts = [0, 250, 500, 2999, 3000, 5999, 6000, 8999, 9000, 10_000]
    expected = [0, 0.5, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    np.testing.assert_allclose(at(schedule, counts), expected, rtol=1e-5)
    halved = relative(kit, 100, schedule="staircase", boundaries=("50%",), factor=0.5)
    np.testing.assert_allclose(at(halved, [0, 49, 50, 99]), [1, 1, 0.5, 0.5])


def test_without_warmup_the_first_update_has_the_peak(kit):
    assert relative(kit, 100, schedule="cosine")(0) == 1


def test_a_warmup_as_long_as_the_run_is_fine(kit):
    np.testing.assert_allclose(
        at(relative(kit, 10, schedule="cosine", warmup="10"), [0, 5, 9]), [0, 0.5, 0.9], rtol=1e-6
    )


def test_the_schedule_is_float32_and_never_leaves_the_unit_interval(kit):
    schedule = relative(kit, 50, schedule="linear", warmup="5", lr=1e-3, lr_end=1e-5)
    values = schedule(np.arange(60))
    assert values.dtype == np.float32 and values.min() >= 0 and values.max() <= 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(schedule="cosin"), "did you mean 'cosine'"),
        (dict(schedule="cosine", cooldown="5"), "cooldown has no use with the cosine schedule"),
        (dict(schedule="rsqrt", lr_end=1e-5), "lr_end has no use with the rsqrt schedule"),
        (dict(schedule="linear", lr=1e-3, lr_end=0.01), "lr_end = 0.01 is above the peak"),
        (dict(schedule="rsqrt", timescale="0"), "timescale = '0' must be at least one step"),
        (dict(warmup="60", cooldown="50"), "60 [+] 50 steps, more than the 100"),
        (dict(schedule="polynomial", cooldown="5"), "has no use with the polynomial schedule"),
        (dict(schedule="staircase"), "the staircase schedule needs them"),
        (dict(schedule="cosine", boundaries=("50%",)), "no other uses them"),
        (
            dict(schedule="staircase", boundaries=("60%", "30%")),
            "are steps .60, 30.: they must",
        ),
        (dict(schedule="staircase", boundaries=("5",), warmup="10"), "from the end of warm-up .10"),
        (dict(schedule="staircase", boundaries=("100",)), "that of the run .100"),
        (dict(schedule="staircase", boundaries=("soon",)), "optim.boundaries: 'soon' is not a dur"),
        (dict(schedule="staircase", boundaries=("50%",), cooldown="5"), "cooldown has no use with"),
        (dict(schedule="staircase", boundaries=("50%",), lr_end=1e-5), "lr_end has no use with"),
        (dict(warmup="5 parsecs"), "config.optim.warmup: '5 parsecs' is not a duration"),
    ],
)
def test_what_makes_no_sense_is_an_error_naming_the_field(kit, fields, message):
    with pytest.raises(ConfigError, match=message):
        relative(kit, 100, **fields)
