"""The data sets of the papers by name: where TFDS keeps them, which examples are 'train' and 'test',
how many classes they must have, how their images are cut, and what the values of their masks mean.

Nothing is read here; `tfds.py` does. A name that is not in the table is a TFDS data set as it is.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from vit_jax.data.labels.masks import IGNORED, ClassTable

# 'test' is what the papers report on, even where TFDS has a split 'test' without labels.
TRAIN_TEST = {"train": "train", "test": "test"}
TRAIN_VALIDATION = {"train": "train", "test": "validation"}


@dataclasses.dataclass(frozen=True)
class Named:
    """A data set of the papers.

    Attributes:
      tfds: its name there.
      classes: how many; 0: images have no class.
      splits: our names of splits → expressions over those of TFDS.
      label: the feature with the label; or a function of the features that gives it, and then
        `features` names those it needs.
      crops: `train_crop` and `eval_crop` of `config.data`, as the papers have them.
      flip: whether they mirror training images.
      white: the value of white in the stored images.
      by_hand: how to prepare it where TFDS cannot.
    """

    tfds: str
    classes: int
    splits: Mapping[str, str] = dataclasses.field(default_factory=lambda: TRAIN_TEST)
    label: str | Callable[[dict], int] = "label"
    features: tuple[str, ...] = ()
    crops: tuple[str, str] = ("inception", "resize")
    flip: bool = True
    white: int = 255
    by_hand: str = ""


def _vtab(name: str, classes: int, validation: str, *, test: str = "test", **fields) -> Named:
    """A VTAB-1k task (arXiv 1910.04867): 800 + 200 examples to train on, the whole test set; one
    setting for all tasks, whole images and nothing random.

    The first 800 of the training set; and the first 200 of the validation set, or, where the data
    set has none, 200 from where VTAB's own part of the training set ends.
    """
    splits = {"train800": "train[:800]", "val200": validation, "test": test}
    splits["train"] = splits["train800val200"] = f"train[:800]+{validation}"
    return Named(name, classes, splits, crops=("resize", "resize"), flip=False, **fields)


def _few_shot(name: str, classes: int, train: str = "train", test: str = "test") -> Named:
    """A set for few-shot evaluation: images cut the same way everywhere (as in big_vision)."""
    return Named(name, classes, {"train": train, "test": test}, crops=("resize", "central"))


def _above(thresholds: tuple[float, ...], value: float) -> int:
    """The number of the last threshold below `value`."""
    return int(np.flatnonzero(np.asarray(thresholds) < value).max())


def _clevr_count(fields: dict) -> int:
    """3 to 10 objects."""
    return len(fields["objects"]["size"]) - 3


def _clevr_distance(fields: dict) -> int:
    depths = np.asarray(fields["objects"]["pixel_coords"]).reshape(-1, 3)[:, 2]
    return _above((0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0), depths.min())


def _kitti_distance(fields: dict) -> int:
    """How far the nearest car, van or truck is, in metres; 3: there is none."""
    vehicle = np.asarray(fields["objects"]["type"]) < 3
    distances = np.asarray(fields["objects"]["location"]).reshape(-1, 3)[vehicle, 2]
    return _above((-100.0, 8.0, 20.0, 999.0), distances.min(initial=1000.0))


def _dsprites_location(fields: dict) -> int:
    """32 positions in 16 bins."""
    return int(fields["label_x_position"]) * 16 // 32


def _dsprites_orientation(fields: dict) -> int:
    """40 orientations in 16 bins."""
    return int(fields["label_orientation"]) * 16 // 40


_DSPRITES_TEST = "train[90%:]"

NAMED: dict[str, Named] = {
    "cifar10": Named("cifar10", 10),
    "cifar100": Named("cifar100", 100),
    "oxford_iiit_pet": Named("oxford_iiit_pet", 37),
    "oxford_flowers102": Named("oxford_flowers102", 102),
    "cityscapes": Named("cityscapes/semantic_segmentation", 0, TRAIN_VALIDATION),
    "imagenet2012": Named("imagenet2012", 1000, TRAIN_VALIDATION),
    "imagenet2012_real": Named(
        "imagenet2012_real", 1000, {"test": "validation"}, label="real_label"
    ),
    "imagenet_v2": Named("imagenet_v2/matched-frequency", 1000, {"test": "test"}),
    # The name, the split 'full' and the classes are those of big_vision's own TFDS data set.
    "imagenet21k": Named(
        "imagenet21k", 21843, {"train": "full[51200:]", "test": "full[:51200]"}, label="labels",
        by_hand="config.data.name = 'imagenet21k' is not in TFDS. Download fall11_whole.tar or winter21_whole.tar.gz "
        "from image-net.org, unpack it to a folder with a tar file for each class, and store that with "
        "'vit_jax prepare FOLDER --out=SET --holdout=0.0036'; then set --config.data.name=prepared "
        "--config.data.path=SET --config.data.train_split=train --config.data.eval_split=test and "
        "--config.model.num_classes to the number of its classes",
    ),
    # VTAB, natural
    "vtab/caltech101": _vtab("caltech101", 102, "train[2754:2954]"),
    "vtab/cifar100": _vtab("cifar100", 100, "train[45000:45200]"),
    "vtab/dtd": _vtab("dtd", 47, "validation[:200]"),
    "vtab/oxford_flowers102": _vtab("oxford_flowers102", 102, "validation[:200]"),
    "vtab/oxford_iiit_pet": _vtab("oxford_iiit_pet", 37, "train[2944:3144]"),
    "vtab/sun397": _vtab("sun397/tfds", 397, "validation[:200]"),
    "vtab/svhn": _vtab("svhn_cropped", 10, "train[65931:66131]"),
    # VTAB, specialized
    "vtab/patch_camelyon": _vtab("patch_camelyon", 2, "validation[:200]"),
    "vtab/eurosat": _vtab("eurosat/rgb", 10, "train[16200:16400]", test="train[80%:]"),
    "vtab/resisc45": _vtab("resisc45", 45, "train[18900:19100]", test="train[80%:]"),
    "vtab/diabetic_retinopathy": _vtab(
        "diabetic_retinopathy_detection/btgraham-300", 5, "validation[:200]"
    ),
    # VTAB, structured
    "vtab/clevr_count": _vtab(
        "clevr", 8, "train[63000:63200]", test="validation", label=_clevr_count, features=("objects",)
    ),
    "vtab/clevr_distance": _vtab(
        "clevr", 6, "train[63000:63200]", test="validation", label=_clevr_distance, features=("objects",)
    ),
    "vtab/dmlab": _vtab("dmlab", 6, "validation[:200]"),
    "vtab/dsprites_location": _vtab(
        "dsprites", 16, "train[589824:590024]", test=_DSPRITES_TEST, label=_dsprites_location,
        features=("label_x_position",), white=1,
    ),
    "vtab/dsprites_orientation": _vtab(
        "dsprites", 16, "train[589824:590024]", test=_DSPRITES_TEST, label=_dsprites_orientation,
        features=("label_orientation",), white=1,
    ),
    "vtab/kitti": _vtab(
        "kitti", 4, "validation[:200]", label=_kitti_distance, features=("objects",)
    ),
    "vtab/smallnorb_azimuth": _vtab(
        "smallnorb", 18, "test[:200]", test="test[50%:]", label="label_azimuth"
    ),
    "vtab/smallnorb_elevation": _vtab(
        "smallnorb", 9, "test[:200]", test="test[50%:]", label="label_elevation"
    ),
    "fewshot/caltech101": _few_shot("caltech101", 102),
    "fewshot/cars196": _few_shot("cars196", 196),
    "fewshot/cifar100": _few_shot("cifar100", 100),
    "fewshot/dtd": _few_shot("dtd", 47),
    "fewshot/oxford_iiit_pet": _few_shot("oxford_iiit_pet", 37),
    "fewshot/uc_merced": _few_shot("uc_merced", 21, "train[:1000]", "train[1000:]"),
    # 65,000 images have at least 30 of every class.
    "fewshot/imagenet2012": _few_shot("imagenet2012", 1000, "train[:65000]", "validation"),
}  # fmt: skip

VTAB = tuple(name for name in NAMED if name.startswith("vtab/"))
FEW_SHOT = tuple(name for name in NAMED if name.startswith("fewshot/"))


@dataclasses.dataclass(frozen=True)
class NamedMasks:
    """The masks of a TFDS data set.

    Attributes:
      image, mask: the features that have them.
      table: what the values of masks mean.
      instead: where TFDS has other masks than the papers, which and what to do; `table` is `None` then.
    """

    image: str
    mask: str
    table: ClassTable | None = None
    instead: str = ""


def _values(classes: dict[str, int], ignored: Iterable[int]) -> ClassTable:
    """Masks of these values; those of `ignored` count nowhere."""
    keys = tuple((value,) for value in (*classes.values(), *ignored))
    labels = tuple(range(len(classes)))
    return ClassTable(tuple(classes), keys, labels + (IGNORED,) * (len(keys) - len(labels)))


# The 19 classes that the authors train and judge on, by their ids in masks; 0 to 33 are all ids.
_CITYSCAPES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26,
    "truck": 27, "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip

# By TFDS's name, without the config.
MASKS: dict[str, NamedMasks] = {
    # Trimaps: 3 is what the authors did not classify, along the outline.
    "oxford_iiit_pet": NamedMasks(
        "image", "segmentation_mask", _values({"foreground": 1, "background": 2}, ignored=(3,))
    ),
    "cityscapes": NamedMasks(
        "image_left",
        "segmentation_label",
        _values(_CITYSCAPES, ignored=sorted({*range(34)} - {*_CITYSCAPES.values()})),
    ),
    "scene_parse150": NamedMasks(
        "image",
        "annotation",
        instead="the masks are those of instances: red is one of 100 categories, green the number of the instance. For "
        "ADE20K's 150 classes download ADEChallengeData2016 (sceneparsing.csail.mit.edu), put its images and "
        "annotations into images/ and masks/ of a folder with classes.csv, and set --config.data.name=masks "
        "--config.data.path=FOLDER",
    ),
    "coco": NamedMasks(
        "image",
        "panoptic_image",
        instead="the masks are panoptic, and how many segments an image has is not known before all records are read. "
        "Put COCO's images, its panoptic PNG files and their JSON file into images/train/, masks/train/ and "
        "masks/train.json of a folder, and set --config.data.name=masks --config.data.path=FOLDER",
    ),
}
