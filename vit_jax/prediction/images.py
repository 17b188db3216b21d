"""The images that are asked about: by `vit_jax predict` files, all those of a folder or of a pattern, or
standard input; by a program of Python also those that it has in memory.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath
from PIL import Image

from vit_jax.base import places
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.outputs import FORMULAS
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data import crops
from vit_jax.data.decoding.decode import eval_crop, pillow_pixels
from vit_jax.data.decoding.images import MOST_BYTES, read_file
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage
from vit_jax.data.sources.table import SUFFIXES, natural
from vit_jax.data.sources.trees import tree_at
from vit_jax.data.sources.unused import Unused
from vit_jax.devices import local
from vit_jax.models.contract import PatchBatch


@dataclasses.dataclass(frozen=True)
class Named:
    """An image to come.

    Attributes:
      name: a path, or '-' for standard input.
      content: the bytes of the file, or the pixels, where they are at hand.
      folder: that was asked about and has it, at some level; `None` for an image that was named by itself.
    """

    name: str
    content: bytes | np.ndarray | None = None
    folder: str | None = None

    def read(self, data: Data) -> np.ndarray:
        """(H, W, C) uint8, as `config.data` cuts it. Raises `BadImage`."""
        return eval_crop(self.read_content(), data, name=self.name)

    def read_content(self) -> bytes | np.ndarray:
        """The bytes of the file, or the pixels. Raises `BadImage`."""
        return read_file(self.name) if self.content is None else self.content


class Compiled(NamedTuple):
    """What is computed of images, compiled once for each size of batches, to be used again.

    Attributes:
      data: how the images are cut, the section `config.data`.
      function: of weights and images (B, H, W, C) uint8; its arguments after these are static.
      native: patch and number of patches of images at sizes of their own, of which the function takes a `PatchBatch`;
        `None`: all have one size.
    """

    data: Data
    function: Callable[..., Any]
    native: tuple[int, int] | None = None

    def read(self, file: Named) -> np.ndarray:
        """The pixels of an image as the function takes it, (H, W, C) uint8. Raises `BadImage`."""
        if self.native is None:
            return file.read(self.data)
        from vit_jax.data import native_sizes

        size = dict(zip(("patch", "tokens"), self.native, strict=True))
        return native_sizes.read_image(file.read_content(), self.data, name=file.name, **size)

    def batch(
        self, images: Sequence[tuple[Named, np.ndarray | BadImage]], rows: int
    ) -> tuple[np.ndarray | PatchBatch, np.ndarray]:
        """Those that are images as one batch, (rows, H, W, C) uint8 or a `PatchBatch`, and which of its rows are
        images. One shape, one compilation.
        """
        good = [image for _, image in images if not isinstance(image, BadImage)]
        real = np.arange(rows) < len(good)
        if self.native is None:
            batch = np.zeros((rows, *crops.shape(self.data)), np.uint8)
            batch[: len(good)] = good or 0
            return batch, real
        from vit_jax.data import native_sizes

        size = dict(zip(("patch", "tokens"), self.native, strict=True), channels=self.data.channels)
        return native_sizes.pad_batch(good, rows=rows, **size), real


def native_size(run: TrainedModel, data: Data, tokens: int | None) -> tuple[int, int] | None:
    """`Compiled.native` for images of up to `tokens` patches; 0: all have one size; `None`: as the run was trained.

    Raises:
      ConfigError: the model takes images of one size alone, or the run permutes them.
    """
    tokens = data.native_tokens if tokens is None else tokens
    if not tokens:
        return None
    if reason := run.model_config.fixed_size_reason:
        raise ConfigError(
            f"native_tokens is {tokens}, but the model takes images of one size alone: {reason}"
        )
    if data.permute != "none":
        raise ConfigError(
            f"native_tokens needs config.data.permute='none', which is {data.permute!r} in this run"
        )
    patch = run.model_config.patch
    logging.info(
        "in place of that, each image is seen whole, at the size of up to %d patches of %d pixels", tokens, patch
    )  # fmt: skip
    return patch, tokens


def check_one_size(data: Data, what: str) -> None:
    """Raises `ConfigError` for a run whose images have sizes of their own: `what` takes images of one."""
    if data.native_tokens:
        raise ConfigError(
            f"{what} has images of one size, and the run was trained with images at sizes of their own "
            f"(config.data.native_tokens = {data.native_tokens}), as 'vit_jax predict' and 'evaluate' see them; for "
            "images cut to config.data.image_size set --config.data.native_tokens=0"
        )


# A path, the bytes of a file, a file that is open or in memory, an image of Pillow.
ImageFile = str | os.PathLike | bytes | bytearray | memoryview | BinaryIO | Image.Image
_ONE_IMAGE = (Image.Image, str, os.PathLike, bytes, bytearray, memoryview)
Pixels = np.ndarray | jax.Array  # (H, W, C) or (H, W); of several images (n, H, W, C)
ImageLike = ImageFile | Pixels


def named_images(images: ImageLike | Iterable[ImageLike]) -> tuple[list[Named], bool]:
    """The images that a program of Python passes, and whether it is one alone, not a list of them.

    Args:
      images: one, or several of any sizes; an array (n, H, W, C) is several.

    Raises:
      ConfigError: something is no image of these kinds.
    """
    is_array = isinstance(images, np.ndarray | jax.Array)
    is_file = isinstance(images, _ONE_IMAGE) or _is_open_file(images)
    if is_file or is_array and images.ndim < 4:
        return [_named_image(images, "the image")], True
    if not isinstance(images, Iterable) or isinstance(
        images, Mapping
    ):  # of which keys would be taken
        raise _no_image(images, "the image")
    return [_named_image(image, f"image {i}") for i, image in enumerate(images)], False


def some_images(images: ImageLike | Iterable[ImageLike]) -> list[Named]:
    """`named_images` where there must be one at least, since results are stacked."""
    named, _ = named_images(images)
    if not named:
        raise ConfigError("images is empty: pass one image or several")
    return named


def in_few_sizes(given: Sequence[Named], most: int) -> Iterator[Sequence[Named]]:
    """Images in parts whose batches of up to `most` have few different sizes, so that little is compiled."""
    whole = len(given) // most * most
    if whole:
        yield given[:whole]
    start = whole
    for size in itertools.takewhile(bool, (most >> i for i in range(1, most.bit_length()))):
        if (len(given) - whole) & size:
            yield given[start : start + size]
            start += size


def _named_image(image: ImageLike, name: str) -> Named:
    match image:
        case str() | os.PathLike():
            return Named(_known(os.fspath(image)))
        case bytes() | np.ndarray():
            return Named(name, image)
        case bytearray() | memoryview():
            return Named(name, bytes(image))
        case jax.Array():
            return Named(name, np.asarray(image))
        case Image.Image():
            return Named(name, pillow_pixels(image))
    if _is_open_file(image):
        return Named(name, _content_of(image, name))
    raise _no_image(image, name)


def _is_open_file(image: object) -> bool:
    """Whether it is a file that is open, or one in memory such as a `BytesIO`."""
    return callable(getattr(image, "read", None)) and callable(getattr(image, "seek", None))


def _content_of(file: BinaryIO, name: str) -> bytes:
    """All bytes of an open file, wherever it stands.

    Raises:
      ConfigError: it was opened as text, or cannot be read.
    """
    try:
        file.seek(0)
        content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # closed, a pipe, or text that is none
        raise ConfigError(f"{name} is an open file that cannot be read: {error}") from error
    if not isinstance(content, bytes):
        raise ConfigError(f"{name} is a file opened as text: open it with mode 'rb'")
    return content


def _no_image(image: object, name: str) -> ConfigError:
    return ConfigError(
        f"{name} is of the type {type(image).__name__}: pass a path, the bytes of a file, an open file, an image of "
        "Pillow, or an array (height, width, channels)"
    )


def find_images(sources: Sequence[str]) -> Iterator[Named]:
    """The images of a command line, one after the other, as they are found.

    Args:
      sources: local or in buckets: files; folders, whose images of all levels are taken, in the order of their names,
        behind links too, as in training; patterns such as 'photos/**/*.jpg'; or '-': standard input, an image or the
        names of images, one a line.

    Raises:
      ConfigError: a folder has no images, a pattern finds nothing, or a source is neither local nor in
        a bucket; raised at once.
    """
    sources = [_as_path(path) for source in sources for path in _matched(_known(source))]
    folders = {source: _below(source) for source in sources if _is_folder(source)}
    for folder, names in folders.items():
        if not names:
            raise ConfigError(f"{folder} has no images ({', '.join(SUFFIXES)})")

    def find(source: str) -> Iterator[Named]:
        if source == "-":
            return _standard_input(sys.stdin.buffer)
        if source in folders:
            return (Named(name, folder=source) for name in folders[source])
        return iter((Named(source),))

    return itertools.chain.from_iterable(map(find, sources))


def read_ahead(
    files: Iterable[Named], read: Callable[[Named], np.ndarray], batch_size: int
) -> Iterator[list[tuple[Named, np.ndarray | BadImage]]]:
    """Images in batches of up to `batch_size`, decoded in threads while the caller works: not more than two
    batches ahead, so that the memory does not grow with their number.

    Args:
      read: what makes the pixels of one, such as `Compiled.read`.
    """
    ready: queue.Queue = queue.Queue(maxsize=1)
    closed = threading.Event()

    def decode(file: Named) -> tuple[Named, np.ndarray | BadImage]:
        try:
            return file, read(file)
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
            with concurrent.futures.ThreadPoolExecutor(local.own_cores()) as pool:
                while files_of_batch := list(itertools.islice(remaining, batch_size)):
                    put(list(pool.map(decode, files_of_batch)))
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


def check_all_read(good: int, bad: int) -> None:
    """Raises `UserError` if some images could not be read; each of them is in the log."""
    if bad:
        raise UserError(f"{bad} of {good + bad} images cannot be read, see above")


def _known(source: str) -> str:
    """A source by the name that messages and results give it: as it is, a `file://` address as the
    path that it means.
    """
    if source == "-":
        return source
    place = places.locate(source, "IMAGE")
    return str(place) if places.is_address(source) else source


def _is_folder(source: str) -> bool:
    return epath.Path(source).is_dir() if places.in_bucket(source) else os.path.isdir(source)


def _matched(source: str) -> list[str]:
    """The files and folders that a pattern finds; what is none stays as it is."""
    if not glob.has_magic(source) or places.exists(source):
        return [source]
    paths = sorted(places.matching(source), key=natural)
    if not paths:
        raise ConfigError(
            f"{source} matches no file; a pattern is written in quotes, e.g. 'photos/*.jpg'"
        )
    return paths


def _below(folder: str) -> list[str]:
    """The images of a folder and those below it, read as training does."""
    tree = tree_at(epath.Path(folder))
    unused = Unused()
    names = [name for name in tree.files_below("") if unused.is_image(os.path.basename(name))]
    unused.report(folder)
    if links := tree.links_back:
        logging.info("%d links lead back to folders above them: %s", len(links), min(links))
    return [os.path.join(folder, name) for name in names]


def _standard_input(stream: io.BufferedReader) -> Iterator[Named]:
    # All formats of images have one of these bytes among the first; no path has.
    if any(byte in stream.peek(16)[:16] for byte in (b"\0", b"\xff", b"\x89")):
        return iter((Named("-", stream.read(MOST_BYTES + 1)),))
    return (Named(_as_path(os.fsdecode(name))) for line in stream if (name := line.strip()))


def _as_path(name: str) -> str:
    """A path: './-1.png' for '-1.png' and others that a spreadsheet would compute, so that outputs agree on names."""
    return f"./{name}" if name.startswith(FORMULAS) and name != "-" else name
