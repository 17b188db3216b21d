"""Images with masks: the table of classes, files, and crops that cut both alike."""

import dataclasses
import io
import struct
import zlib

import cv2
import jax
import numpy as np
import pytest
from etils import epath
from PIL import ExifTags, Image

from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.data import batches, cache, crops, sources
from vit_jax.data.augmentation import pipeline
from vit_jax.data.decoding import decode
from vit_jax.data.decoding.samples import upright
from vit_jax.data.labels.masks import IGNORED, LabelMap, numbered
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.preparation.shards import ShardOptions
from vit_jax.data.preparation.verify import verify
from vit_jax.data.record import BadImage
from vit_jax.data.sources.masks import read_table

VALUES = "name,value\nroad,7\ncar,2\n,0\n"
COLORS = "name,red,green,blue\nroad,128,64,128\ncar,0,0,142\n,0,0,0\n"
CROPS = ("inception", "random", "pad", "resize", "jitter")


def typed(**changes):
    config = default_config()
    config.data.name, config.data.holdout, config.batch_size = "masks", 0.0, 4
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return schema.typed(config_class(), config)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def scenes(tmp_path):
    """A folder of four images whose red channel is the value of the mask."""
    random = np.random.default_rng(0)
    for i in range(4):
        values = random.choice([7, 2, 0], (5, 7)).repeat(6, 0).repeat(6, 1).astype(np.uint8)
        save(tmp_path / f"images/town/{i}.png", np.stack([values * 30] * 3, -1))
        save(tmp_path / f"masks/town/{i}.png", values)
    (tmp_path / "classes.csv").write_text(VALUES)
    return tmp_path


def table(tmp_path, text):
    path = epath.Path(tmp_path) / "classes.csv"
    path.write_text(text)
    return read_table(path)


def encoded(pixels):
    found = cv2.imencode(".png", pixels[..., ::-1] if pixels.ndim == 3 else pixels)[1]
    return found.tobytes()


def test_values_and_colours_become_classes(tmp_path):
    values = table(tmp_path, VALUES)
    assert values.classes == ("road", "car")
    found = values.decode(encoded(np.array([[7, 2], [0, 255]], np.uint8)), name="m")
    assert found.tolist() == [[0, 1], [IGNORED, IGNORED]] and found.dtype == np.uint8
    colors = table(tmp_path, COLORS)
    pixels = np.array([[[128, 64, 128], [0, 0, 142]], [[0, 0, 0], [0, 0, 142]]], np.uint8)
    assert colors.decode(encoded(pixels), name="m").tolist() == [[0, 1], [IGNORED, 1]]


def test_a_palette_is_read_as_values_or_as_colours_as_the_table_says(tmp_path):
    picture = Image.fromarray(np.array([[7, 2]], np.uint8), mode="P")
    palette = np.zeros((256, 3), np.uint8)
    palette[7], palette[2] = (128, 64, 128), (0, 0, 142)
    picture.putpalette(palette.reshape(-1).tolist())
    picture.save(tmp_path / "mask.png")
    content = (tmp_path / "mask.png").read_bytes()
    for text in (VALUES, COLORS):
        assert table(tmp_path, text).decode(content, name="m").tolist() == [[0, 1]]


