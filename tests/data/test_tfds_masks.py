"""Masks of data sets that TFDS has prepared: tiny ones, made here, read without TensorFlow."""

import pickle

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.data.test_masks import encoded, save, typed
from vit_jax.base.errors import ConfigError
from vit_jax.data import batches, sources
from vit_jax.data.labels.masks import IGNORED, mask_table
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.preparation.verify import verify
from vit_jax.data.record import BadImage
from vit_jax.data.sources import fingerprint

from .tiny_tfds import write_tfds

Image, LabeledImage = tfds.features.Image, tfds.features.LabeledImage
PET = {
    "image": Image(),
    "label": tfds.features.ClassLabel(num_classes=37),
    "file_name": tfds.features.Text(),
    "segmentation_mask": Image(shape=(None, None, 1), use_colormap=True),
}
STREET = {
    "image_left": Image(shape=(1024, 2048, 3), encoding_format="png"),
    "segmentation_label": Image(shape=(1024, 2048, 1), encoding_format="png", use_colormap=True),
}
# Label ids of Cityscapes by train ids, as its authors list them.
TRAINED = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


def trimap(i):
    """Masks of a pet: 1, 2 and 3."""
    return np.random.default_rng(i).integers(1, 4, (5, 7)).repeat(6, 0).repeat(6, 1).astype("u1")


def picture(values):
    return np.stack([values * 30] * 3, -1)


def config_of(tmp_path, name, **fields):
    fields = {"mask_feature": "auto", "path": str(tmp_path), "name": name, "holdout": 0.0} | fields
    changes = {f"data__{key}": value for key, value in fields.items()}
    return typed(data__image_size=24, data__train_crop="jitter", **changes)


def opened(tmp_path, name, split="train", **fields):
    return sources.open_source(config_of(tmp_path, name, **fields).data, split)


def one(tmp_path, features, values=None, *, name="mine", mask="mask", image="image", size=(2, 3)):
    """A data set of one example whose mask has these values."""
    values = np.ones(size, np.uint8) if values is None else np.asarray(values, np.uint8)
    shown = encoded(np.zeros((*values.shape[:2], 3), np.uint8))
    pictures = {key: shown for key, feature in features.items() if isinstance(feature, Image)}
    example = pictures | {image: shown} | ({mask: encoded(values)} if mask in features else {})
    others = {"label": [0]} if "label" in features else {}
    write_tfds(tmp_path / name / "1.0.0", features, [example | others])


@pytest.fixture
def pets(tmp_path):
    """Five pets, and the same images and masks as files."""
    examples = []
    for i in range(5):
        image, mask = encoded(picture(trimap(i))), encoded(trimap(i))
        fields = dict(label=[i], file_name=f"{i}.jpg".encode(), image=image, segmentation_mask=mask)
        examples.append(fields)
        split = "train" if i < 4 else "test"
        for kind, content in (("images", image), ("masks", mask)):
            path = tmp_path / f"files/{kind}/{split}/{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (tmp_path / "files/classes.csv").write_text("name,value\nforeground,1\nbackground,2\n,3\n")
    write_tfds(
        tmp_path / "oxford_iiit_pet/4.0.0", PET, {"train": examples[:4], "test": examples[4:]}
    )
    return tmp_path


def batch_of(config, step=0):
    made = batches.TrainBatches(sources.open_train(config.data), config, range(4))
    batch = made.empty()
    made.fill(batch, step, slice(None))
    return batch


def assert_same_batches(config, other):
    for step in range(3):
        ours, theirs = batch_of(config, step), batch_of(other, step)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            np.testing.assert_array_equal(theirs[name], value, err_msg=name)
    assert set(np.unique(ours["label"])) <= {0, 1, IGNORED}


