"""The papers' data sets, as TFDS stores them: tiny ones, made here, read without TensorFlow."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources, splits
from vit_jax.data.decoding import decode
from vit_jax.data.options import Data
from vit_jax.data.sources.known_sets import FEW_SHOT, NAMED, VTAB

from .tiny_tfds import write_tfds

# Examples per split, from TFDS's catalogue.
SIZES = {
    "caltech101": {"train": 3060, "test": 6084},
    "cifar100": {"train": 50000, "test": 10000},
    "clevr": {"train": 70000, "validation": 15000, "test": 15000},
    "diabetic_retinopathy_detection/btgraham-300": {"train": 35126, "validation": 10906, "test": 42670},
    "dmlab": {"train": 65550, "validation": 22628, "test": 22735},
    "dsprites": {"train": 737280},
    "dtd": {"train": 1880, "validation": 1880, "test": 1880},
    "eurosat/rgb": {"train": 27000},
    "kitti": {"train": 6347, "validation": 423, "test": 711},
    "oxford_flowers102": {"train": 1020, "validation": 1020, "test": 6149},
    "oxford_iiit_pet": {"train": 3680, "test": 3669},
    "patch_camelyon": {"train": 262144, "validation": 32768, "test": 32768},
    "resisc45": {"train": 31500},
    "smallnorb": {"train": 24300, "test": 24300},
    "sun397/tfds": {"train": 76128, "validation": 10875, "test": 21750},
    "svhn_cropped": {"train": 73257, "test": 26032, "extra": 531131},
}  # fmt: skip

# VTAB's own part of the training set, in percent, where there is no validation set (its data/*.py).
OWN_PERCENT = {
    "caltech101": 90, "cifar100": 90, "oxford_iiit_pet": 80, "svhn_cropped": 90, "eurosat/rgb": 60,
    "resisc45": 60, "clevr": 90, "dsprites": 80,
}  # fmt: skip


def opened(tmp_path, name, split):
    config = Data(name=name, path=str(tmp_path))
    return sources.open_source(config, split)


def features(**more):
    return {"image": tfds.features.Image(shape=(None, None, 3))} | more


def classes(count):
    return tfds.features.ClassLabel(num_classes=count)


@pytest.mark.parametrize("name", VTAB)
def test_vtab_tasks_train_on_800_and_200_of_the_right_examples(name):
    named = NAMED[name]
    sizes = SIZES[named.tfds]

    def select(split):
        return splits.select(split, sizes, name, named.splits)

    assert select("train800") == [("train", 0, 800)]
    assert select("train") == select("train800val200") == select("train800") + select("val200")
    assert select("train800+val200") == select("train")  # as the recipe says it
    ((split, start, stop),) = select("val200")
    if named.tfds in OWN_PERCENT:
        own = OWN_PERCENT[named.tfds] * sizes["train"] // 100
        assert (split, start, stop) == ("train", own, own + 200)
    else:
        held_out = "test" if named.tfds == "smallnorb" else "validation"
        assert (split, start, stop) == (held_out, 0, 200)
    tested = select("test")
    assert not any(a < stop and start < b for n, a, b in tested if n == split)


def test_vtab_has_19_tasks_in_three_groups_with_the_papers_classes():
    counts = [NAMED[name].classes for name in VTAB]
    assert counts[:7] == [102, 100, 47, 102, 37, 397, 10]
    assert counts[7:11] == [2, 10, 45, 5]
    assert counts[11:] == [8, 6, 6, 16, 16, 4, 18, 9]
    assert len(FEW_SHOT) == 7


def test_vtab_test_sets_are_whole():
    def size(name):
        named = NAMED[f"vtab/{name}"]
        parts = splits.select("test", SIZES[named.tfds], name, named.splits)
        return sum(stop - start for _, start, stop in parts)

    assert [size(name) for name in ("eurosat", "resisc45", "dsprites_location", "clevr_count")] == [
        5400, 6300, 73728, 15000,
    ]  # fmt: skip
    assert size("smallnorb_azimuth") == 12150


def test_slices_of_named_splits_are_slices_of_what_they_stand_for(tmp_path):
    label = {"label": classes(47)}
    parts = {
        "train": [{"label": [i % 47]} for i in range(1000)],
        "validation": [{"label": [40]}] * 300,
        "test": [{"label": [1]}] * 5,
    }
    write_tfds(tmp_path / "dtd/3.0.1", features(**label), parts)
    source = opened(tmp_path, "vtab/dtd", "train[795:803]")
    labels = [source[index].label for index in range(len(source))]
    assert labels == [i % 47 for i in range(795, 800)] + [40] * 3
    assert len(opened(tmp_path, "vtab/dtd", "train")) == 1000
    assert len(opened(tmp_path, "vtab/dtd", "test")) == 5
    assert len(opened(tmp_path, "dtd", "train")) == 1000
    with pytest.raises(ConfigError, match="it has: train, validation, test, train800, val200"):
        opened(tmp_path, "vtab/dtd", "trian")


def test_imagenet_is_tested_on_its_validation_set(tmp_path):
    parts = {"train": [{"label": [1]}] * 3, "validation": [{"label": [2]}] * 2}
    parts["test"] = [{"label": [0]}]
    write_tfds(tmp_path / "imagenet2012/5.1.0", features(label=classes(1000)), parts)
    assert len(opened(tmp_path, "imagenet2012", "test")) == 2


def test_real_labels_are_sets(tmp_path):
    label = {"original_label": classes(1000), "real_label": tfds.features.Sequence(classes(1000))}
    examples = [{"original_label": [1], "real_label": some} for some in ([0, 999], [], [1])]
    write_tfds(tmp_path / "imagenet2012_real/1.0.0", features(**label), {"validation": examples})
    source = opened(tmp_path, "imagenet2012_real", "test")
    assert source.multi_label and [source[i].label for i in range(3)] == [(0, 999), (), (1,)]


def test_a_wrong_number_of_classes_is_refused(tmp_path):
    write_tfds(tmp_path / "cifar10/3.0.2", features(label=classes(9)), [{"label": [0]}])
    with pytest.raises(ConfigError, match="has 9 classes, 'cifar10' has 10"):
        opened(tmp_path, "cifar10", "train")


def test_clevr_counts_objects_and_tells_how_near_the_nearest_is(tmp_path):
    thing = {
        "size": tfds.features.ClassLabel(names=["small", "large"]),
        "pixel_coords": tfds.features.Tensor(shape=(3,), dtype=np.float32),
    }
    examples = []
    for depths in ((9.2, 7.9, 12.0), (8.4, 8.2, 9.9, 30.0), (10.5,) * 10):
        coordinates = np.asarray([(1.0, 2.0, depth) for depth in depths], np.float32)
        sizes = {"objects/size": [0] * len(depths)}
        examples.append(sizes | {"objects/pixel_coords": coordinates})
    whole = features(objects=tfds.features.Sequence(thing))
    write_tfds(tmp_path / "clevr/3.1.0", whole, {"validation": examples})
    counts = opened(tmp_path, "vtab/clevr_count", "test")
    assert [counts[i].label for i in range(3)] == [0, 1, 7] and len(counts.classes) == 8
    nearest = opened(tmp_path, "vtab/clevr_distance", "test")
    assert [nearest[i].label for i in range(3)] == [0, 1, 5] and len(nearest.classes) == 6


def test_kitti_tells_how_near_the_nearest_vehicle_is(tmp_path):
    thing = {
        "type": classes(8),
        "location": tfds.features.Tensor(shape=(3,), dtype=np.float32),
    }
    examples = []
    for things in (((0, 7.0), (3, 1.0)), ((1, 19.0), (2, 40.0)), ((2, 21.0),), ((5, 2.0),)):
        places = np.asarray([(0.0, 0.0, depth) for _, depth in things], np.float32)
        types = {"objects/type": [kind for kind, _ in things]}
        examples.append(types | {"objects/location": places})
    whole = features(objects=tfds.features.Sequence(thing))
    write_tfds(tmp_path / "kitti/3.2.0", whole, {"test": examples})
    source = opened(tmp_path, "vtab/kitti", "test")
    assert [source[i].label for i in range(4)] == [0, 1, 2, 3]


def test_dsprites_are_white_and_their_positions_in_16_bins(tmp_path):
    label = {"label_x_position": classes(32), "label_orientation": classes(40)}
    examples = [{"label_x_position": [i % 32], "label_orientation": [i % 40]} for i in range(400)]
    png = np.zeros((4, 4, 3), np.uint8)
    png[1] = 1
    write_tfds(tmp_path / "dsprites/2.0.0", features(**label), examples, png=png)
    places = opened(tmp_path, "vtab/dsprites_location", "test")
    turns = opened(tmp_path, "vtab/dsprites_orientation", "test")
    assert np.array_equal(places[0].image, png * 255)
    # Floor division by 2 and by 2.5, as VTAB divides.
    assert [places[i].label for i in range(40)] == [(360 + i) % 32 // 2 for i in range(40)]
    assert [turns[i].label for i in range(40)] == [int(i // 2.5) for i in range(40)]
    assert len(places.classes) == len(turns.classes) == 16


def test_tfrecord_files_are_read_by_position_too(tmp_path):
    label = {"label": classes(10), "file_name": tfds.features.Text()}
    examples = [{"label": [i % 10], "file_name": f"{i}.png".encode()} for i in range(20)]
    image = write_tfds(
        tmp_path / "cifar10/3.0.2", features(**label), examples, file_format="tfrecord"
    )
    source = opened(tmp_path, "cifar10", "train[25%:]")
    assert [source[i].label for i in (14, 0, 3)] == [9, 5, 8]
    assert source[0].image == image and decode.decode(image, name="x").shape == (4, 5, 3)
    assert source[0].name == "toy/3.0.2 train[5:20], record 0 (5.png)"
    middle = opened(tmp_path, "cifar10", "train[25%:50%]")
    assert [middle[i].label for i in range(len(middle))] == [5, 6, 7, 8, 9]
    file = next((tmp_path / "cifar10/3.0.2").glob("*.tfrecord*"))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(sources.DataError, match="truncated, or no TFRecord file: record 19"):
        opened(tmp_path, "cifar10", "train")
