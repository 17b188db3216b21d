"""Which features of a TFDS data set have the image and the mask of an example, and what the mask's values mean.

Reading them is in `tfds.py`; what is known of single data sets is in `known_sets.py`.
"""

import dataclasses
import re
from typing import TYPE_CHECKING

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.data.labels.masks import MAX_CLASSES, ClassTable, numbered
from vit_jax.data.options import AUTO, Data
from vit_jax.data.sources.known_sets import MASKS, NamedMasks
from vit_jax.data.sources.masks import read_table

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


@dataclasses.dataclass(frozen=True)
class ImageAndMask:
    """The features of an example that are read.

    Attributes:
      image: the name of the one with the image.
      mask: of the one with the mask; '': labels are classes.
      table: what the values of masks mean; `None` without masks.
    """

    image: str = "image"
    mask: str = ""
    table: ClassTable | None = None


def choose_features(
    features: "tfds.features.FeaturesDict", config_data: Data, name: str, where: str
) -> ImageAndMask:
    """The image and the mask that `config_data` names, or that the data set has.

    Args:
      name: TFDS's name of the data set, 'name', 'name/config' or 'name:1.0.0'.
      where: what errors call it.

    Raises:
      ConfigError: a feature is not there or is no image, there are several to choose from, or nothing says
        what the values of masks mean.
    """
    import tensorflow_datasets as tfds

    # Sorted: TFDS lists features in another order in every process.
    features = dict(sorted(features.items()))
    pictures = {
        key: feature
        for key, feature in features.items()
        if isinstance(feature, tfds.features.Image)
    }
    known = MASKS.get(re.split("[/:]", name)[0])
    known = known if known and {known.image, known.mask} <= pictures.keys() else None
    image, mask = config_data.image_feature, config_data.mask_feature
    for field, wanted in (("image_feature", image), ("mask_feature", mask)):
        if wanted and (field, wanted) != ("mask_feature", AUTO):
            _check_feature(field, wanted, features, pictures, where)
    if not image:
        image = known.image if known else _find_image(features, pictures, mask, where)
    if not mask:
        return ImageAndMask(image)
    if mask == AUTO:
        mask = known.mask if known else _find_mask(features, pictures, image, where)
    if mask == image:
        raise ConfigError(
            f"{where}: the feature {mask!r} is the image, and cannot be the mask too: set "
            "config.data.image_feature or mask_feature to another"
        )
    known = known if known and mask == known.mask else None
    return ImageAndMask(image, mask, _table(features[mask], mask, config_data, known, where))


def _check_feature(field: str, wanted: str, features: dict, pictures: dict, where: str) -> None:
    """Raises `ConfigError` unless a feature is there and is a picture."""
    if wanted not in features:
        raise ConfigError(
            f"config.data.{field} = {wanted!r}: {where} has no such feature{nearest(wanted, features)}"
        )
    if wanted not in pictures:
        raise ConfigError(
            f"config.data.{field} = {wanted!r} is a {type(features[wanted]).__name__} in {where}: set one of the "
            f"images, {', '.join(pictures)}"
        )


def _find_image(features: dict, pictures: dict, mask: str, where: str) -> str:
    """The feature 'image', or else the only one with three channels that is not the `mask`."""
    if "image" in features:
        return "image"
    candidates = [
        key for key, feature in pictures.items() if feature.shape[-1] == 3 and key != mask
    ]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise ConfigError(f"{where} has no feature 'image'; it has: {', '.join(features)}")
    raise ConfigError(
        f"{where} has several images, {', '.join(candidates)}: set --config.data.image_feature="
        f"{candidates[0]}, or another"
    )


def _find_mask(features: dict, pictures: dict, image: str, where: str) -> str:
    """The only picture beside the image."""
    candidates = [key for key in pictures if key != image]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise ConfigError(
            f"{where} has no feature with masks beside {image!r}; it has: {', '.join(features)}. Set "
            "--config.data.mask_feature= (empty) to learn from classes of images"
        )
    raise ConfigError(
        f"{where} has several features that may be the mask, {', '.join(candidates)}: set "
        f"--config.data.mask_feature={candidates[0]}, or another"
    )


def _table(
    feature: "tfds.features.Image",
    mask: str,
    config_data: Data,
    known: NamedMasks | None,
    where: str,
) -> ClassTable:
    """What the values of masks mean: first as the user says, then as the data set's authors do, then by the names
    that TFDS has.
    """
    if config_data.mask_table:
        return read_table(places.locate(config_data.mask_table, "config.data.mask_table"))
    if known and known.table is None:
        raise ConfigError(f"{where}: {known.instead}")
    if known:
        return known.table
    count = getattr(feature, "num_classes", None)  # a LabeledImage may have one
    if not count:
        raise ConfigError(
            f"{where}: nothing says what the values of the feature {mask!r} mean: list them in a CSV file with the "
            "columns name and value, or name, red, green and blue, and set --config.data.mask_table=FILE"
        )
    if not 2 <= count <= MAX_CLASSES:
        raise ConfigError(
            f"{where}: the feature {mask!r} has {count} classes, and segmentation needs 2 to {MAX_CLASSES}: list "
            "those that count in a CSV file, and set --config.data.mask_table=FILE"
        )
    return numbered(feature.names)