def test_masks_of_16_bits_and_several_rows_of_a_class(tmp_path):
    many = table(tmp_path, "name,value\nroad,7\ncar,1000\nroad,300\n")
    found = many.decode(encoded(np.array([[1000, 300, 7]], np.uint16)), name="m")
    assert found.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    "text, message",
    [
        ("name,value\nroad,7\n", "must name 2 to 255 classes, and names 1"),
        ("name,value\nroad,7\ncar,7\n", "value = 7 occurs twice"),
        ("name,value\nroad,x\ncar,7\n", "line 2: value must be numbers"),
        ("road,7\ncar,2\n", "first line must name the columns"),
        ("name,red,green,blue\na,1,2,300\nb,0,0,0\n", "below 256"),
        ("", "first line must name"),
        ("name,id\nroad,7\ncar,2\n", "it names id,name"),
        ("name,red,green\na,1,2\nb,0,0\n", "it names green,name,red"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        table(tmp_path, text)


@pytest.mark.parametrize(
    "text, pixels, message",
    [
        (VALUES, np.array([[7, 9]], np.uint8), "value 9 at row 0, column 1"),
        (COLORS, np.full((1, 2, 3), 9, np.uint8), r"colour \(9, 9, 9\) at row 0, column 0"),
        (VALUES, np.zeros((1, 2, 3), np.uint8), "the mask has colours"),
    ],
)
def test_what_the_table_does_not_list_is_named(tmp_path, text, pixels, message):
    with pytest.raises(BadImage, match=message):
        table(tmp_path, text).decode(encoded(pixels), name="m")


def test_a_jpeg_is_no_mask(tmp_path):
    jpeg = cv2.imencode(".jpg", np.zeros((8, 8), np.uint8))[1].tobytes()
    with pytest.raises(BadImage, match="must be a PNG file"):
        table(tmp_path, VALUES).decode(jpeg, name="m")


def test_a_folder_is_recognised_and_read(scenes):
    config = typed(data__path=str(scenes))
    source = sources.open_train(config.data)
    assert len(source) == 4 and source.classes == ("road", "car") and not source.multi_label
    assert sources.locate(str(scenes), config.data).name == "masks"
    record = source[2]
    assert record.name.endswith("images/town/2.png")
    (scenes / "classes.csv").write_text(VALUES.replace("road", "street"))
    assert sources.open_train(config.data).fingerprint() != source.fingerprint()


def test_folders_of_splits_are_splits(scenes):
    for kind in ("images", "masks"):
        (scenes / kind / "town").rename(scenes / kind / "train")
        (scenes / kind / "val").mkdir()
        (scenes / kind / "train/3.png").rename(scenes / kind / "val/3.png")
    data = typed(data__path=str(scenes)).data
    assert len(sources.open_train(data)) == 3
    assert sources.open_eval(data)[0].name.endswith("val/3.png")


def test_a_missing_mask_is_named(scenes):
    (scenes / "masks/town/1.png").unlink()
    with pytest.raises(ConfigError, match=r"1 images have no mask; the first is images/town/1.png"):
        sources.open_train(typed(data__path=str(scenes)).data)


def first_batch(name, folder, **changes):
    """A batch to train on, with crops of images and masks."""
    config = typed(
        data__name=name, data__path=folder and str(folder), data__image_size=24, data__train_crop="jitter",
        **changes,
    )  # fmt: skip
    made = batches.TrainBatches(sources.open_train(config.data), config, range(4))
    batch = made.empty()
    made.fill(batch, 0, slice(None))
    return batch


@pytest.mark.parametrize("text", [VALUES, COLORS])
def test_prepared_masks_train_and_evaluate_with_the_bits_of_the_folder(scenes, tmp_path, text):
    if text == COLORS:
        colors = {7: (128, 64, 128), 2: (0, 0, 142), 0: (0, 0, 0)}
        for path in sorted((scenes / "masks/town").iterdir()):
            values = np.asarray(Image.open(path))
            picture = np.select([values[..., None] == v for v in colors], list(colors.values()))
            save(path, picture.astype(np.uint8))
    (scenes / "classes.csv").write_text(text)
    out = tmp_path / "prepared"
    result = prepare(str(scenes), str(out), holdout=0.25)
    assert result["splits"] == {"train": 3, "test": 1} and result["classes"] == 2
    assert verify(str(out)) == {"examples": 4, "bad": []}
    folder = typed(data__path=str(scenes), data__holdout=0.25).data
    prepared = dataclasses.replace(folder, name="prepared", path=str(out))
    for split in ("train", "test"):
        ours, theirs = (sources.open_source(data, split) for data in (folder, prepared))
        assert theirs.masks == ours.masks and theirs.labels is None and len(theirs) == len(ours)
        for i in range(len(ours)):
            assert (ours[i].image, ours[i].label) == (theirs[i].image, theirs[i].label)
    of_folder = first_batch("masks", scenes, data__holdout=0.25)
    of_prepared = first_batch("prepared", out)
    for name, value in of_folder.items():
        np.testing.assert_array_equal(of_prepared[name], value, err_msg=name)
    assert len(np.unique(of_prepared["label"])) == 3


def test_prepared_scenes_keep_masks_that_are_arrays(tmp_path):
    prepare("digit_scenes", str(tmp_path / "set"), splits=("test[:3]",))
    data = typed(data__name="prepared", data__path=str(tmp_path / "set")).data
    stored = sources.open_source(data, "test__3_")
    made = sources.open_source(dataclasses.replace(data, name="digit_scenes"), "test[:3]")
    for i in range(3):
        np.testing.assert_array_equal(stored.masks.decode(stored[i].label, name="s"), made[i].label)


def test_an_image_whose_mask_has_another_size_is_not_prepared(scenes, tmp_path):
    save(scenes / "masks/town/1.png", np.zeros((5, 5), np.uint8))
    out = tmp_path / "prepared"
    result = prepare(str(scenes), str(out), holdout=0.0)
    assert result["splits"] == {"train": 3} and result["bad"] == 1
    assert "its mask has 5 x 5 pixels, and the image 42 x 30" in (out / "report.jsonl").read_text()


def test_a_turned_photo_that_has_a_mask_keeps_its_orientation_where_others_are_encoded_again(
    tmp_path,
):
    scenes, pixels = tmp_path / "scenes", np.random.default_rng(0).integers(0, 256, (30, 42, 3))
    values, originals = np.full((30, 42), 7, np.uint8), {}
    for orientation in (1, 3, 6):
        save(scenes / f"masks/{orientation}.png", values)
        tag = Image.Exif()
        tag[ExifTags.Base.Orientation] = orientation
        content = saved(pixels.astype(np.uint8), "JPEG", quality=100, exif=tag)
        path = scenes / f"images/{orientation}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        originals[orientation] = content
    (scenes / "classes.csv").write_text(VALUES)
    prepare(str(scenes), str(tmp_path / "set"), options=ShardOptions(quality=50), holdout=0.0)
    source = sources.open_train(typed(data__name="prepared", data__path=str(tmp_path / "set")).data)
    kept = {source[i].name.rpartition(", ")[2]: source[i].image for i in range(3)}
    assert {name: content in originals.values() for name, content in kept.items()} == {
        "images/1.jpg": False, "images/3.jpg": True, "images/6.jpg": True,
    }  # fmt: skip
    assert not verify(str(tmp_path / "set"))["bad"]


def test_an_image_without_a_mask_is_not_prepared_and_sizes_are_kept(scenes, tmp_path):
    options = ShardOptions(max_side=16)
    with pytest.raises(ConfigError, match="--max_side=16.*masks"):
        prepare(str(scenes), str(tmp_path / "prepared"), options=options)
    (scenes / "masks/town/1.png").unlink()
    with pytest.raises(ConfigError, match="1 images have no mask.*town/1.png"):
        prepare(str(scenes), str(tmp_path / "prepared"))
    assert not (tmp_path / "prepared").exists()


def test_a_missing_folder_is_named(scenes):
    (scenes / "masks").rename(scenes / "labels")
    with pytest.raises(ConfigError, match=r"panoptic masks: it has no masks/$"):
        sources.open_train(typed(data__path=str(scenes)).data)
    with pytest.raises(ConfigError, match=rf"panoptic masks; did you mean '{scenes}'"):
        sources.open_train(typed(data__path=f"{scenes}x").data)


def test_a_missing_table_is_named(scenes):
    (scenes / "classes.csv").unlink()
    with pytest.raises(ConfigError, match="classes.csv does not exist"):
        sources.open_train(typed(data__path=str(scenes)).data)


def test_a_mask_of_another_size_is_named(scenes):
    save(scenes / "masks/town/1.png", np.zeros((5, 5), np.uint8))
    config = typed(data__path=str(scenes), data__image_size=16)
    host = batches.TrainBatches(sources.open_train(config.data), config, range(4))
    with pytest.raises(
        BadImage, match=r"town/1.png.* its mask has 5 x 5 pixels, and the image 42 x 30"
    ):
        host.fill(host.empty(), 0, slice(None))


@pytest.mark.parametrize("crop", CROPS)
def test_every_crop_cuts_image_and_mask_alike(scenes, crop):
    """Red is 30 times the value: where a crop does not mix neighbours, the mask follows from the image."""
    config = typed(
        data__path=str(scenes), data__image_size="24x32", data__train_crop=crop, data__resize=48,
        data__crop_area=(0.3, 1.0), data__crop_scale=(0.4, 2.0),
    )  # fmt: skip
    host = batches.TrainBatches(sources.open_train(config.data), config, range(4))
    seen = set()
    for step in range(6):
        batch = host.empty()
        host.fill(batch, step, slice(None))
        values = batch["image"][..., 0] / 30
        label = batch["label"]
        expected = np.select([values == 7, values == 2, values == 0], [0, 1, IGNORED], -1)
        clear = expected >= 0
        assert clear.mean() > 0.3
        agree = (label == expected)[clear].mean()
        assert agree > 0.95, (
            crop,
            agree,
        )  # nearest and antialiased differ by up to a pixel at edges
        seen |= set(np.unique(label).tolist())
    assert seen == {0, 1, IGNORED}


def test_a_crop_without_resizing_is_exact(scenes):
    config = typed(
        data__path=str(scenes), data__image_size="30x42", data__train_crop="pad", data__pad=3
    )
    source = sources.open_train(config.data)
    host = batches.TrainBatches(source, config, range(4))
    batch = host.empty()
    host.fill(batch, 2, slice(None))
    values = batch["image"][..., 0] // 30
    expected = np.select([values == 7, values == 2], [0, 1], IGNORED)
    np.testing.assert_array_equal(batch["label"], expected)


def test_a_batch_does_not_depend_on_processes_and_is_as_its_spec_says(scenes):
    config = typed(data__path=str(scenes), data__image_size=16, data__train_crop="jitter")
    source = sources.open_train(config.data)

    def filled(rows):
        host = batches.TrainBatches(source, config, rows)
        batch = host.empty()
        host.fill(batch, 5, slice(None))
        return batch

    whole, parts = filled(range(4)), [filled(rows) for rows in (range(1), range(1, 4))]
    spec = batches.spec(config, num_classes=2, masks=True)
    assert {n: (x.shape, x.dtype) for n, x in whole.items()} == {
        n: (x.shape, x.dtype) for n, x in spec.items()
    }
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))


