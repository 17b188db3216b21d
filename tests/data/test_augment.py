"""Augmentation against NumPy in float64 on the values drawn, and by what must hold for any draw."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.repeats import slow_unless
from vit_jax.base.errors import ConfigError
from vit_jax.data.augmentation import augment as aug
from vit_jax.data.augmentation import pipeline
from vit_jax.data.augmentation.color import change_colors
from vit_jax.data.options import Augment, Data

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NOTHING = Augment(flip=False)
EVERYTHING = Augment(color_jitter=0.4, randaugment_layers=1, mixup=0.8, cutmix=1.0, erasing=0.25)
BATCH = 128


@pytest.fixture(scope="module")
def batch():
    """Images (128, 16, 20, 3) uint8 and one-hot labels (128, 10)."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (BATCH, 16, 20, 3), np.uint8)
    return images, np.eye(10, dtype=np.float32)[rng.integers(0, 10, BATCH)]


@pytest.fixture(scope="module")
def everything():
    """The step's augmentation with everything on, compiled."""

    def function(images, labels, key):
        return pipeline.augment(images, labels, key, EVERYTHING, mean=MEAN, std=STD)

    return jax.jit(function)


def test_with_everything_off_only_normalisation_is_left(batch):
    images, labels = batch
    out, out_labels = pipeline.augment(
        images, labels, jax.random.key(0), NOTHING, mean=MEAN, std=STD
    )
    np.testing.assert_allclose(out, (images / 255.0 - MEAN) / STD, atol=2e-6)
    np.testing.assert_array_equal(out, aug.normalize(images, MEAN, STD, jnp.float32))
    np.testing.assert_array_equal(out_labels, labels)


