"""Images with captions that TFDS has prepared, such as coco_captions: the captions of an example are its feature
`captions`, `caption`, `texts`, `text` or `title`, a text, several, or objects with a text each.
"""

import numpy as np
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataSet, Record
from vit_jax.data.sources.captions import TEXT, text_of
from vit_jax.data.sources.split_names import aliases
from vit_jax.data.sources.tfds import Tfds, find_folder
from vit_jax.data.sources.tfds_masks import choose_features

_INFO = "dataset_info.json"


class TfdsPairs(Tfds):
    """Parts of a data set in the folder that TFDS prepared; labels are captions."""

    def _choose_label(self, features, folder: str, name: str) -> tuple:
        return _captions_feature(features, folder), (), False

    def _record(self, index: int, stored: bytes) -> Record:
        try:
            return super()._record(index, stored)
        except UnicodeDecodeError as error:
            name = f"{self._where}, record {index}"
            raise BadImage(name, f"its caption cannot be read: {error}") from None

    def _label_of(self, fields: dict) -> tuple[str, ...]:
        captions = fields[self._label]
        if isinstance(captions, dict):
            captions = captions[next(name for name in TEXT if name in captions)]
        return text_of([bytes(text).decode() for text in np.ravel(captions)])


def is_prepared(path: epath.Path) -> bool:
    """Whether TFDS has prepared a data set, a variant or a version of one in this folder."""
    return any(any(path.glob(f"{below}{_INFO}")) for below in ("", "*/", "*/*/"))


def open_tfds_pairs(path: epath.Path, config_data: Data) -> DataSet:
    """The pairs in the folder of a data set, `NAME`, of its variant or of a version.

    Raises:
      ConfigError: no feature has captions, or none is the image.
    """
    if not (path / _INFO).exists():
        path = find_folder(path.parent, path.name)

    import tensorflow_datasets as tfds

    folder = str(path)
    info = tfds.builder_from_directory(folder).info
    chosen = choose_features(info.features, config_data, info.name, folder)
    _captions_feature(info.features, folder)
    sizes = {split: part.num_examples for split, part in info.splits.items()}
    return DataSet(
        folder, sizes, lambda parts: TfdsPairs(folder, parts, "", chosen), aliases(sizes)
    )


def _captions_feature(features, folder: str) -> str:
    """The name of the feature with the captions."""
    names = [name for name in TEXT if name in features]
    if not names:
        raise ConfigError(
            f"{folder} has no captions, a feature {', '.join(TEXT[:-1])} or {TEXT[-1]}; it has: "
            f"{', '.join(sorted(features))}"
        )
    return names[0]