def test_a_jitter_crop_fills_what_the_image_does_not_reach():
    data = typed(data__image_size=32, data__train_crop="jitter", data__crop_scale=(0.5, 0.5)).data
    out = np.full((32, 32), 9, np.uint8)
    label_map = LabelMap(np.ones((40, 80), np.uint8), numbered("ab"), out)
    image = np.full((40, 80, 3), 200, np.uint8)
    cut = decode.train_crop(image, data, [0.5] * 40, name="i", label_map=label_map)
    assert (cut[:8, :16] == 200).all() and not cut[8:].any() and not cut[:, 16:].any()
    assert (
        (out[:8, :16] == 1).all() and (out[8:] == IGNORED).all() and (out[:, 16:] == IGNORED).all()
    )


def test_flips_move_masks_with_their_images():
    config = typed().augment
    images = np.random.default_rng(0).integers(0, 256, (16, 4, 6, 3)).astype(np.uint8)
    maps, key = images[..., 0], jax.random.key(3)
    how = dict(mean=(0.0,) * 3, std=(1 / 255,) * 3)
    seen, _ = pipeline.augment(images, {}, key, config, **how)
    moved = pipeline.move({"label": maps}, key, config)["label"]
    np.testing.assert_allclose(seen[..., 0], moved, atol=1e-3)
    flipped = (np.asarray(moved) != maps).any((1, 2))
    assert 0 < flipped.sum() < 16
    still = dataclasses.replace(config, flip=False)
    np.testing.assert_array_equal(pipeline.move(maps, key, still), maps)