def test_normalize_takes_floats_too_and_computes_in_float32(batch):
    images, _ = batch
    half = (0.5, 0.5, 0.5)
    out = aug.normalize(images, half, half, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16 and out.min() == -1 and out.max() == 1
    exact = jnp.asarray(images / 127.5 - 1, jnp.float32).astype(jnp.bfloat16)
    assert (np.asarray(out) == np.asarray(exact)).mean() > 0.999
    np.testing.assert_array_equal(
        out, aug.normalize(images.astype(np.float32), half, half, jnp.bfloat16)
    )


def test_float_images_are_refused_by_augment(batch):
    with pytest.raises(ValueError, match="uint8 images, not float32"):
        pipeline.augment(
            batch[0].astype(np.float32), batch[1], jax.random.key(0), NOTHING, mean=MEAN, std=STD
        )


def test_flip_mirrors_about_half_of_the_images_and_leaves_the_others(batch):
    images, _ = batch
    out = np.asarray(aug.flip(images, jax.random.key(0)))
    mirrored = (out == images[:, :, ::-1]).all((1, 2, 3))
    assert (mirrored ^ (out == images).all((1, 2, 3))).all()
    assert scipy.stats.binomtest(int(mirrored.sum()), BATCH, 0.5).pvalue > 0.001


@pytest.mark.parametrize("strength", [0.3, 1.5])
def test_color_jitter_equals_float64_formulas(batch, strength):
    images, _ = batch
    key = jax.random.key(0)
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = np.asarray(jax.random.uniform(key, (3, BATCH, 1, 1, 1), minval=low, maxval=high))
    luma = np.array([0.2989, 0.587, 0.114])
    expected = np.clip(images * factors[0].astype(np.float64), 0, 255)
    grey = (expected @ luma).mean((1, 2))[:, None, None, None]
    expected = np.clip(grey * (1 - factors[1]) + expected * factors[1], 0, 255)
    grey = (expected @ luma)[..., None]
    expected = np.clip(grey * (1 - factors[2]) + expected * factors[2], 0, 255)
    config = dataclasses.replace(NOTHING, color_jitter=strength)
    jittered = jax.jit(change_colors, static_argnums=2)(images, key, config)
    np.testing.assert_allclose(jittered, expected, atol=1e-3)


def boxes(mask):
    """(N, H, W) bool -> heights and widths of the true regions, which must be full rectangles."""
    height, width = mask.any(2).sum(1), mask.any(1).sum(1)
    np.testing.assert_array_equal(height * width, mask.sum((1, 2)))
    return height, width


def test_erasing_puts_noise_into_boxes_of_the_published_sizes():
    images = np.full((1000, 40, 40, 3), 100, np.float32)
    out = np.asarray(jax.jit(aug.erase, static_argnums=2)(images, jax.random.key(0), 0.25))
    mask = (out != 100).all(-1)
    np.testing.assert_array_equal(mask, (out != 100).any(-1))
    erased = mask.any((1, 2))
    assert scipy.stats.binomtest(int(erased.sum()), 1000, 0.25).pvalue > 0.001
    height, width = boxes(mask[erased])
    # Sizes are whole pixels: half a pixel of each side is allowed for.
    assert ((height + 0.5) * (width + 0.5) >= 0.02 * 1600).all()
    assert ((height - 0.5) * (width - 0.5) <= 1600 / 3).all()
    assert ((height + 0.5) / (width - 0.5) >= 0.3).all() and (
        (width + 0.5) / (height - 0.5) >= 0.3
    ).all()
    assert scipy.stats.kstest(out[mask].ravel()[:20000], "norm").pvalue > 0.001


def test_erased_area_and_place_are_distributed_as_in_numpy_loops():
    images = np.full((1000, 40, 40, 1), 100, np.float32)
    out = jax.jit(aug.erase, static_argnums=2)(images, jax.random.key(1), 1.0)
    mask = (np.asarray(out) != 100)[..., 0]
    rng, expected = np.random.default_rng(0), np.zeros((1000, 40, 40), bool)
    for image in expected:
        for _ in range(10):
            area = rng.uniform(0.02, 1 / 3) * 1600
            aspect = np.exp(rng.uniform(np.log(0.3), np.log(1 / 0.3)))
            height, width = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
            if height < 40 and width < 40:
                top, left = rng.integers(0, 40 - height + 1), rng.integers(0, 40 - width + 1)
                image[top : top + height, left : left + width] = True
                break
    for statistic in (
        lambda m: m.sum((1, 2)),
        lambda m: m.any(2).argmax(1),
        lambda m: m.any(1).argmax(1),
    ):
        assert scipy.stats.ks_2samp(statistic(mask), statistic(expected)).pvalue > 0.001
    np.testing.assert_allclose(mask.mean(0), expected.mean(0), atol=0.09)


def test_erasing_fills_with_one_colour_or_the_mean_and_keeps_to_area_and_aspect():
    images = np.full((500, 40, 60, 3), 100, np.float32)
    erase = jax.jit(aug.erase, static_argnames=("probability", "mode", "area", "aspect"))
    limits = dict(probability=1.0, area=(0.1, 0.2), aspect=0.5)
    for mode in ("rand", "const"):
        out = np.asarray(erase(images, jax.random.key(0), mode=mode, **limits))
        mask = (out != 100).any(-1)
        height, width = boxes(mask)
        assert ((height + 0.5) * (width + 0.5) >= 0.1 * 2400).all()
        assert ((height - 0.5) * (width - 0.5) <= 0.2 * 2400).all()
        assert ((height + 0.5) / (width - 0.5) >= 0.5).all()
        assert ((width + 0.5) / (height - 0.5) >= 0.5).all()
        filled = [np.unique(image[box], axis=0) for image, box in zip(out, mask, strict=True)]
        assert all(len(colours) == 1 for colours in filled)
        if mode == "const":
            assert not np.concatenate(filled).any()
        else:
            assert scipy.stats.kstest(np.concatenate(filled).ravel(), "norm").pvalue > 0.001


@pytest.mark.parametrize(
    "values, message",
    [
        ({"randaugment_std": 0.5}, "magnitudes of randaugment_kind='tensorflow' are fixed"),
        ({"erasing_area": (0.5, 0.1)}, "erasing_area = .* must be two rising shares"),
        ({"erasing_aspect": 0.0}, "erasing_aspect = 0.0 must be above 0"),
    ],
)
def test_what_contradicts_itself_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        pipeline.check_augmentation(dataclasses.replace(NOTHING, **values), 3)


@pytest.mark.parametrize(
    "values, off",
    [
        ({"color_jitter": 0.4}, "0.0"),
        ({"randaugment_layers": 2}, "0"),
        ({"autoaugment": True}, "False"),
        ({"three_augment": True}, "False"),
    ],
)
def test_what_changes_colours_is_refused_for_images_without_them(values, off):
    config = dataclasses.replace(NOTHING, **values)
    pipeline.check_augmentation(config, 3)
    (name,) = values
    message = f"config.augment.{name} changes the colours of RGB .* is 13: set it to {off}$"
    with pytest.raises(ConfigError, match=message):
        pipeline.check_augmentation(config, 13)


@pytest.mark.parametrize("channels", slow_unless([5], [1, 5]))
def test_what_does_not_change_colours_suits_any_number_of_channels(channels):
    images = np.random.default_rng(0).integers(0, 256, (8, 12, 10, channels), np.uint8)
    config = Augment(mixup=0.8, cutmix=1.0, erasing=0.5, erasing_mode="rand")
    pipeline.check_augmentation(config, channels)
    data = aug.with_channels(Data(channels=channels))
    labels = np.eye(8, dtype=np.float32)
    augment = jax.jit(pipeline.augment, static_argnums=3, static_argnames=("mean", "std"))
    out, _ = augment(images, labels, jax.random.key(0), config, mean=data.mean, std=data.std)
    assert out.shape == images.shape and np.isfinite(out).all()


def test_mean_and_std_are_one_number_for_each_channel_or_one_for_all():
    assert aug.with_channels(Data()) == Data()
    assert aug.with_channels(Data(mean=(0.4,))).mean == (0.4, 0.4, 0.4)
    five = aug.with_channels(Data(channels=5, std=(0.1, 0.2, 0.3, 0.4, 0.5)))
    assert five.mean == (0.5,) * 5 and five.std == (0.1, 0.2, 0.3, 0.4, 0.5)
    message = r"config.data.mean = \(0.1, 0.2, 0.3\) has 3 numbers, and config.data.channels is 5: give one"
    with pytest.raises(ConfigError, match=message):
        aug.with_channels(Data(channels=5, mean=(0.1, 0.2, 0.3)))


@pytest.mark.parametrize(
    "values, function",
    [
        (
            {"randaugment_layers": 2, "randaugment_magnitude": 9.0, "randaugment_std": 0.5}
            | {"randaugment_kind": "timm-inc1"},
            "timm_randaugment",
        ),
        ({"autoaugment": True}, "autoaugment"),
        ({"three_augment": True}, "three_augment"),
    ],
)
def test_the_config_chooses_among_the_families(batch, monkeypatch, values, function):
    called = {}

    def note(images, key, *args, **kwargs):
        called[function] = (args, kwargs)
        return 255 - images

    monkeypatch.setitem(aug.POLICIES, function, note)
    config = dataclasses.replace(NOTHING, **values)
    out, _ = pipeline.augment(*batch, jax.random.key(0), config, mean=MEAN, std=STD)
    np.testing.assert_array_equal(out, aug.normalize(255 - batch[0], MEAN, STD, jnp.float32))
    ((args, kwargs),) = called.values()
    if function != "three_augment":
        assert kwargs["fill"] == (124, 116, 104)
    if function == "timm_randaugment":
        assert args == (2, 9.0) and kwargs["std"] == 0.5 and kwargs["increasing"]


def shares(mixup, cutmix, switch, size=(24, 36), number=2000):
    keys = jax.random.split(jax.random.key(0), number)
    return np.asarray(
        jax.jit(jax.vmap(lambda k: aug.own_share(k, size, mixup, cutmix, switch)))(keys)
    )


@pytest.mark.parametrize("p", [0.2, 0.8])
def test_mixup_draws_the_larger_part_of_a_beta_variable_for_the_whole_batch(p):
    own = shares(p, 0.0, 0.5)
    assert (own == own[:, :1, :1]).all() and own.min() >= 0.5 and own.max() <= 1
    beta = scipy.stats.beta(p, p)
    assert scipy.stats.kstest(own[:, 0, 0], lambda a: beta.cdf(a) - beta.cdf(1 - a)).pvalue > 0.001


def test_cutmix_cuts_boxes_distributed_as_in_numpy_loops():
    own = shares(0.0, 1.0, 0.5)
    assert set(np.unique(own)) == {0.0, 1.0}
    boxes(own == 0)
    rng, expected = np.random.default_rng(0), []
    for _ in range(2000):
        side = np.sqrt(1 - rng.beta(1.0, 1.0))
        high, wide = int(24 * side) // 2, int(36 * side) // 2
        y, x = rng.integers(24), rng.integers(36)
        mask = np.ones((24, 36))
        mask[max(y - high, 0) : y + high, max(x - wide, 0) : x + wide] = 0
        expected.append(mask)
    assert scipy.stats.ks_2samp(own.mean((1, 2)), np.mean(expected, (1, 2))).pvalue > 0.001
    np.testing.assert_allclose(own.mean(0), np.mean(expected, 0), atol=0.06)


@pytest.mark.parametrize("switch", slow_unless([0.3], [0.0, 0.3, 1.0]))
def test_with_both_the_switch_is_the_probability_of_cutmix(switch):
    own = shares(10.0, 10.0, switch)
    is_cutmix = ((own == 0) | (own == 1)).all((1, 2))
    assert scipy.stats.binomtest(int(is_cutmix.sum()), 2000, switch).pvalue > 0.001


def test_mix_takes_the_previous_example_and_mixes_labels_as_pixels(batch):
    images, labels = batch
    own = np.random.default_rng(0).random((16, 20)).astype(np.float32)
    out, out_labels = aug.mix(
        jnp.asarray(images, jnp.float32), jnp.asarray(labels), jnp.asarray(own)
    )
    partner = [(i - 1) % BATCH for i in range(BATCH)]
    weight = own.astype(np.float64)[..., None]
    np.testing.assert_allclose(out, weight * images + (1 - weight) * images[partner], atol=1e-3)
    np.testing.assert_allclose(
        out_labels, own.mean() * labels + (1 - own.mean()) * labels[partner], atol=1e-6
    )


@pytest.mark.parametrize("config", [{"mixup": 0.5}, {"cutmix": 1.0}], ids=["mixup", "cutmix"])
def test_label_mass_equals_pixel_mass(config):
    """Images whose three channels hold the label: the mean colour of the result must be the
    resulting label.
    """
    labels = np.eye(3, dtype=np.float32)[[0, 1, 2, 2, 1, 0, 0, 2]]
    images = np.broadcast_to(255 * labels[:, None, None], (8, 21, 18, 3)).astype(np.uint8)
    config = dataclasses.replace(NOTHING, **config)
    out, out_labels = pipeline.augment(
        images, labels, jax.random.key(0), config, mean=(0, 0, 0), std=(1, 1, 1)
    )
    np.testing.assert_allclose(out.mean((1, 2)), out_labels, atol=1e-5)
    np.testing.assert_allclose(out_labels.sum(1), 1, atol=1e-6)
    assert not np.allclose(out_labels, labels)


def test_images_are_in_the_normalised_range_and_of_the_dtype_asked_for(batch):
    config = dataclasses.replace(EVERYTHING, erasing=0.0)
    function = jax.jit(
        lambda batch, key: pipeline.augment(
            *batch, key, config, mean=MEAN, std=STD, dtype=jnp.bfloat16
        )
    )
    out, labels = function(batch, jax.random.key(0))
    assert out.dtype == jnp.bfloat16 and labels.dtype == jnp.float32 and out.shape == batch[0].shape
    out = np.asarray(out, np.float64)
    low, high = (np.array([0, 1])[:, None] - MEAN) / STD
    assert (out >= low - 0.01).all() and (out <= high + 0.01).all()


def test_equal_keys_give_equal_batches_other_keys_others_and_one_program_serves_all(
    batch, everything
):
    first, first_labels = everything(*batch, jax.random.key(7))
    again, again_labels = everything(*batch, jax.random.key(7))
    other, other_labels = everything(*batch, jax.random.key(8))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first_labels, again_labels)
    assert (np.asarray(first) != np.asarray(other)).mean() > 0.5
    assert (np.asarray(first_labels) != np.asarray(other_labels)).any()
    assert np.isfinite(first).all() and everything._cache_size() == 1


def test_switching_one_operation_off_leaves_the_draws_of_the_others(batch):
    images, labels = batch
    only_flip = pipeline.augment(images, labels, jax.random.key(0), Augment(), mean=MEAN, std=STD)[
        0
    ]
    erased = pipeline.augment(
        images, labels, jax.random.key(0), Augment(erasing=1.0), mean=MEAN, std=STD
    )[0]
    same = (np.asarray(erased) == np.asarray(only_flip)).all(-1).mean((1, 2))
    assert (same > 0.5).all() and (same < 1).all()


def test_a_batch_sharded_over_eight_devices_gives_the_same_result(batch, everything):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    images, labels = (jax.device_put(x, sharding) for x in batch)
    out, out_labels = everything(images, labels, jax.random.key(7))
    expected, expected_labels = everything(*batch, jax.random.key(7))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(out_labels, expected_labels, atol=1e-6)
    assert out.sharding.is_equivalent_to(sharding, out.ndim)
