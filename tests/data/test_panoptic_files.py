"""Panoptic files by a generator: each is read as NumPy reads it, or refused with the entry that is wrong."""

import json
import pathlib

import numpy as np
import pytest

from tests.data.test_masks import save, typed
from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.labels.masks import IGNORED
from vit_jax.data.record import BadImage

SIDE = 32
MOST = 255  # things of an image, in label maps of uint16
FILES = range(3)


class Scene:
    """Three images and their segments, as a JSON file in COCO's form has them.

    Attributes:
      content: of the JSON file.
      ids: of each image the segment of each pixel, (SIDE, SIDE).
    """

    def __init__(self, random: np.random.Generator):
        count = int(random.integers(2, 12))
        numbers = random.permutation(1000)[:count].tolist()
        self.categories = [
            {"id": number, "name": f"class {number}", "isthing": int(random.random() < 0.6)}
            for number in numbers
        ]
        self.ids = []
        annotations = []
        for file in FILES:
            amount = int(random.choice([1, 5, 40, MOST]))
            segments = random.choice(2**24 - 1, amount, replace=False) + 1
            infos = [
                {
                    "id": int(segment),
                    "category_id": int(random.choice(numbers)),
                    "iscrowd": int(random.random() < 0.2),
                }
                for segment in segments
            ]
            annotations.append({"file_name": f"{file}.png", "segments_info": infos})
            self.ids.append(random.choice([0, *segments], (SIDE, SIDE)))
        self.content = {"categories": self.categories, "annotations": annotations}

    def write(self, folder: pathlib.Path) -> None:
        for file, ids in enumerate(self.ids):
            colors = np.stack([ids & 255, ids >> 8 & 255, ids >> 16], axis=-1).astype(np.uint8)
            save(folder / f"masks/{file}.png", colors)
            save(folder / f"images/{file}.png", colors // 2)
        (folder / "masks.json").write_text(json.dumps(self.content))

    def expected(self, file: int) -> np.ndarray:
        """The label map of an image: `class + 256 * n` of its n-th thing."""
        label_map = np.full((SIDE, SIDE), IGNORED)
        places = {category["id"]: i for i, category in enumerate(self.categories)}
        things = 0
        for info in self.content["annotations"][file]["segments_info"]:
            if info["iscrowd"]:
                continue
            place = places[info["category_id"]]
            number = place
            if self.categories[place]["isthing"]:
                things += 1
                number += 256 * things
            label_map[self.ids[file] == info["id"]] = number
        return label_map


def segment_twice(scene, random, folder):
    """A segment is there twice, with two categories."""
    infos = scene.content["annotations"][1]["segments_info"]
    infos.append(infos[0] | {"category_id": scene.categories[-1]["id"]})
    return rf"1\.png: segments_info has the id {infos[0]['id']} twice"


def category_twice(scene, random, folder):
    key = str(random.choice(["id", "name"]))
    scene.categories.append(scene.categories[0] | {"id": 2000, "name": "new"})
    scene.categories[-1][key] = scene.categories[0][key]
    return rf"categories has the {key} {scene.categories[0][key]!r} twice"


def file_twice(scene, random, folder):
    scene.content["annotations"].append(scene.content["annotations"][2])
    return r"annotations has the file_name '2\.png' twice"


def black_segment(scene, random, folder):
    scene.content["annotations"][0]["segments_info"][0]["id"] = 0
    return r"0\.png has a segment with the id 0"


def unknown_category(scene, random, folder):
    scene.content["annotations"][2]["segments_info"][0]["category_id"] = 5000
    return r"2\.png has a segment of the category 5000"


def too_many_things(scene, random, folder):
    scene.categories[0]["isthing"] = 1
    category = scene.categories[0]["id"]
    infos = [{"id": i + 1, "category_id": category, "iscrowd": 0} for i in range(300)]
    scene.content["annotations"][1]["segments_info"] = infos
    return rf"1\.png has 300 things, and label maps hold {MOST}"


def pixels_of_no_segment(scene, random, folder):
    listed = {info["id"] for info in scene.content["annotations"][0]["segments_info"]}
    unlisted = next(number for number in range(1, 1000) if number not in listed)
    scene.ids[0][3, 4] = unlisted
    return rf"0.png.* the segment id {unlisted} at row 3, column 4"


def missing_picture(scene, random, folder):
    (folder / "masks/1.png").unlink()
    return r"1\.png"


def missing_entry(scene, random, folder):
    del scene.content["annotations"][1]
    return r"1\.png"


FAULTS = [
    segment_twice,
    category_twice,
    file_twice,
    black_segment,
    unknown_category,
    too_many_things,
    pixels_of_no_segment,
    missing_picture,
    missing_entry,
]


def read(folder: pathlib.Path) -> list[np.ndarray]:
    """The label map of every image."""
    source = sources.open_train(typed(data__path=str(folder)).data)
    return [source.masks.decode(record.label, name=record.name) for record in source]


def check(seed: int, folder: pathlib.Path) -> None:
    """A file without a fault is read right, and one with a fault is refused."""
    random = np.random.default_rng(seed)
    scene = Scene(random)
    scene.write(folder)
    if seed % 2:
        for found, file in zip(read(folder), FILES, strict=True):
            np.testing.assert_array_equal(found, scene.expected(file))
        return
    fault = FAULTS[seed // 2 % len(FAULTS)]
    after_writing = fault is missing_picture
    message = fault(scene, random, folder)
    if not after_writing:
        scene.write(folder)
    with pytest.raises((ConfigError, BadImage), match=message):
        read(folder)


@pytest.mark.parametrize("seed", range(2 * len(FAULTS)))
def test_a_file_is_read_right_or_refused_with_its_entry(seed, tmp_path):
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_each_of_many_files_is_read_right_or_refused_with_its_entry(seed, tmp_path):
    check(1000 + seed, tmp_path)