def test_a_cache_keeps_masks(scenes, tmp_path):
    config = typed(data__path=str(scenes), data__cache=str(tmp_path / "cache"))
    first, again = (cache.cached(sources.open_train(config.data), config.data) for _ in range(2))
    assert first[1] == again[1] and again.masks.classes == ("road", "car")


def test_scenes_of_digits_are_the_same_each_time_and_masks_cover_the_strokes():
    data = typed(data__name="digit_scenes").data
    train, test = sources.open_train(data), sources.open_eval(data)
    assert (len(train), len(test), len(train.classes)) == (10_000, 200, 11)
    for index in range(20):
        record, again = train[index], sources.open_train(data)[index]
        np.testing.assert_array_equal(record.label, again.label)
        np.testing.assert_array_equal(record.image, again.image)
        strokes = record.image[..., 0] > 64
        assert (record.label[strokes] > 0).mean() > 0.95 and 1 < len(np.unique(record.label)) <= 4
    assert (test[0].image != train[0].image).any()


def chunk(kind, content):
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_of_bits(values, bits, palette=b""):
    """A grey PNG, or one with a palette, of so many bits a pixel, which Pillow does not write."""
    height, width = values.shape
    rows = b""
    for row in values:
        text = "".join(format(int(value), f"0{bits}b") for value in row)
        text += "0" * (-len(text) % 8)
        rows += b"\0" + bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))
    head = struct.pack(">IIBBBBB", width, height, bits, 3 if palette else 0, 0, 0, 0)
    parts = chunk(b"IHDR", head) + (chunk(b"PLTE", palette) if palette else b"")
    parts += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["grey", "palette"])