def test_masks_of_pets_are_those_of_the_same_files(pets):
    for split in ("train", "test"):
        ours = opened(pets, "oxford_iiit_pet", split)
        theirs = opened(pets / "files", "masks", split)
        assert ours.masks == mask_table(ours) == theirs.masks and len(ours) == len(theirs)
        assert ours.classes == ("foreground", "background")
        assert not ours.multi_label and ours.labels is None
        for i in range(len(ours)):
            assert (ours[i].image, ours[i].label) == (theirs[i].image, theirs[i].label)
        assert ours.read([0])[0] == ours[0] == pickle.loads(pickle.dumps(ours))[0]
    assert ours[0].name == "toy/4.0.0 test[0:1], record 0 (4.jpg)"
    tfds_config, files = config_of(pets, "oxford_iiit_pet"), config_of(pets / "files", "masks")
    assert_same_batches(tfds_config, files)


def test_pixels_that_the_authors_did_not_classify_count_nowhere(pets):
    source = opened(pets, "oxford_iiit_pet")
    found = source.masks.decode(source[0].label, name="0")
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, np.choose(trimap(0) - 1, [0, 1, IGNORED]))
    assert source.masks.decode(np.array([[255]], np.uint8), name="0") == IGNORED


def test_without_a_mask_feature_classes_are_read_as_before(pets):
    source = opened(pets, "oxford_iiit_pet", mask_feature="")
    assert mask_table(source) is None and len(source.classes) == 37
    assert [source[i].label for i in range(4)] == [0, 1, 2, 3]
    sizes = {"train": 4, "test": 1}
    where = "toy/4.0.0 train[0:4]"
    assert source.fingerprint() == fingerprint.digest(where, sizes, source.classes)
    data = config_of(pets, "oxford_iiit_pet", mask_feature="").data
    assert sources.open_data_set(data).identity() == repr(("oxford_iiit_pet", "toy/4.0.0", sizes))


def test_cityscapes_has_19_classes_of_34_ids_and_is_tested_on_its_validation_set(tmp_path):
    ids = np.arange(34, dtype=np.uint8).reshape(2, 17)
    left = encoded(picture(ids))
    street = {"image_left": left, "segmentation_label": encoded(ids)}
    splits = {"train": [street], "validation": [street] * 2, "test": [street] * 3}
    write_tfds(tmp_path / "cityscapes/semantic_segmentation/1.0.0", STREET, splits)
    source = opened(tmp_path, "cityscapes", "test")
    assert len(source) == 2 and source[0].image == left
    found = source.masks.decode(source[0].label, name="0", size=ids.shape).reshape(-1)
    expected = [TRAINED.index(i) if i in TRAINED else IGNORED for i in range(34)]
    assert found.tolist() == expected and len(source.classes) == 19
    names = [source.classes[i] for i in (0, 1, 9, 10, 11, 13, 18)]
    assert names == ["road", "sidewalk", "terrain", "sky", "person", "car", "bicycle"]
    whole = opened(tmp_path, "cityscapes/semantic_segmentation:1.0.0", "test")
    assert len(whole) == 3 and whole.masks == source.masks
    unlabelled = opened(tmp_path, "cityscapes", mask_feature="")
    assert unlabelled.classes == () and unlabelled[0].label is None
    assert unlabelled[0].image == left


def test_names_are_those_of_a_labelled_image_or_numbers(tmp_path):
    for name, labels, classes in (("a", ["sky", "sea"], ("sky", "sea")), ("b", 3, tuple("012"))):
        one(tmp_path, {"image": Image(), "mask": LabeledImage(labels=labels)}, name=name)
        source = opened(tmp_path, name)
        assert source.classes == classes
        assert source.masks.decode(source[0].label, name="0").tolist() == [[1] * 3] * 2


def test_another_mask_of_a_known_data_set_has_its_own_classes(tmp_path):
    features = PET | {"parts": LabeledImage(labels=["head", "tail"])}
    one(tmp_path, features, name="oxford_iiit_pet", mask="parts")
    assert opened(tmp_path, "oxford_iiit_pet").classes == ("foreground", "background")
    parts = opened(tmp_path, "oxford_iiit_pet", mask_feature="parts")
    assert parts.classes == ("head", "tail")
    assert parts.masks.decode(parts[0].label, name="0").tolist() == [[1] * 3] * 2


