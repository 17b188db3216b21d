"""The scenes of `digit_scenes` with a caption each, which names their digits and not where they are: 'one and seven and
seven'. Some scenes are empty: 'nothing'.
"""

import dataclasses

import numpy as np

from vit_jax.data.labels import segments
from vit_jax.data.options import Data
from vit_jax.data.record import DataSet, Record
from vit_jax.data.sources import digit_scenes, fingerprint
from vit_jax.data.sources.digit_pairs import NAMES

_EMPTY = 10  # of this many scenes one


@dataclasses.dataclass(frozen=True)
class DigitScenePairs:
    """Some of the scenes; labels are captions."""

    scenes: digit_scenes.DigitScenes
    classes: tuple[str, ...] = ()
    multi_label: bool = False
    labels: None = None

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> Record:
        scene = self.scenes[index]
        name = scene.name.replace("scenes", "scene_pairs")
        if self._is_empty(index):
            return Record(np.zeros_like(scene.image), ("nothing",), name)
        return Record(scene.image, _captions(scene.label), name)

    def captions(self, index: int) -> tuple[str, ...]:
        """The captions of an image."""
        return self[index].label

    def fingerprint(self) -> str:
        """A fingerprint of which scenes these are."""
        return fingerprint.digest("digit_scene_pairs", self.scenes.scenes)

    def _is_empty(self, index: int) -> bool:
        return self.scenes.scenes[index][1] % _EMPTY == 0


def open_digit_scene_pairs(config_data: Data) -> DataSet:
    """'train' (10,000 scenes) and 'test' (200)."""
    scenes = digit_scenes.open_digit_things(config_data)
    return dataclasses.replace(
        scenes,
        where="the data set 'digit_scene_pairs'",
        read=lambda parts: DigitScenePairs(scenes.read(parts)),
        identity=lambda: "digit_scene_pairs",
    )


def _captions(label_map: np.ndarray) -> tuple[str, ...]:
    """One, of all digits in a scene, the smallest first."""
    things = np.unique(label_map[segments.things_of(label_map) > 0])
    digits = sorted(segments.classes_of(things).tolist())
    return (" and ".join(NAMES[digit - 1] for digit in digits),)
