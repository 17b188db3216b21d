"""One ArrayRecord file of a prepared data set: made from a range of a source, by threads, in order.

What is in a file depends on the source, the range and the options alone, never on how many threads
worked or how often the command was started: bytes are the same each time.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np

from vit_jax.data.options import MAX_PIXELS
from vit_jax.data.preparation.check import check_label, encoded, examine
from vit_jax.data.preparation.reencode import reencode
from vit_jax.data.record import BadImage, Record, Source
from vit_jax.data.sources.prepared import pack

_BLOCK = 16  # images that a thread takes at a time


@dataclasses.dataclass(frozen=True)
class Options:
    """How images are stored.

    Attributes:
      max_side, quality: see `reencode`; both 0: as they are.
      max_pixels: an image of more is bad.
    """

    max_side: int = 0
    quality: int = 0
    max_pixels: int = MAX_PIXELS

    @property
    def reencodes(self) -> bool:
        """Whether images are encoded again."""
        return bool(self.max_side or self.quality)


AS_THEY_ARE = Options()


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file to make: examples `start` to `stop` of a split."""

    split: str
    start: int
    stop: int
    file: str


def plan(sizes: dict[str, int], shards: int, per_shard: int) -> list[Shard]:
    """The files of every split: `shards` each, or, if that is 0, of about `per_shard` examples."""
    found = []
    for split, size in sizes.items():
        count = min(size, shards or -(-size // per_shard))
        for i in range(count):
            start, stop = size * i // count, size * (i + 1) // count
            file = f"{split}-{i:05d}-of-{count:05d}.array_record"
            found.append(Shard(split, start, stop, file))
    return found


def write(
    shard: Shard,
    source: Source,
    folder: pathlib.Path,
    root: str,
    options: Options,
    pool: concurrent.futures.ThreadPoolExecutor,
    progress: Callable[[int], None],
) -> dict:
    """Makes the file of `shard` in `folder`; it gets its name when it is whole. `root`, the place
    of the source, is cut off the names of images.

    Returns:
      {"file", "examples", "bytes", "sha256"}, and of this split: "labels" (of the examples; `None`
      where they have none or several), "class_counts", "image_bytes" (of the originals, and as they
      are stored), "findings": what the report says.

    Raises:
      OSError: the file cannot be written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    unfinished = folder / f"{shard.file}.unfinished"
    unfinished.unlink(missing_ok=True)
    classes, one_label = len(source.classes), bool(source.classes) and not source.multi_label
    labels, counts, before, after, examples, findings = [], [0] * classes, 0, 0, 0, []
    try:
        # One record a group: any can be read alone. Images do not compress.
        writer = ArrayRecordWriter(str(unfinished), "group_size:1,uncompressed")
        for index, item in _in_order(shard, source, pool, root, options):
            for what, why in item.findings:
                place = {"what": what, "split": shard.split, "index": index}
                findings.append(place | {"name": item.name, "why": why})
            if item.record is not None:
                with _writing():
                    writer.write(pack(item.record))
                examples += 1
                before, after = before + item.original_bytes, after + len(item.record.image)
                label = item.record.label
                labels.append(label)
                for one in (label,) if one_label else label or ():
                    counts[one] += 1
            progress(1)
        with _writing():
            writer.close()
        digest = sha256(unfinished)
        _keep(unfinished)
    except OSError:
        unfinished.unlink(missing_ok=True)  # most likely the disk is full
        raise
    size = unfinished.stat().st_size
    os.replace(unfinished, folder / shard.file)
    return {
        "file": shard.file,
        "examples": examples,
        "bytes": size,
        "sha256": digest,
        "labels": labels if one_label else None,
        "class_counts": counts,
        "image_bytes": [before, after],
        "findings": findings,
    }


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """ArrayRecord's errors as those of any other file: 'write() failed: No space left on device; …'."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(str(error).split(";")[0].removeprefix("write() failed: ")) from error


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes `value` to `path`, which is either whole or not there."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_labels(path: pathlib.Path, labels: list[int]) -> None:
    """Writes labels as `prepared.Prepared` reads them; whole or not at all."""
    content = io.BytesIO()
    np.save(content, np.asarray(labels, np.int32))
    write_bytes(path, content.getvalue())


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Writes `content` to `path`, which is either whole or not there."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_bytes(content)
        _keep(unfinished)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    os.replace(unfinished, path)


def sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class _Item:
    """What became of an example: its record, unless it is bad, and (what, why) for the report."""

    name: str
    record: Record | None
    original_bytes: int
    findings: tuple[tuple[str, str], ...]


def _in_order(shard: Shard, source: Source, pool, *how) -> Iterator[tuple[int, _Item]]:
    """(index, item) of every example of `shard`; a bounded number of them is worked on ahead; `how`
    goes to `_items`.
    """
    blocks = iter(range(shard.start, shard.stop, _BLOCK))
    waiting = collections.deque()

    def submit() -> None:
        for first in blocks:
            rows = range(first, min(first + _BLOCK, shard.stop))
            waiting.append((rows, pool.submit(_items, source, rows, *how)))
            return

    for _ in range(2 * pool._max_workers):
        submit()
    while waiting:
        rows, block = waiting.popleft()
        submit()
        yield from zip(rows, block.result(), strict=True)


def _items(source: Source, rows: range, root: str, options: Options) -> list[_Item]:
    return [_item(source, row, root, options) for row in rows]


def _item(source: Source, row: int, root: str, options: Options) -> _Item:
    try:
        record = source[row]
        image, name = encoded(record.image), _within(root, record.name)
        pixels, remarks = examine(image, name, options.max_pixels)
        check_label(record, len(source.classes))
    except BadImage as error:
        return _Item(_within(root, error.name), None, 0, (("bad", error.why),))
    stored = image
    if options.reencodes:
        stored = reencode(image, pixels, options.max_side, options.quality)
    kept = Record(stored, record.label, name)
    return _Item(name, kept, len(image), tuple(("kept", remark) for remark in remarks))


def _within(root: str, name: str) -> str:
    """`name` relative to the source, so that a prepared data set does not depend on where its source
    was.
    """
    return name.removeprefix(root).lstrip("/, ") if root else name


def _keep(path: pathlib.Path) -> None:
    """Flushes the content of a file to the disk, before it gets its name."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
