"""One ArrayRecord file of a prepared data set: made from a range of a source, by threads, in order.

What is in a file depends on the source, the range and the options alone, never on how many threads
worked or how often the command was started: bytes are the same each time.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Callable, Iterator

from vit_jax.data.decoding import decode
from vit_jax.data.labels.masks import mask_table
from vit_jax.data.options import MAX_PIXELS
from vit_jax.data.preparation.check import check_label, encoded, examine
from vit_jax.data.preparation.reencode import reencode
from vit_jax.data.record import BadImage, Record, Source, read_records
from vit_jax.data.sources.prepared import pack

_BLOCK = 16  # images that a thread takes at a time
_READERS = 16  # threads that wait for a disk or a bucket, for a block each
_BYTES_AHEAD = 1 << 29  # of images that are read and not yet examined


@dataclasses.dataclass(frozen=True)
class ShardOptions:
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


AS_THEY_ARE = ShardOptions()


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file to make: examples `start` to `stop` of a split."""

    split: str
    start: int
    stop: int
    file: str


def plan(sizes: dict[str, int], shards: int, per_shard: int) -> list[Shard]:
    """The files of every split: `shards` each, or, if that is 0, of about `per_shard` examples."""
    planned = []
    for split, size in sizes.items():
        count = min(size, shards or -(-size // per_shard))
        for i in range(count):
            start, stop = size * i // count, size * (i + 1) // count
            file = f"{split}-{i:05d}-of-{count:05d}.array_record"
            planned.append(Shard(split, start, stop, file))
    return planned


@dataclasses.dataclass(frozen=True)
class Pools:
    """Threads that read examples, which wait for a disk or a bucket, and that examine them."""

    readers: concurrent.futures.ThreadPoolExecutor
    workers: concurrent.futures.ThreadPoolExecutor


def pools(workers: int) -> Pools:
    """The threads for `workers` cores."""
    return Pools(
        concurrent.futures.ThreadPoolExecutor(_READERS, "vit_jax-read"),
        concurrent.futures.ThreadPoolExecutor(workers, "vit_jax-examine"),
    )


def write_shard(
    shard: Shard,
    source: Source,
    path: pathlib.Path,
    root: str,
    options: ShardOptions,
    pools: Pools,
    progress: Callable[[int], None],
) -> dict:
    """Makes the file of `shard` at `path`. `root`, the place of the source, is removed from the names
    of images.

    Returns:
      What is noted of it, but for its checksum: {"file", "examples", "bytes"}, and of this split:
      "labels" (of the examples; `None` where they have none or several), "class_counts",
      "image_bytes" (of the originals, and as they are stored), "findings": what the report says.

    Raises:
      OSError: the file cannot be written.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    # Of masks no classes are counted: an image has many.
    classes = 0 if mask_table(source) else len(source.classes)
    one_label = bool(classes) and not source.multi_label
    labels, counts, before, after, examples, findings = [], [0] * classes, 0, 0, 0, []
    # One record a group: any can be read alone. Images do not compress.
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for index, item in _in_order(shard, source, pools, root, options):
        for what, why in item.findings:
            place = {"what": what, "split": shard.split, "index": index}
            findings.append(place | {"name": item.name, "why": why})
        if item.record is not None:
            with _writing():
                writer.write(pack(item.record))
            examples += 1
            before, after = before + item.original_bytes, after + len(item.record.image)
            label = item.record.label
            for number in (label,) if one_label else label if classes else ():
                counts[number] += 1
            if one_label:
                labels.append(label)
        progress(1)
    with _writing():
        writer.close()
    return {
        "file": shard.file,
        "examples": examples,
        "bytes": path.stat().st_size,
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


def _in_order(
    shard: Shard, source: Source, pools: Pools, *arguments
) -> Iterator[tuple[int, _Item]]:
    """(index, item) of every example of `shard`; a bounded number of them is read and examined ahead;
    `how` goes to `_items`.
    """
    blocks = iter(
        range(first, min(first + _BLOCK, shard.stop))
        for first in range(shard.start, shard.stop, _BLOCK)
    )
    reading, examining, largest = collections.deque(), collections.deque(), 1
    while True:
        ahead = max(min(2 * _READERS, _BYTES_AHEAD // largest), 2)
        for rows in itertools.islice(blocks, max(ahead - len(reading), 0)):
            reading.append((rows, pools.readers.submit(_read, source, rows)))
        while reading and len(examining) < 2 * pools.workers._max_workers:
            if examining and not reading[0][1].done():
                break
            rows, block = reading.popleft()
            records = block.result()
            largest = max(
                largest, sum(_bytes(record) for record in records if isinstance(record, Record))
            )
            examining.append((rows, pools.workers.submit(_items, source, records, *arguments)))
        if not examining:
            return
        rows, block = examining.popleft()
        yield from zip(rows, block.result(), strict=True)


def _bytes(record: Record) -> int:
    image = record.image
    return len(image) if isinstance(image, bytes) else image.nbytes


def _read(source: Source, rows: range) -> list[Record | BadImage]:
    """The records of `rows`, or why one cannot be read."""
    try:
        return read_records(source, rows)
    except BadImage:  # which of them?
        return [_read_one(source, row) for row in rows]


def _read_one(source: Source, row: int) -> Record | BadImage:
    try:
        return source[row]
    except BadImage as error:
        return error


def _items(
    source: Source, records: list[Record | BadImage], root: str, options: ShardOptions
) -> list[_Item]:
    return [_item(source, record, root, options) for record in records]


def _item(source: Source, record: Record | BadImage, root: str, options: ShardOptions) -> _Item:
    try:
        if isinstance(record, BadImage):
            raise record
        image, name = encoded(record.image), _within(root, record.name)
        pixels, remarks = examine(image, name, options.max_pixels)
        size = pixels.shape[:2]
        check_label(record, len(source.classes), mask_table(source), size, options.max_pixels)
    except BadImage as error:
        return _Item(_within(root, error.name), None, 0, (("bad", error.why),))
    stored = image
    turned = False
    if options.reencodes and mask_table(source) is not None:
        # A mask is turned as its image says, and one that is encoded again says nothing.
        most = options.max_pixels
        turned = decode.orientation(image, name=name, channels=3, max_pixels=most) > 1
    if options.reencodes and not turned:
        stored = reencode(image, pixels, options.max_side, options.quality)
    kept = Record(stored, record.label, name)
    return _Item(name, kept, len(image), tuple(("kept", remark) for remark in remarks))


def _within(root: str, name: str) -> str:
    """`name` relative to the source, so that a prepared data set does not depend on where its source
    was.
    """
    return name.removeprefix(root).lstrip("/, ") if root else name