def test_numbers_are_read_as_they_are_in_every_bit_depth(bits, kind):
    if kind == "palette" and bits == 16:
        return  # which PNG does not have
    values = np.random.default_rng(bits).integers(0, min(2**bits, 100), (5, 7))
    values[0, 0] = min(2**bits, 100) - 1
    palette = bytes(3 * 2**bits) if kind == "palette" else b""
    table = numbered([f"c{i}" for i in range(100)])
    found = table.decode(png_of_bits(values, bits, palette), name="x")
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("shape", [(24, 40), (32, 32)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_mask_is_turned_with_its_image(kind, shape):
    """A mask of the stored pixels, without and with the orientation of its image; and one of the upright picture."""
    stored = np.zeros(shape, np.uint8)
    stored[: shape[0] // 2, : shape[1] // 4] = 1
    pixels = np.repeat(stored[..., None] * 255, 3, 2)
    for orientation in range(1, 9):
        tag = Image.Exif()
        tag[ExifTags.Base.Orientation] = orientation
        image = saved(pixels, kind, exif=tag)
        masks = {"plain": saved(stored, "PNG"), "tagged": saved(stored, "PNG", exif=tag)}
        if orientation > 4 and shape[0] != shape[1]:
            masks["upright"] = saved(upright(stored, orientation), "PNG")
        for name, mask in masks.items():
            data = Data(image_size=32, train_crop="resize")
            out, labels = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32), np.uint8)
            label_map = LabelMap(mask, numbered("ab"), labels)
            decode.train_crop(
                image, data, np.zeros(crops.DRAWS), name="x", out=out, label_map=label_map
            )
            agree = ((out[..., 0] > 127) == labels).mean()
            assert agree > 0.95, (orientation, name, agree)
            assert 0 < labels.mean() < 1


def saved(pixels, kind, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()