def test_a_table_of_the_user_comes_first(pets):
    table = pets / "three.csv"
    table.write_text("name,value\nborder,3\npet,1\nrest,2\n")
    source = opened(pets, "oxford_iiit_pet", mask_table=str(table))
    assert source.classes == ("border", "pet", "rest")
    found = source.masks.decode(source[0].label, name="0")
    np.testing.assert_array_equal(found, np.choose(trimap(0) - 1, [1, 2, 0]))
    assert source.fingerprint() != opened(pets, "oxford_iiit_pet").fingerprint()
    identity, other = (
        sources.open_data_set(config_of(pets, "oxford_iiit_pet", **fields).data).identity()
        for fields in ({}, {"mask_table": str(table)})
    )
    assert identity != other


def test_masks_of_colours_and_named_features(tmp_path):
    colors = np.array([[[128, 64, 128], [0, 0, 142]], [[0, 0, 0], [0, 0, 142]]], np.uint8)
    features = {"rgb": Image(), "depth": Image(shape=(None, None, 1)), "segments": Image()}
    one(tmp_path, features, colors, mask="segments", image="rgb")
    table = tmp_path / "classes.csv"
    table.write_text("name,red,green,blue\nroad,128,64,128\ncar,0,0,142\n,0,0,0\n")
    chosen = dict(mask_feature="segments", mask_table=str(table))
    source = opened(tmp_path, "mine", **chosen)  # one image of three channels is left
    assert source.masks.decode(source[0].label, name="0").tolist() == [[0, 1], [IGNORED, 1]]
    assert opened(tmp_path, "mine", image_feature="rgb", **chosen)[0] == source[0]
    depth = opened(tmp_path, "mine", image_feature="depth", **chosen)
    assert depth.fingerprint() != source.fingerprint()


def test_prepared_masks_of_tfds_train_with_the_same_bits(pets, tmp_path):
    out = tmp_path / "prepared"
    features = {"mask_feature": "auto"}
    result = prepare("oxford_iiit_pet", str(out), data_dir=str(pets), features=features)
    assert result["splits"] == {"train": 4, "test": 1} and result["classes"] == 2
    assert verify(str(out)) == {"examples": 5, "bad": []}
    again = prepare("oxford_iiit_pet", str(out), data_dir=str(pets), features=features)
    assert again == result
    with pytest.raises(ConfigError, match="holds another data set"):
        prepare("oxford_iiit_pet", str(out), data_dir=str(pets))
    assert_same_batches(config_of(pets, "oxford_iiit_pet"), config_of(out, "prepared"))


