"""Damaged files: an image, or `BadImage`, and nothing else, from every decoder."""

import numpy as np
import pytest

from tests.data.damage import damaged, whole_files
from vit_jax.data import decode
from vit_jax.data.options import Data

FILES = whole_files()


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("compiled", [True, False])
def test_of_a_damaged_file_comes_an_image_or_a_bad_image(monkeypatch, kind, compiled):
    if compiled and not decode.is_native():
        pytest.skip("the compiled part is not installed")
    if not compiled:
        monkeypatch.setattr(decode, "_native", None)
    channels = 5 if "5" in kind or kind == "npy" else 3
    settings = [
        Data(image_size=9, eval_crop="resize", channels=channels),
        Data(image_size=(30, 20), eval_resize=32, channels=channels, interpolation="bicubic"),
    ]
    decode.eval_crop(FILES[kind], settings[0], name="x")
    refused, random = 0, np.random.default_rng(0)
    for i, file in enumerate(damaged(FILES[kind], 60, random)):
        try:
            crop = decode.eval_crop(file, settings[i % 2], name="x")
            assert crop.dtype == np.uint8 and crop.shape[2] == channels
        except decode.BadImage as error:
            refused += 1
            assert len(str(error)) < 500, error
    assert refused
