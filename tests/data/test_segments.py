"""Panoptic masks: files in COCO's form, and scenes of digits that are things."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from tests.data.test_masks import save, typed
from vit_jax.base.errors import ConfigError
from vit_jax.data import batches, cache, sources
from vit_jax.data.labels import segments
from vit_jax.data.labels.masks import IGNORED
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.record import BadImage

CATEGORIES = [
    {"id": 3, "name": "sky", "isthing": 0},
    {"id": 7, "name": "car", "isthing": 1},
    {"id": 9, "name": "dog", "isthing": 1},
]
# Ids of segments, which need more than one colour channel, with their category and whether they are crowds.
INFOS = [(70_000, 3, 0), (300, 7, 0), (5, 7, 0), (66, 9, 0), (9, 7, 1)]
CODES = {0: IGNORED, 70_000: 0, 300: 1 + 256, 5: 1 + 512, 66: 2 + 768, 9: IGNORED}


def write(folder, ids, split="train", name="0", infos=INFOS):
    colors = np.stack([ids & 255, ids >> 8 & 255, ids >> 16], -1).astype(np.uint8)
    save(folder / f"masks/{split}/{name}.png", colors)
    save(folder / f"images/{split}/{name}.png", (colors * 3).astype(np.uint8))
    annotations = [
        {"file_name": f"{name}.png", "segments_info": [
            {"id": i, "category_id": c, "iscrowd": crowd} for i, c, crowd in infos]}
    ]  # fmt: skip
    content = {"categories": CATEGORIES, "annotations": annotations}
    (folder / f"masks/{split}.json").write_text(json.dumps(content))


@pytest.fixture
def scenes(tmp_path):
    ids = np.random.default_rng(0).choice(list(CODES), (4, 6)).repeat(8, 0).repeat(8, 1)
    write(tmp_path, ids)
    write(tmp_path, ids, split="val", infos=INFOS[:4] + [(9, 9, 0)])
    return tmp_path, ids


def test_files_in_cocos_form_become_classes_and_things(scenes, tmp_path):
    folder, ids = scenes
    config = typed(data__path=str(folder), data__cache=str(tmp_path / "cache"))
    train, val = sources.open_train(config.data), sources.open_source(config.data, "val")
    table = train.masks
    assert table.classes == ("sky", "car", "dog") and table.things == (False, True, True)
    assert (table.most, table.crowded) == (5, "masks/val/0.png")
    expected = np.select([ids == one for one in CODES], list(CODES.values()))
    found = table.decode(train[0].label, name="0", size=ids.shape)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.uint16
    of_val = val.masks.decode(val[0].label, name="0")
    assert (of_val[ids == 9] == 2 + 4 * 256).all()
    again = cache.cached(sources.open_train(config.data), config.data)
    np.testing.assert_array_equal(table.decode(again[0].label, name="0"), expected)
    np.testing.assert_array_equal(
        segments.classes_of(found), np.where(expected == IGNORED, IGNORED, expected % 256)
    )


def test_prepared_panoptic_masks_are_those_of_the_files(scenes, tmp_path):
    folder, _ = scenes
    prepare(str(folder), str(tmp_path / "set"))
    data = typed(data__path=str(folder)).data
    prepared = dataclasses.replace(data, name="prepared", path=str(tmp_path / "set"))
    for split in ("train", "val"):
        ours, theirs = (sources.open_source(one, split) for one in (data, prepared))
        assert theirs.masks == ours.masks and len(theirs) == 1
        expected = ours.masks.decode(ours[0].label, name="0")
        np.testing.assert_array_equal(theirs.masks.decode(theirs[0].label, name="0"), expected)


def test_a_crop_cuts_things_with_their_image(scenes):
    folder, ids = scenes
    config = typed(
        data__path=str(folder), data__image_size=24, data__train_crop="jitter", batch_size=2
    )
    source = sources.open_train(config.data)
    made = batches.TrainBatches(source, config, range(2))
    batch = made.empty()
    made.fill(batch, 0, slice(0, 2))
    like = batches.spec(config, num_classes=3, masks=source.masks)["label"]
    assert (like.shape, like.dtype) == (batch["label"].shape, batch["label"].dtype)
    assert set(np.unique(batch["label"])) <= set(CODES.values()) and like.dtype == np.uint16


def say_twice(part):
    """A change of a JSON file's content that makes it say something twice."""

    def change(content):
        first = content["annotations"][0]
        if part == "segment":
            first["segments_info"].append(first["segments_info"][0] | {"category_id": 9})
        elif part == "file":
            content["annotations"].append(first)
        else:
            content["categories"][2][part] = content["categories"][1][part]

    return change


