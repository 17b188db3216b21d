"""The images that `vit_jax predict` is asked about: files, all those of a folder, or standard input."""

import dataclasses
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.config import Data
from vit_jax.data.decode import eval_crop
from vit_jax.data.record import BadImage
from vit_jax.data.sources.table import SUFFIXES, natural


@dataclasses.dataclass(frozen=True)
class Named:
    """An image to come.

    Attributes:
      name: a path, or '-' for standard input.
      content: the bytes of the file, where they are at hand.
    """

    name: str
    content: bytes | None = None

    def read(self, data: Data) -> np.ndarray:
        """(H, W, C) uint8, as `config.data` cuts it. Raises `BadImage`."""
        try:
            content = self.content or epath.Path(self.name).read_bytes()
        except OSError as error:
            raise BadImage(self.name, error.strerror) from None
        return eval_crop(content, data, name=self.name)


def find(sources: Sequence[str]) -> Iterator[Named]:
    """The images of a command line, one after the other, as they are found.

    Args:
      sources: files; folders, whose images of all levels are taken, in the order of their names; or
        '-': standard input, an image or the names of images, one a line.

    Raises:
      ConfigError: a folder has no images; said at once.
    """
    for source in sources:
        if os.path.isdir(source) and not any(_below(source)):
            raise ConfigError(f"{source} has no images ({', '.join(SUFFIXES)})")
    return itertools.chain.from_iterable(map(_find, sources))


def _find(source: str) -> Iterator[Named]:
    if source == "-":
        return _standard_input(sys.stdin.buffer)
    names = _below(source) if os.path.isdir(source) else (source,)
    return map(Named, names)


def _below(folder: str) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted((name for name in folders if name[0] != "."), key=natural)
        for name in sorted(files, key=natural):
            if name[0] != "." and name.lower().endswith(SUFFIXES):
                yield os.path.join(place, name)


def _standard_input(stream: io.BufferedReader) -> Iterator[Named]:
    # All formats of images have one of these bytes among the first; no path has.
    if any(byte in stream.peek(16)[:16] for byte in (b"\0", b"\xff", b"\x89")):
        return iter((Named("-", stream.read()),))
    return (Named(os.fsdecode(name)) for line in stream if (name := line.strip()))