SEVERAL = {
    "image_left": Image(), "image_right": Image(), "ids": Image(shape=(None, None, 1)),
    "instances": Image(shape=(None, None, 1)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, features, fields, words",
    [
        ("mine", {"image": Image(), "label": PET["label"]}, {},
         "no feature with masks beside 'image'; it has: image, label"),
        ("mine", SEVERAL, {}, "several images, image_left, image_right: set --config.data.image_feature=image_left"),
        ("mine", SEVERAL, {"image_feature": "image_left"},
         "may be the mask, ids, image_right, instances: set --config.data.mask_feature=ids"),
        ("mine", {"ids": SEVERAL["ids"]}, {"mask_feature": "ids"}, "no feature 'image'; it has: ids"),
        ("mine", SEVERAL, {"image_feature": "image_lef"}, "'image_lef': .* no such feature; did you mean 'image_left'"),
        ("oxford_iiit_pet", PET, {"mask_feature": "trimap"}, "mask_feature = 'trimap': .*_pet.* no such feature"),
        ("oxford_iiit_pet", PET, {"mask_feature": "label"},
         "'label' is a ClassLabel in .*: set one of the images, image, segmentation_mask"),
        ("oxford_iiit_pet", PET, {"mask_feature": "image"}, "the feature 'image' is the image"),
        ("mine", {"image": Image(), "mask": SEVERAL["ids"]}, {},
         "mine.*: nothing says what the values of the feature 'mask' mean: .*mask_table=FILE"),
        ("mine", {"image": Image(), "mask": LabeledImage(labels=300)}, {}, "'mask' has 300 classes"),
        ("mine", {"image": Image(), "mask": LabeledImage(labels=None)}, {}, "nothing says what the values"),
        ("scene_parse150", {"image": Image(), "annotation": Image(encoding_format="png")}, {},
         "masks are those of instances: .* download ADEChallengeData2016"),
        ("coco/2017_panoptic", {"image": Image(), "panoptic_image": Image(encoding_format="png")}, {},
         "the masks are panoptic.*masks/train.json"),
        ("coco/2014", {"image": Image(), "label": PET["label"]}, {}, "no feature with masks beside 'image'"),
        ("cityscapes/mine", {"segmentation_label": STREET["segmentation_label"]}, {}, "no feature 'image'"),
        ("oxford_iiit_pet", PET, {"mask_table": "/nowhere/classes.csv"}, "/nowhere/classes.csv does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_named_with_what_to_do(tmp_path, name, features, fields, words):
    one(tmp_path, features, name=name, mask="segmentation_mask", image=next(iter(features)))
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path, name, **fields)


def test_masks_that_tfds_has_instead_are_read_by_a_table(tmp_path):
    colors = np.array([[[5, 1, 0], [5, 2, 0], [0, 0, 0]]], np.uint8)
    features = {"image": Image(), "annotation": Image(encoding_format="png")}
    one(tmp_path, features, colors, name="scene_parse150", mask="annotation")
    table = tmp_path / "classes.csv"
    table.write_text("name,red,green,blue\nbed,5,1,0\nbed,5,2,0\nother,0,0,0\n")
    source = opened(tmp_path, "scene_parse150", mask_table=str(table))
    assert source.masks.decode(source[0].label, name="0").tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    "values, words",
    [
        (np.array([[1, 2, 3], [1, 4, 3]]), "value 4 at row 1, column 1, .*config.data.mask_table"),
        (np.ones((2, 2)), "its mask has 2 x 2 pixels, and the image 3 x 2"),
        (np.ones((2, 3, 3)), "the mask has colours .*config.data.mask_table"),
    ],
)
def test_a_mask_that_cannot_be_used_is_named_by_its_record(tmp_path, values, words):
    example = {"image": encoded(np.zeros((2, 3, 3), np.uint8)), "label": [0], "file_name": b"7.jpg"}
    example["segmentation_mask"] = encoded(values.astype(np.uint8))
    write_tfds(tmp_path / "oxford_iiit_pet/4.0.0", PET, [example])
    config = config_of(tmp_path, "oxford_iiit_pet")
    host = batches.TrainBatches(sources.open_train(config.data), config, range(1))
    with pytest.raises(BadImage, match=rf"record 0 \(7.jpg\) cannot be read: .*{words}"):
        host.fill(host.empty(), 0, slice(None))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"name": "masks", "mask_feature": "ids"}, "mask_feature = 'ids' has no effect with .* 'masks'"),
        ({"name": "folder", "mask_table": "a.csv", "mask_feature": "auto"}, "mask_table = 'a.csv' has no effect with"),
        ({"name": "mixture", "image_feature": "rgb"}, "image_feature = 'rgb' has no effect"),
        ({"name": "mine", "mask_table": "a.csv"}, "has no effect without masks: set --config.data.mask_feature=auto"),
    ],
)  # fmt: skip
def test_fields_without_effect_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        sources.check_features(Data(**fields))


def test_fields_with_an_effect_and_those_of_the_recipe_are_accepted(tmp_path):
    sources.check_features(Data(name="masks", mask_feature="auto"))
    data = Data(name="mine", mask_feature="m", mask_table="classes.csv", image_feature="i")
    sources.check_features(data)
    assert sources.with_absolute_paths(data).mask_table.startswith("/")
    save(tmp_path / "images/0.png", np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(ConfigError, match="mask_feature = 'ids' has no effect"):
        prepare(str(tmp_path), str(tmp_path / "out"), features={"mask_feature": "ids"})
