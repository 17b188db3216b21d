"""ObjectNet (Barbu et al. 2019): everyday objects in unusual places, as a folder with a folder for each of its
313 classes. Of these, 113 are also classes of ImageNet, whose images alone are scored.

Its licence allows to evaluate only: nothing is trained on it.
"""

import dataclasses

import numpy as np

from vit_jax.base.errors import ConfigError
from vit_jax.data.decoding.decode import decode
from vit_jax.data.options import Data
from vit_jax.data.record import DataSet, Record, Source
from vit_jax.data.sources.folder import open_folder

CLASSES = 313
_BORDER = 2  # red pixels around every image
# ImageNet's class: ObjectNet's, both numbered from 0; the latter by the names of the folders in their order
# (abarbu/objectnet-template-tensorflow, mapping_files/imagenet_pytorch_id_to_objectnet_id.json).
IMAGENET = {
    409: 1, 530: 1, 414: 2, 954: 4, 419: 5, 790: 8, 434: 9, 440: 13, 703: 16, 671: 17, 444: 17, 446: 20, 455: 29,
    930: 35, 462: 38, 463: 39, 499: 40, 473: 45, 470: 46, 487: 48, 423: 52, 559: 52, 765: 52, 588: 57, 550: 64,
    507: 67, 673: 68, 846: 75, 533: 78, 539: 81, 630: 86, 740: 88, 968: 89, 729: 92, 549: 98, 545: 102, 567: 109,
    578: 83, 589: 112, 587: 115, 560: 120, 518: 120, 606: 124, 608: 128, 508: 131, 618: 132, 619: 133, 620: 134,
    951: 138, 623: 139, 626: 142, 629: 143, 644: 149, 647: 150, 651: 151, 659: 153, 664: 154, 504: 157, 677: 159,
    679: 164, 950: 171, 695: 173, 696: 175, 700: 179, 418: 182, 749: 182, 563: 182, 720: 188, 721: 190, 725: 191,
    728: 193, 923: 196, 731: 199, 737: 200, 811: 201, 742: 205, 761: 210, 769: 216, 770: 217, 772: 218, 773: 219,
    774: 220, 783: 223, 792: 229, 601: 231, 655: 231, 689: 231, 797: 232, 804: 235, 806: 236, 809: 237, 813: 238,
    632: 239, 732: 248, 759: 248, 828: 250, 850: 251, 834: 253, 837: 255, 841: 256, 842: 257, 610: 258, 851: 259,
    849: 268, 752: 269, 457: 273, 906: 273, 859: 275, 999: 276, 412: 284, 868: 286, 879: 289, 882: 292, 883: 293,
    893: 297, 531: 298, 898: 299, 543: 302, 778: 303, 479: 304, 694: 304, 902: 306, 907: 307, 658: 309, 909: 310,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ObjectNet:
    """The images that are scored, without their border. Labels are ImageNet's classes, by number; several of them
    where several are the same class here.

    Attributes:
      source: all images.
      places: of those that are scored.
    """

    source: Source
    places: np.ndarray
    classes: tuple[str, ...] = tuple(map(str, range(1000)))
    multi_label: bool = True

    @property
    def labels(self) -> tuple[tuple[int, ...], ...]:
        """Of all examples."""
        return tuple(_OF_IMAGENET[int(label)] for label in self.source.labels[self.places])

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Record:
        record = self.source[int(self.places[index])]
        pixels = decode(record.image, name=record.name)[_BORDER:-_BORDER, _BORDER:-_BORDER]
        return Record(pixels, _OF_IMAGENET[int(record.label)], record.name)

    def fingerprint(self) -> str:
        """Of the folder."""
        return self.source.fingerprint()


def open_objectnet(config_data: Data) -> DataSet:
    """The folder at `config_data.path`; all is 'test'.

    Raises:
      ConfigError: it has not the 313 classes.
    """
    folder = open_folder(dataclasses.replace(config_data, holdout=1.0))

    def read(parts: list[tuple[str, int, int]]) -> ObjectNet:
        source = folder.read(parts)
        if len(source.classes) != CLASSES:
            raise ConfigError(
                f"{folder.where} has {len(source.classes)} class folders, and ObjectNet has {CLASSES}: what counts as "
                "right needs all of them"
            )
        return ObjectNet(source, np.flatnonzero(np.isin(source.labels, list(_OF_IMAGENET))))

    return dataclasses.replace(folder, read=read)


def _inverse() -> dict[int, tuple[int, ...]]:
    inverse: dict[int, tuple[int, ...]] = {}
    for imagenet, here in sorted(IMAGENET.items()):
        inverse[here] = (*inverse.get(here, ()), imagenet)
    return inverse


_OF_IMAGENET = _inverse()
