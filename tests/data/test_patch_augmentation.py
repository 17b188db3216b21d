"""Random changes to images at sizes of their own: those of whole images, and mixing with a neighbour by aspect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.repeats import slow_unless
from vit_jax.data.augmentation import (
    augment,
    color,
    geometry,
    patch_layout,
    patches,
    pipeline,
    randaugment,
    timm_augment,
)
from vit_jax.data.options import Augment
from vit_jax.models.contract import PatchBatch
from vit_jax.models.embeddings import cut_patches

SIDE, TOKENS = 4, 13
GRIDS = np.array([(3, 4), (1, 13), (4, 3), (2, 6), (3, 3), (12, 1), (3, 4), (2, 5)], np.int32)


def padded(images):
    """A batch of images (H, W, 3)."""
    rows = np.zeros((len(images), TOKENS, SIDE * SIDE * 3), images[0].dtype)
    grids = [(len(x) // SIDE, x.shape[1] // SIDE) for x in images]
    for row, image, grid in zip(rows, images, grids, strict=True):
        row[: grid[0] * grid[1]] = cut_patches(image[None], grid)[0]
    return PatchBatch(jnp.asarray(rows), jnp.array(grids, jnp.int32))


def images_of(batch):
    """The images (H, W, 3) of a batch; its padding is zero."""
    found = []
    for row, (h, w) in zip(np.asarray(batch.patches), np.asarray(batch.grids), strict=True):
        assert not row[h * w :].any()
        pixels = row[: h * w].reshape(h, w, SIDE, SIDE, 3).transpose(0, 2, 1, 3, 4)
        found.append(pixels.reshape(h * SIDE, w * SIDE, 3))
    return found


@pytest.mark.parametrize("mode", ["const", "rand"])
def test_erased_boxes_are_those_of_whole_images(mode):
    images = np.random.default_rng(0).normal(size=(16, 12, 16, 3)).astype(np.float32)
    config = Augment(erasing=0.7, erasing_mode=mode)
    erase = jax.jit(augment.erase, static_argnames=("probability", "mode"))
    whole = np.asarray(erase(images, jax.random.key(1), probability=0.7, mode=mode))
    assert 4 < np.sum(np.any(whole != images, (1, 2, 3))) < 16
    native = jax.jit(patches.erase, static_argnums=(2, 3))(
        padded(images), jax.random.key(1), config, 3
    )
    native = images_of(native)
    np.testing.assert_array_equal(native, whole)


def test_colours_of_patches_are_those_of_whole_images():
    """Contrast is about the mean of the image, without the padding."""
    images = np.random.default_rng(0).integers(0, 256, (6, 12, 16, 3), np.uint8)
    config = Augment(
        color_jitter=0.4, jitter=(0.4, 0.4, 0.2, 0.1), grey=0.3, solarize=0.3, flip=False
    )
    how = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}
    key = jax.random.key(2)

    @jax.jit
    def both(images, batch):
        whole = color.change_colors(images, jax.random.split(key, 5)[2], config)
        return whole, pipeline.augment(batch, {}, key, config, layout=patches.Patches(3), **how)[0]

    whole, native = both(images, padded(images))
    difference = np.abs(np.asarray(images_of(native)) - np.asarray(whole, np.float32))
    assert (
        np.mean(difference > 0.01) < 1e-3 and difference.max() < 2
    )  # means are summed in another order


POLICIES = {
    "timm": {"randaugment_kind": "timm-inc1", "randaugment_magnitude": 9, "randaugment_std": 0.5},
    "tensorflow": {"randaugment_kind": "tensorflow", "randaugment_magnitude": 25},
    "autoaugment": {"randaugment_layers": 0, "autoaugment": True},
}


@pytest.mark.parametrize("policy", slow_unless({"tensorflow"}, POLICIES))
def test_operations_are_those_of_whole_images_in_the_frame_of_each(policy):
    """With 16 images each operation is applied to one, in each layer; rounding of floats may differ."""
    config = Augment(**{"randaugment_layers": 2, **POLICIES[policy]})
    images = np.random.default_rng(5).integers(0, 256, (16, 12, 16, 3), np.uint8)
    key, mean = jax.random.key(3), (0.485, 0.456, 0.406)

    def changed(function, images):
        return jax.jit(lambda images: function(images, key, config, mean))(images)

    whole = np.asarray(changed(augment.choose_operations, images), int)
    native = images_of(changed(patches.choose_operations, padded(images)))
    assert (whole != images).any((1, 2, 3)).sum() > 8
    difference = np.abs(np.asarray(native) - whole)
    assert difference.max() <= 1 and (difference > 0).mean() < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [randaugment, timm_augment])
def test_images_of_all_grids_are_moved_as_each_alone(kind):
    """Rotated by way of their columns, where they are higher than wide."""
    random = np.random.default_rng(7)
    images = [random.integers(0, 256, (h * SIDE, w * SIDE, 3), np.uint8) for h, w in GRIDS]
    batch = padded(images)
    layout = patch_layout.PatchLayout.of(batch.grids, SIDE, TOKENS)
    strip = patch_layout.strip(batch.patches, SIDE, 3)
    fill = () if kind is randaugment else (jnp.array((1, 2, 3), jnp.uint8),)
    shear_y = geometry.with_columns(kind.shear_x)
    for function, amounts in (
        (kind.rotate, 130),
        (kind.shear_x, 0.3),
        (shear_y, 0.3),
        (kind.translate_x, 0.5),
    ):
        amounts = np.float32(amounts) * random.uniform(-1, 1, len(images)).astype(np.float32)
        moved = function(strip, amounts, *fill, layout=layout)
        moved = jnp.where(layout.inside, moved, 0)
        for i, image in enumerate(images_of(batch.replace(patches=patch_layout.patches_of(moved)))):
            tall = function is kind.rotate and len(image) > image.shape[1]
            own = images[i].swapaxes(0, 1) if tall else images[i]
            alone = function(own[None], amounts[i : i + 1] * (-1 if tall else 1), *fill)[0]
            np.testing.assert_allclose(image, alone.swapaxes(0, 1) if tall else alone, atol=0.01)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_an_image_is_mixed_with_its_neighbour_where_they_overlap(mixup, cutmix):
    random = np.random.default_rng(3)
    images = [random.uniform(1, 2, (h * SIDE, w * SIDE, 3)).astype(np.float32) for h, w in GRIDS]
    config = Augment(mixup=mixup, cutmix=cutmix)
    key, count = jax.random.key(4), len(images)
    batch, targets = patches.mix(padded(images), {"label": jnp.eye(count)}, key, config, 3)
    partners = np.asarray(patches.find_partners(jnp.asarray(GRIDS), jax.random.split(key, 6)[0]))
    kinds = set()
    for i, mixed in enumerate(images_of(batch)):
        own, other = images[i], images[partners[i]]
        h, w = np.minimum(own.shape, other.shape)[:2]
        top, left = (
            (side - part) // (2 * SIDE) * SIDE
            for side, part in zip(own.shape[:2], (h, w), strict=True)
        )
        there = (
            (side - part) // (2 * SIDE) * SIDE
            for side, part in zip(other.shape[:2], (h, w), strict=True)
        )
        from_other = np.zeros_like(own)
        y, x = there
        from_other[top : top + h, left : left + w] = other[y : y + h, x : x + w]
        shared = from_other != 0
        np.testing.assert_array_equal(mixed[~shared], own[~shared])
        taken = np.where(shared, (mixed - own) / np.where(shared, from_other - own, 1), 0)
        taken = np.where(np.abs(from_other - own) > 0.1, taken, np.nan)  # where it can be told
        share = float(targets["label"][i, i])
        assert share + float(targets["label"][i, partners[i]]) == pytest.approx(1)
        values = taken[shared & ~np.isnan(taken)]
        if np.allclose(values[(values > 1e-3)], 1, atol=1e-3):  # a box of the other's pixels
            kinds.add("cutmix")
            box = np.argwhere((mixed != own).any(-1))
            covered = 0
            if len(box):
                covered = np.prod(box.max(0) - box.min(0) + 1)
                assert covered == len(box)
            assert share == pytest.approx(1 - covered / own[..., 0].size, abs=1e-5)
        else:
            kinds.add("mixup")
            assert values.std() < 1e-3 and values.mean() <= 0.5
            assert share == pytest.approx(1 - values.mean() * h * w / own[..., 0].size, abs=1e-3)
    assert kinds <= {name for name, p in (("mixup", mixup), ("cutmix", cutmix)) if p}


def test_partners_are_pairs_of_nearly_the_same_aspect():
    random = np.random.default_rng(0)
    grids = jnp.asarray(random.integers(1, 30, (64, 2)))
    partners = np.asarray(patches.find_partners(grids, jax.random.key(0))).reshape(2, 32)
    for own, aspects in zip(
        partners, np.log(grids[:, 1] / grids[:, 0]).reshape(2, 32), strict=True
    ):
        assert (own[own] == np.arange(32)).all() and (own != np.arange(32)).all()
        rank = np.argsort(np.argsort(aspects))
        assert np.abs(rank - rank[own]).max() <= 4
    odd = np.asarray(patches.find_partners(grids[:5], jax.random.key(0)))
    assert (odd != np.arange(5)).all() and odd.max() < 5
