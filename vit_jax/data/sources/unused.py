"""The files among images that a reader does not use, since their names do not end like an image's: how many there are
of which types. Photos of cameras and phones are among these, which nobody should miss in silence.
"""

import collections
import functools
import os

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
_TYPES = 5  # in a message


class Unused:
    """Counts the files that are not images by the ends of their names."""

    def __init__(self):
        self._counts, self._first = collections.Counter(), {}

    def is_image(self, name: str) -> bool:
        """Whether a file's name ends like an image's; if it does not, the file is counted."""
        suffix = os.path.splitext(name)[1].lower()
        if suffix in SUFFIXES:
            return True
        if name == INDEX:  # our own
            return False
        self._counts[suffix] += 1
        self._first.setdefault(suffix, name)
        return False

    def counts(self) -> dict[str, list]:
        """By the ends of names how many files there are, and the first of them."""
        return {suffix: [count, self._first[suffix]] for suffix, count in self._counts.items()}

    def add(self, counts: dict[str, list]) -> None:
        """Adds what `counts` of another gave."""
        for suffix, (count, first) in counts.items():
            self._counts[suffix] += count
            self._first.setdefault(suffix, first)

    def text(self) -> str:
        """'120 .heic, 3 .txt'; the most frequent types, pictures first; '' if all files are images."""
        order = sorted(self._counts, key=lambda s: (s not in PICTURES, -self._counts[s], s))
        named = [f"{self._counts[s]:,} {s or 'without an ending'}" for s in order[:_TYPES]]
        others = sum(self._counts[s] for s in order[_TYPES:])
        return ", ".join([*named, *([f"{others:,} of other types"] if others else [])])

    def report(self, where: str) -> None:
        """Logs what `where` has besides images, once a process: a warning if pictures are among it."""
        if self._counts:
            pictures = [s for s in self._counts if s in PICTURES]
            first = self._first[pictures[0]] if pictures else ""
            _report(where, self._counts.total(), self.text(), readable(first))


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