def with_id(value):
    """A change of the id of the first segment."""
    return lambda content: content["annotations"][0]["segments_info"][0].update({"id": value})


TWICE = {
    "segment": (say_twice("segment"), "0.png: segments_info has the id 70000 twice, .* 0 and 5"),
    "file": (say_twice("file"), "annotations has the file_name '0.png' twice, .* 0 and 1"),
    "category": (say_twice("id"), "categories has the id 7 twice, in its entries 1 and 2"),
    "name": (say_twice("name"), "categories has the name 'car' twice, in its entries 1 and 2"),
    "id 0": (with_id(0), "0.png has a segment with the id 0"),
    "a fraction": (with_id(7.5), "id 7.5"),
}


@pytest.mark.parametrize("kind", TWICE)
def test_what_a_file_says_twice_is_refused_with_its_entries(scenes, kind):
    change, message = TWICE[kind]
    folder, _ = scenes
    path = folder / "masks/train.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        sources.open_train(typed(data__path=str(folder)).data)


def test_segments_that_no_file_lists_are_refused(scenes):
    folder, ids = scenes
    write(folder, ids, infos=INFOS[1:])
    config = typed(data__path=str(folder))
    source = sources.open_train(config.data)
    with pytest.raises(BadImage, match="segment id 70000"):
        source.masks.decode(source[0].label, name="0")
    write(folder, ids, infos=[(1, 4, 0)])
    with pytest.raises(ConfigError, match="category 4"):
        sources.open_train(config.data)
    (folder / "masks/train.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"train.json is no JSON file of panoptic masks"):
        sources.open_train(config.data)
    for wrong, problem in (
        ({}, "category_id"),
        ({"id": "a"}, "'a'"),
        ({"id": 2**24}, "id 16777216"),
    ):
        write(folder, ids)
        content = json.loads((folder / "masks/train.json").read_text())
        content["annotations"][0]["segments_info"] = [{"id": 1} | wrong]
        (folder / "masks/train.json").write_text(json.dumps(content))
        with pytest.raises(
            ConfigError, match=f"no JSON file of panoptic masks .*{problem}.* category_id"
        ):
            sources.open_train(config.data)
    write(folder, ids)
    Image.open(folder / "masks/train/0.png").save(folder / "masks/train/1.png")
    Image.open(folder / "images/train/0.png").save(folder / "images/train/1.png")
    with pytest.raises(ConfigError, match=r"1 masks have no segments .* masks/train/1.png"):
        sources.open_train(config.data)


def test_what_is_written_is_read_again(tmp_path):
    label_map = np.array([[0, 0, IGNORED], [1 + 256, 1 + 512, 2 + 768]], np.uint16)
    colors, infos = segments.colored(label_map)
    table = segments.PanopticTable(("a", "b", "c"), (), (), things=(False, True, True))
    listed = segments.categories(table)
    assert [info["area"] for info in infos] == [2, 1, 1, 1]
    save(tmp_path / "images/x.png", colors)
    save(tmp_path / "masks/x.png", colors)
    content = {
        "categories": listed,
        "annotations": [{"file_name": "x.png", "segments_info": infos}],
    }
    (tmp_path / "masks.json").write_text(json.dumps(content))
    source = sources.open_train(typed(data__path=str(tmp_path)).data)
    np.testing.assert_array_equal(source.masks.decode(source[0].label, name="x"), label_map)
    expected = [[False, True, True], [True, True, False]]
    assert segments.borders(label_map)[0].tolist() == [True, True, True]
    assert segments.borders(label_map)[1].tolist() == expected[1]


def test_digits_that_are_things_are_those_of_the_scenes():
    scenes = sources.open_eval(typed(data__name="digit_scenes").data)
    things = sources.open_eval(typed(data__name="digit_things").data)
    assert things.fingerprint() != scenes.fingerprint()
    for index in range(20):
        of_classes, of_things = scenes[index].label, things[index].label
        assert (of_classes.dtype, of_things.dtype) == (np.uint8, np.uint16)
        np.testing.assert_array_equal(segments.classes_of(of_things), of_classes)
        numbers = np.unique(segments.things_of(of_things))
        assert numbers.tolist() == list(range(len(numbers))) and len(numbers) <= 4
        assert ((of_classes > 0) == (segments.things_of(of_things) > 0)).all()
