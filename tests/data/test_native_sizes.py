"""Sizes of images at their own aspect against timm's and transformers' rules, and batches of their patches."""

import csv
import importlib.util

import numpy as np
import pytest
from PIL import Image

from tests import lazily, without_torchvision
from vit_jax.data import native_sizes
from vit_jax.data.options import Data

siglip2 = lazily.Package("transformers.models.siglip2.image_processing_pil_siglip2")
TOKENS = (128, 256, 576, 784, 1024)


def choose_grids(sides, tokens):
    return np.array(
        [native_sizes.choose_grid(*image, patch=16, tokens=tokens) for image in sides.tolist()]
    )


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_sizes_are_those_of_timm_and_transformers(shared_data, count):
    rng = np.random.default_rng(0)
    sides = np.exp(rng.uniform(np.log(16), np.log(5000), (count, 2))).astype(int)
    photos = [
        Image.open(shared_data / "imagenet_sample" / row["file"]).size[::-1]
        for row in csv.DictReader((shared_data / "imagenet_sample" / "labels.csv").open())
    ]
    sides[: len(photos)] = photos
    sides[-3:] = (1, 10_000), (1, 1), (3000, 2)
    by_timm = None
    if importlib.util.find_spec("timm") is not None:
        without_torchvision.timm_models()
        from timm.data import naflex_transforms

        by_timm = naflex_transforms.get_image_size_for_seq
    for i, tokens in enumerate(TOKENS):
        part = sides[i :: len(TOKENS)]
        grids = choose_grids(part, tokens)
        assert grids.min() >= 1 and grids.prod(1).max() <= tokens
        for (height, width), grid in zip(part.tolist(), grids.tolist(), strict=True):
            expected = siglip2.get_image_size_for_max_num_patches(height, width, 16, tokens)
            assert (16 * grid[0], 16 * grid[1]) == expected, (height, width, tokens)
            if by_timm and max(height, width) > 8:
                assert by_timm((height, width), 16, tokens)[1] == expected


def test_photos_fill_their_patches(shared_data):
    """The shares of padding that were counted on these photos (facts §54.1)."""
    folder = shared_data / "imagenet_sample"
    sides = np.array([Image.open(path).size[::-1] for path in sorted(folder.glob("*.JPEG"))])
    for tokens, padding in zip(TOKENS, (0.084, 0.022, 0.022, 0.013, 0.027), strict=True):
        grids = choose_grids(sides, tokens)
        assert 1 - grids.prod(1).mean() / tokens == pytest.approx(padding, abs=5e-4)
    rng = np.random.default_rng(0)  # sizes around theirs
    like = sides[rng.integers(len(sides), size=500)]
    stretch, scale = np.exp(rng.normal(0, (0.025, 0.05), (500, 2))).T
    sides = np.rint(like * np.stack([scale / stretch, scale * stretch], 1)).astype(int)
    for tokens in TOKENS:
        padding = 1 - choose_grids(sides, tokens).prod(1).mean() / tokens
        assert padding < (0.09 if tokens == 128 else 0.03)


def test_an_image_becomes_its_patches_row_by_row(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 75, 3), np.uint8)
    data = Data(interpolation="bilinear")
    image = native_sizes.read_image(pixels, data, patch=4, tokens=12, name="wide")
    assert image.shape == (8, 20, 3)  # 2 x 5 patches
    expected = Image.fromarray(pixels).resize((20, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(image, np.asarray(expected))
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    content = (tmp_path / "wide.png").read_bytes()
    again = native_sizes.read_image(content, data, patch=4, tokens=12, name="wide")
    assert np.array_equal(image, again)
    batch = native_sizes.pad_batch([image], patch=4, tokens=12, rows=2, channels=3)
    assert batch.grids.tolist() == [[2, 5], [1, 1]] and batch.patches.shape == (2, 12, 48)
    assert np.array_equal(batch.patches[0, 6], image[4:8, 4:8].reshape(-1))
    assert not batch.patches[0, 10:].any() and not batch.patches[1].any()
