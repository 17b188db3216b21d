"""The compiled part against Pillow; each test says what was left out where the install has no such
part. The tests of `decode` hold with it and without.
"""

import dataclasses
import io
import itertools

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.config import default_config
from vit_jax.data import crops, decode
from vit_jax.data.options import Data

native = decode._native
if native is None:
    pytest.skip("the compiled part is not installed", allow_module_level=True)
FULL = 1e9  # never decode at a smaller size


def photo(height, width, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (height // 9 + 2, width // 9 + 2, 3))
    return Image.fromarray(noise.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **{"quality": 92, **options})
    return file.getvalue()


def decoded(file):
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def cut(file, box, shape, inside=True, spare=FULL):
    out = np.zeros((*shape, 3), np.uint8)
    assert native.cut_jpeg(file, box, inside, spare, False, out)
    return out


def assert_as_pillow(found, whole):
    """Pillow's decoder rounds after the transform, between samples and after the change of colours,
    in which 1.77 times an error of blue-difference is added: 1.77 * (0.5 + 0.5) + 0.5 + 0.5. Ours
    rounds at the end.
    """
    difference = np.abs(found.astype(int) - whole)
    assert difference.max() <= 3 and difference.mean() < 0.75


def psnr(a, b):
    return 10 * np.log10(255**2 / max(np.mean((a.astype(np.float64) - b) ** 2), 1e-3))


def cubic(x):
    """Keys' cubic convolution (1981) with a = -1/2."""
    a = -0.5
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def filter_matrix(low, high, length, size, inside, is_cubic):
    """(size, length) float64 weights of the antialiased filter of [low, high)."""
    scale = (high - low) / size
    centres = low + (np.arange(size)[:, None] + 0.5) * scale - 0.5
    x = np.abs(np.arange(length) - centres) / max(scale, 1)
    weights = cubic(x) if is_cubic else np.maximum(0, 1 - x)
    if inside:
        weights[:, : int(low)] = weights[:, int(np.ceil(high)) :] = 0
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("height, width", [(97, 131), (16, 16), (240, 17), (1, 1), (8, 300)])
def test_every_part_is_decoded_as_pillow_decodes_the_whole(height, width, subsampling):
    file = jpeg(photo(height, width), subsampling=subsampling)
    whole, random = decoded(file), np.random.default_rng(0)
    for _ in range(20):
        tall, wide = random.integers(1, height + 1), random.integers(1, width + 1)
        top, left = random.integers(height - tall + 1), random.integers(width - wide + 1)
        box = (top, left, top + tall, left + wide)
        found = cut(file, box, (tall, wide))
        assert_as_pillow(found, whole[top : top + tall, left : left + wide])


def with_factors(image, factors):
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors]
    return cv2.imencode(".jpg", np.asarray(image)[..., ::-1], options)[1].tobytes()


IMAGE = photo(90, 120)
KINDS = {
    "grey": jpeg(IMAGE.convert("L")),
    "a mark after each row": jpeg(IMAGE, restart_marker_rows=1),
    "a mark after each third unit": jpeg(IMAGE, restart_marker_blocks=3),
    "codes made for it": jpeg(IMAGE, optimize=True),
    "16-bit quantizers": jpeg(IMAGE, qtables=[[300] * 64, [260] * 64]),
    "quality 100": jpeg(IMAGE, quality=100),
    "4:1:1": with_factors(IMAGE, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411),
    "4:4:0": with_factors(IMAGE, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_plain_kinds_are_decoded_too(kind):
    for top, left, bottom, right in ((10, 20, 80, 110), (71, 5, 90, 60), (0, 0, 90, 120)):
        found = cut(KINDS[kind], (top, left, bottom, right), (bottom - top, right - left))
        assert_as_pillow(found, decoded(KINDS[kind])[top:bottom, left:right])


def test_a_missing_or_wrong_restart_mark_is_noticed():
    file = KINDS["a mark after each row"]
    mark = file.index(b"\xff\xd2")
    out = np.zeros((8, 8, 3), np.uint8)
    for damaged in (file[:mark] + file[mark + 2 :], file[:mark] + b"\xff\xd5" + file[mark + 2 :]):
        assert not native.cut_jpeg(damaged, (0, 0, 90, 120), True, FULL, False, out)
        assert not native.cut_jpeg(damaged, (70, 0, 90, 120), True, FULL, False, out)  # jumped over
        assert native.cut_jpeg(damaged, (0, 0, 16, 120), True, FULL, False, out)  # not reached


@pytest.mark.parametrize("is_cubic", [False, True])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "box", [(0, 0, 60, 80), (7, 3, 50, 71), (10.25, 5.5, 41.75, 60.125), (20, 30, 25, 34)]
)
@pytest.mark.parametrize("shape", [(20, 20), (33, 47), (60, 80), (150, 9), (2, 2)])
def test_pixels_are_resized_with_the_antialiased_filter(box, shape, inside, is_cubic):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    out = np.zeros((*shape, 3), np.uint8)
    assert native.cut_pixels(pixels, box, inside, is_cubic, out)
    down = filter_matrix(box[0], box[2], 60, shape[0], inside, is_cubic)
    across = filter_matrix(box[1], box[3], 80, shape[1], inside, is_cubic)
    exact = np.clip(np.einsum("yi,xj,ijc->yxc", down, across, pixels, optimize=True), 0, 255)
    assert np.abs(out - exact).max() < 0.55  # half for rounding


def test_what_is_outside_the_pixels_is_refused():
    pixels, out = np.zeros((10, 10, 3), np.uint8), np.zeros((4, 4, 3), np.uint8)
    for box in [(-1, 0, 5, 5), (0, 0, 11, 5), (5, 5, 5, 8), (0, np.nan, 5, 5), (6, 0, 5, 5)]:
        assert not native.cut_pixels(pixels, box, True, False, out)


def test_pictures_of_another_kind_are_refused():
    pixels, box = np.zeros((10, 10, 3), np.uint8), (0, 0, 10, 10)
    for out in (
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 17), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
    ):
        with pytest.raises(ValueError, match="a picture must be"):
            native.cut_pixels(pixels, box, True, False, out)
    with pytest.raises(ValueError, match="a picture must be"):
        native.cut_pixels(pixels, box, True, False, np.zeros((4, 4, 3), np.float32))
    with pytest.raises(ValueError, match="as many channels"):
        native.cut_pixels(pixels, box, True, False, np.zeros((4, 4, 4), np.uint8))
    with pytest.raises(ValueError, match="not C-contiguous"):
        native.cut_pixels(pixels, box, True, False, np.zeros((4, 8, 3), np.uint8)[:, ::2])


def test_large_parts_are_decoded_at_a_fraction_of_their_size():
    file = jpeg(photo(1200, 1600))
    box = (100, 200, 1100, 1500)
    exact = decoded(file)[100:1100, 200:1500]
    exact = np.asarray(Image.fromarray(exact).resize((96, 96), Image.Resampling.BILINEAR))
    assert psnr(cut(file, box, (96, 96)), exact) > 50
    assert psnr(cut(file, box, (96, 96), spare=1.5), exact) > 45


def turned(orientation, order):
    exif = Image.Exif()
    exif.endian = order
    exif[0x0110], exif[0x0112] = "a camera", orientation
    return jpeg(photo(30, 40), exif=exif)


@pytest.mark.parametrize("order", ["<", ">"])
def test_upright_files_are_plain_and_turned_ones_are_not(order):
    assert native.plain_jpeg_size(turned(1, order)) == (30, 40)
    assert native.plain_jpeg_size(turned(6, order)) is None


def test_progressive_cmyk_and_other_formats_are_left_to_others():
    png = io.BytesIO()
    photo(30, 40).save(png, "PNG")
    assert native.plain_jpeg_size(jpeg(photo(30, 40), progressive=True)) is None
    assert native.plain_jpeg_size(png.getvalue()) is None
    assert native.plain_jpeg_size(b"") is None
    cmyk, out = jpeg(photo(30, 40).convert("CMYK")), np.zeros((8, 8, 3), np.uint8)
    assert not native.cut_jpeg(cmyk, (0, 0, 30, 40), True, FULL, False, out)


def test_no_damage_does_more_than_being_refused():
    file, random = jpeg(photo(60, 80), exif=Image.Exif().tobytes()), np.random.default_rng(0)
    out = np.zeros((16, 16, 3), np.uint8)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(file)
        for place in random.integers(len(file) if random.random() < 0.5 else 600, size=3):
            damaged[place] = random.integers(256)
        damaged = bytes(damaged[: random.integers(len(file))] if random.random() < 0.3 else damaged)
        size = native.plain_jpeg_size(damaged)
        box = size and (0, 0, min(size[0], 60), min(size[1], 80))
        refused += not size or not native.cut_jpeg(damaged, box, True, 1.5, False, out)
    assert 200 < refused < 2000


def test_what_shrinks_too_much_is_left_to_others():
    pixels, out = np.zeros((60, 6000, 3), np.uint8), np.zeros((8, 8, 3), np.uint8)
    assert not native.cut_pixels(pixels, (0, 0, 60, 6000), True, False, out)
    config = default_config().data
    config.update({"image_size": 8, "train_crop": "resize"})
    assert not decode.train_crop(pixels, config, (), name="x").any()


def test_white_stays_white():
    pixels = np.full((390, 401, 3), 255, np.uint8)
    for size in (9, 224, 500):
        out = np.zeros((size, size, 3), np.uint8)
        assert native.cut_pixels(pixels, (0, 0, 390, 401), True, False, out) and out.min() == 255


CROPS = [("train_crop", kind) for kind in ("inception", "random", "pad", "resize")]
CROPS += [("eval_crop", kind) for kind in ("central", "resize")]


def with_and_without(monkeypatch, file, size, draws):
    """Each kind of crop, by the compiled part and without it."""
    for (field, kind), interpolation in itertools.product(CROPS, ("bilinear", "bicubic")):
        side = round(size * 8 / 7)
        data = Data(image_size=size, resize=side, eval_resize=side, interpolation=interpolation)
        data, found = dataclasses.replace(data, **{field: kind}), []
        for part in (native, None):
            monkeypatch.setattr(decode, "_native", part)
            if field == "train_crop":
                found.append(decode.train_crop(file, data, draws, name="x"))
            else:
                found.append(decode.eval_crop(file, data, name="x"))
        yield found


def draws(seed):
    return np.random.default_rng(seed).random(crops.DRAWS).tolist()


@pytest.mark.parametrize("size", [224, 40])
@pytest.mark.parametrize("height, width", [(700, 1000), (333, 250), (60, 80)])
@pytest.mark.parametrize(
    "options", [{"subsampling": "4:4:4"}, {"subsampling": "4:2:0"}, {"progressive": True}], ids=str
)
def test_without_the_compiled_part_the_crops_are_the_same(
    monkeypatch, size, height, width, options
):
    file = jpeg(photo(height, width), **options)
    for one, other in with_and_without(monkeypatch, file, size, draws(size)):
        assert psnr(one, other) > 45


def assert_the_same_for_real_images(monkeypatch, shared_data, every):
    for i, path in enumerate(sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[::every]):
        for size in (224, 64):
            found = with_and_without(monkeypatch, path.read_bytes(), size, draws(i))
            assert min(psnr(*pair) for pair in found) > 45, path


def test_nor_do_crops_of_real_images_depend_on_the_compiled_part(monkeypatch, shared_data):
    assert_the_same_for_real_images(monkeypatch, shared_data, every=10)


@pytest.mark.slow
def test_nor_does_any_crop_of_all_real_images(monkeypatch, shared_data):
    assert_the_same_for_real_images(monkeypatch, shared_data, every=1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_of_real_images_are_those_of_a_full_decode_with_pillow(shared_data, interpolation):
    data, method = Data(interpolation=interpolation), Image.Resampling[interpolation.upper()]
    found = []
    for i, path in enumerate(sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[::5]):
        file = path.read_bytes()
        image = Image.open(io.BytesIO(file)).convert("RGB")
        (top, left, bottom, right), _ = crops.train_part(image.height, image.width, data, draws(i))
        exact = image.crop((left, top, right, bottom)).resize((224, 224), method)
        crop = decode.train_crop(file, data, draws(i), name=path.name)
        found.append(psnr(crop, np.asarray(exact)))
        (top, left, bottom, right), _ = crops.eval_part(image.height, image.width, data)
        exact = image.resize((224, 224), method, box=(left, top, right, bottom))
        crop = decode.eval_crop(file, data, name=path.name)
        found.append(psnr(crop, np.asarray(exact)))
    assert np.mean(found) > 50 and min(found) > (45 if interpolation == "bicubic" else 42)
