"""Photos as transformers' image processors prepare them, family by family; `processors` prints the table."""

import numpy as np
import pytest

from tests.interchange import processors

QUICK = ("DINOv2", "DINOv3")  # a crop, and floats
# Families whose photos are resized as a whole, then cropped: Pillow then rounds a few in another order than the part.
CROPPED = ("DeiT", "DINOv2", "CLIP")


@pytest.mark.parametrize(
    ("family", "count"),
    [(family, 1) for family in QUICK]
    + [pytest.param(family, 200, marks=pytest.mark.slow) for family in processors.FAMILIES],
)
def test_photos_are_prepared_as_by_the_processor(tmp_path, shared_data, family, count):
    photos = sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[:count]
    assert len(photos) == count
    prepared = processors.preprocessing(family, tmp_path)
    equal = []
    for photo in photos:
        decoded, of_file = processors.levels(family, prepared, photo)
        assert np.abs(decoded).max() < 1.01 or family in CROPPED, photo.name
        assert processors.psnr(decoded) > 50, photo.name
        assert processors.psnr(of_file) > 45, photo.name
        equal.append(np.mean(np.abs(decoded) < 0.01))
    # DINOv3's resizes floats, which rounds nothing; the others give whole levels.
    assert np.mean(equal) > 0.98 or family == "DINOv3"
