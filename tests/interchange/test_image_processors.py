"""Photos as transformers' image processors prepare them, family by family; `processors` prints the table."""

import numpy as np
import pytest

from tests.interchange import processors

QUICK = ("DINOv2", "DINOv3")  # a crop, and floats


@pytest.mark.parametrize(
    ("family", "count"),
    [(family, 1) for family in QUICK]
    + [pytest.param(family, 200, marks=pytest.mark.slow) for family in processors.FAMILIES],
)
def test_photos_are_prepared_as_by_the_processor(tmp_path, shared_data, family, count):
    photos = sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[:count]
    prepared = processors.preprocessing(family, tmp_path)
    # DINOv3's resizes floats, which rounds nothing; the others give whole levels.
    share = 0.0 if family == "DINOv3" else 0.999
    for photo in photos:
        decoded, of_file = processors.levels(family, prepared, photo)
        assert np.abs(decoded).max() < 1.01, photo.name
        assert np.mean(np.abs(decoded) < 0.01) >= share, photo.name
        assert processors.psnr(of_file) > 40, photo.name
    assert len(photos) == count
