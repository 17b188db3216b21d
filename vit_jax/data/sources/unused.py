"""Counts of the files among images that a reader does not use, most of them since their names do not end like an
image's. Photos of cameras and phones are among these, which nobody should miss in silence.
"""

import collections
import functools
import os
from collections.abc import Collection

from absl import logging

from vit_jax.data.sources.stored_index import INDEX
from vit_jax.data.sources.table import SUFFIXES
from vit_jax.data.sources.text import readable

# Pictures and films that are not read; whoever has such files most likely wants them to be.
PICTURES = (
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".jpe", ".jfif", ".hdr", ".exr", ".pfm", ".ppm", ".pgm", ".pam",
    ".cr2", ".cr3", ".nef", ".nrw", ".arw", ".dng", ".raf", ".rw2", ".orf", ".pef", ".srw", ".raw",
    ".psd", ".xcf", ".svg", ".eps", ".pdf", ".dcm", ".nii", ".ico", ".tga", ".mov", ".mp4", ".avi",
)  # fmt: skip
HIDDEN = "hidden, or in hidden folders or those of a file system"
BESIDE_CLASSES = "images beside the folders of classes"
_TYPES = 5  # in a message


class Unused:
    """Counts the files that are no examples: by the ends of their names those that are not images, others by a reason,
    which does not begin with a dot.
    """

    def __init__(self):
        self._counts, self._first = collections.Counter(), {}

    def is_image(self, name: str) -> bool:
        """Whether a file's name ends like an image's; if it does not, the file is counted."""
        suffix = os.path.splitext(name)[1].lower()
        if suffix in SUFFIXES:
            return True
        if name == INDEX:  # our own
            return False
        self.skip(suffix, [name])
        return False

    def skip(self, why: str, names: Collection[str]) -> None:
        """Counts files that are skipped for another reason."""
        if names:
            self._counts[why] += len(names)
            self._first.setdefault(why, next(iter(names)))

    def counts(self) -> dict[str, list]:
        """By the ends of names, or by reasons, how many files there are, and the first of them."""
        return {why: [count, self._first[why]] for why, count in self._counts.items()}

    def add(self, counts: dict[str, list]) -> None:
        """Adds what `counts` of another gave."""
        for why, (count, first) in counts.items():
            self._counts[why] += count
            self._first.setdefault(why, first)

    def text(self) -> str:
        """'120 .heic, 3 .txt'; the most frequent types, pictures first; '' if all files are images."""
        types = self._types()
        named = [f"{count:,} {suffix}" for suffix, count in list(types.items())[:_TYPES]]
        others = sum(list(types.values())[_TYPES:])
        return ", ".join([*named, *([f"{others:,} of other types"] if others else [])])

    def reasons(self) -> dict[str, int]:
        """The number of files that are no examples, by reason: the ends of names, pictures first, then others."""
        others = {why: n for why, n in self._counts.items() if why and not why.startswith(".")}
        return self._types() | others

    def warn_of_pictures(self, where: str) -> None:
        """Logs a warning if pictures are among the files, once a process."""
        if any(suffix in PICTURES for suffix in self._counts):
            self.report(where)

    def report(self, where: str) -> None:
        """Logs what `where` has besides images, once a process: a warning if pictures are among it."""
        if types := self._types():
            pictures = [suffix for suffix in self._counts if suffix in PICTURES]
            first = self._first[pictures[0]] if pictures else ""
            _report(where, sum(types.values()), self.text(), readable(first))

    def _types(self) -> dict[str, int]:
        """The number of files that are not images by the ends of their names; the most frequent first, but pictures
        before others.
        """
        types = [why for why in self._counts if not why or why.startswith(".")]
        types.sort(key=lambda s: (s not in PICTURES, -self._counts[s], s))
        return {suffix or "without an ending": self._counts[suffix] for suffix in types}


@functools.cache  # A run opens its data once to train and once to evaluate.
def _report(where: str, total: int, text: str, picture: str) -> None:
    if picture:
        logging.warning(
            "%s: %d files are not used, since images are read from files that end in %s: %s; the first picture among "
            "them is %s. Convert them to JPEG or PNG to use them",
            where, total, " ".join(SUFFIXES), text, picture,
        )  # fmt: skip
    else:
        logging.info("%s: %d files are not used, they are no images: %s", where, total, text)
