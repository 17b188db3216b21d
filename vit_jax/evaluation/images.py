"""The images that `vit_jax predict` is asked about: files, all those of a folder or of a pattern, or
standard input.
"""

import concurrent.futures
import dataclasses
import glob
import io
import itertools
import os
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.data.decode import eval_crop
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage
from vit_jax.data.sources.table import SUFFIXES, natural
from vit_jax.data.sources.unused import Unused


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
      sources: files; folders, whose images of all levels are taken, in the order of their names;
        patterns such as 'photos/**/*.jpg'; or '-': standard input, an image or the names of images, one
        a line.

    Raises:
      ConfigError: a folder has no images, or a pattern finds nothing; said at once.
    """
    sources = [matched for source in sources for matched in _matched(source)]
    for source in sources:
        if os.path.isdir(source) and not any(_below(source)):
            raise ConfigError(f"{source} has no images ({', '.join(SUFFIXES)})")
    return itertools.chain.from_iterable(map(_find, sources))


def read_ahead(
    files: Iterable[Named], data: Data, batch_size: int
) -> Iterator[list[tuple[Named, np.ndarray | BadImage]]]:
    """Images in batches of up to `batch_size`, decoded in threads while the caller works: not more than two
    batches ahead, so that the memory does not grow with their number.

    Args:
      data: how they are cut.
    """
    ready: queue.Queue = queue.Queue(maxsize=1)
    closed = threading.Event()

    def decode(file: Named) -> tuple[Named, np.ndarray | BadImage]:
        try:
            return file, file.read(data)
        except BadImage as error:
            return file, error

    def put(item) -> None:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                pass

    def fill() -> None:
        try:
            remaining = iter(files)
            with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                while several := list(itertools.islice(remaining, batch_size)):
                    put(list(pool.map(decode, several)))
                    if closed.is_set():
                        return
            put(None)
        except BaseException as error:  # noqa: BLE001  raised where the batches are used
            put(error)

    threading.Thread(target=fill, name="vit_jax-images", daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()


def _find(source: str) -> Iterator[Named]:
    if source == "-":
        return _standard_input(sys.stdin.buffer)
    names = _below(source) if os.path.isdir(source) else (source,)
    return map(Named, names)


def _matched(source: str) -> list[str]:
    """The files and folders that a pattern finds; what is none stays as it is."""
    if not glob.has_magic(source) or os.path.exists(source):
        return [source]
    found = sorted(glob.iglob(source, recursive=True), key=natural)
    if not found:
        raise ConfigError(
            f"{source} matches no file; a pattern is written in quotes, e.g. 'photos/*.jpg'"
        )
    return found


def _below(folder: str) -> Iterator[str]:
    unused = Unused()
    for place, folders, files in os.walk(folder):
        folders[:] = sorted((name for name in folders if name[0] != "."), key=natural)
        for name in sorted(files, key=natural):
            if name[0] != "." and unused.is_image(name):
                yield os.path.join(place, name)
    unused.report(folder)


def _standard_input(stream: io.BufferedReader) -> Iterator[Named]:
    # All formats of images have one of these bytes among the first; no path has.
    if any(byte in stream.peek(16)[:16] for byte in (b"\0", b"\xff", b"\x89")):
        return iter((Named("-", stream.read()),))
    return (Named(os.fsdecode(name)) for line in stream if (name := line.strip()))
