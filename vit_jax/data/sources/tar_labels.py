"""Which files inside a tar file belong together: an image, the label beside it, and an array. Names may have dots:
plate7.A1.t0.png belongs to plate7.A1.t0.cls, or else to plate7.A1.cls, or else to plate7.cls.
"""

import os
from collections.abc import Iterable, Iterator, Sequence

from vit_jax.base.errors import ConfigError
from vit_jax.data.sources.text import readable

Label = str | tuple[str, ...]


class LabelsBeside:
    """The labels in KEY.cls and KEY.json of a tar file."""

    def __init__(self, path: str):
        """`path`: of the tar file, for errors."""
        self._path = path
        self._labels: dict[
            tuple[str, str], tuple[Label, str]
        ] = {}  # of (key, ending): and the member
        self._of_sample: dict[
            str, list[tuple[str, str]]
        ] = {}  # their keys, by the part before dots

    def add(self, member: str, label: Label) -> None:
        """Notes the label in a member.

        Raises:
          ConfigError: another member of the same name has another label.
        """
        key, suffix = os.path.splitext(member)
        place = (key, suffix.lower())
        known, _ = self._labels.setdefault(place, (label, member))
        if known != label:
            raise ConfigError(
                f"{self._path} has {readable(member)} twice, with the labels {known!r} and {label!r}: give each image "
                "a name of its own, and its label the same name"
            )
        if place not in (places := self._of_sample.setdefault(_sample(key), [])):
            places.append(place)

    def label_of(self, image: str) -> Label | None:
        """The label of an image: in the file with the most of its name, .cls before .json; `None` if there is none.

        Raises:
          ConfigError: only files with longer names are there, and their labels differ.
        """
        stem = os.path.splitext(image)[0]
        for key in _keys(stem):
            own = [self._labels[key, s] for s in (".cls", ".json") if (key, s) in self._labels]
            if own:
                self._check_agree(image, own)
                return own[0][0]
        longer = [
            place
            for place in self._of_sample.get(_sample(stem), ())
            if place[0].startswith(f"{stem}.")
        ]
        labels = {self._labels[place][0]: self._labels[place][1] for place in longer}
        if len(labels) > 1:
            members = " and ".join(map(readable, list(labels.values())[:2]))
            raise ConfigError(
                f"{self._path}, {readable(image)} has several labels, in {members}: give the image and its label the "
                "same name before the ending"
            )
        return next(iter(labels), None)

    def _check_agree(self, image: str, own: Sequence[tuple[Label, str]]) -> None:
        """Raises `ConfigError` if two files say other numbers; one may say the number and the other one the name."""
        numbers = [label for label, _ in own if isinstance(label, str) and label.isdecimal()]
        if len(own) == len(numbers) and len(set(map(int, numbers))) > 1:
            statements = " and ".join(f"{readable(member)} says {label}" for label, member in own)
            raise ConfigError(
                f"{self._path}, {readable(image)} has several labels, {statements}: remove the wrong one"
            )


def arrays_beside(names: Iterable[str], pictures: Iterable[str]) -> set[str]:
    """Those of .npy files that belong to a picture: their name without ending is the picture's, or continues it or is
    continued by it after a dot.
    """
    stems = {os.path.splitext(name)[0] for name in pictures}
    keys = {key for stem in stems for key in _keys(stem)}
    belonging = set()
    for name in names:
        stem = os.path.splitext(name)[0]
        if stem in keys or not stems.isdisjoint(_keys(stem)):
            belonging.add(name)
    return belonging


def _keys(stem: str) -> Iterator[str]:
    """'a/b.c.d' -> 'a/b.c.d', 'a/b.c', 'a/b'."""
    folder, base = os.path.split(stem)
    while base:
        yield os.path.join(folder, base)
        base = base.rpartition(".")[0]


def _sample(stem: str) -> str:
    """'a/b.c.d' -> 'a/b', which WebDataset calls the key."""
    folder, base = os.path.split(stem)
    return os.path.join(folder, base.partition(".")[0])
