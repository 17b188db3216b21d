"""The files of a prepared data set, written by one process or by several, and put together.

Several processes, on any machines, each write every n-th file. They share nothing but the place: which
files there will be depends on the source alone. Whichever process ends last writes the description, so
that the result is the same to the byte for any number of them.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.lock import Lock
from vit_jax.base.progress import Progress
from vit_jax.data.preparation import shards
from vit_jax.data.preparation.output import Output
from vit_jax.data.record import Source
from vit_jax.data.sources.ranges import in_parallel

NOTES = "unfinished"
_RECIPE = f"{NOTES}/recipe.json"
_UPLOADS = 4  # files of a bucket that are uploaded at a time
Part = tuple[int, int]  # i of n processes, i from 1


def mine(plan: Sequence[shards.Shard], part: Part) -> Sequence[shards.Shard]:
    """The files that process i of n writes."""
    number, count = part
    return plan[number - 1 :: count]


@contextlib.contextmanager
def output_of(out: epath.Path, recipe: dict, part: Part) -> Iterator[Output]:
    """The place to write to, for this process alone of those that write this part.

    Raises:
      ConfigError: something else is there.
      Locked: another process is working on this part.
    """
    notes, worker = out / NOTES, "" if part[1] == 1 else f"-{part[0]}-of-{part[1]}"
    if out.is_dir() and not notes.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out={out} is not empty, and not of an earlier start of this command")
    if not places.in_bucket(out):
        notes.mkdir(parents=True, exist_ok=True)
    busy = (
        f"--out={out}: another process is preparing the same files ({{holder}}): give each process a --shard "
        "of its own, or wait until it has ended"
    )
    lock = Lock(notes, name=f"lock{worker}", patience=0.0, busy=busy)
    with lock, Output(out, worker) as output:
        if not (out / _RECIPE).exists():
            output.write_json(_RECIPE, recipe)
        if json.loads(places.read_bytes(out / _RECIPE)) != recipe:
            raise ConfigError(
                f"--out={out} was begun from another source or with other options: choose another "
                "folder, or remove this one"
            )
        yield output


def write_part(
    plan: Sequence[shards.Shard],
    opened: Mapping[str, Source],
    output: Output,
    arguments: tuple,
    workers: int,
) -> None:
    """Writes the files of `plan` that are not there, and a note of each.

    Args:
      opened: the sources by the names of the splits.
      arguments: the last arguments of `shards.write_shard` before the threads.
      workers: threads that examine images.
    """
    done = noted(output.folder)
    pools = shards.pools(workers)
    finishing = concurrent.futures.ThreadPoolExecutor(_UPLOADS if output.in_bucket else 1)
    pending = collections.deque()
    total = sum(shard.stop - shard.start for shard in plan)
    with Progress(total, "images", "prepared") as progress, pools.readers, pools.workers, finishing:
        for shard in plan:
            if _note(shard) in done:
                progress.skip(shard.stop - shard.start)
                continue
            path = output.scratch(shard.file)
            source = opened[shard.split]
            note = shards.write_shard(shard, source, path, *arguments, pools, progress.update)
            # Checksum and upload, while the next file is being made.
            pending.append(finishing.submit(_finish, output, path, note))
            while len(pending) > finishing._max_workers or pending[0].done():
                pending.popleft().result()
                if not pending:
                    break
        for task in pending:
            task.result()


def _finish(output: Output, path: pathlib.Path, note: dict) -> None:
    note["sha256"] = shards.sha256(path)
    output.publish(path, note["file"])
    output.write_json(f"{NOTES}/{note['file']}.json", note)


def _note(shard: shards.Shard) -> str:
    return f"{shard.file}.json"


def noted(out: epath.Path) -> set[str]:
    """The names of the notes in the place of an unfinished data set."""
    return {os.path.basename(file.path) for file in places.files_below(out / NOTES)}


def notes(plan: Sequence[shards.Shard], out: epath.Path) -> list[dict]:
    """The notes of all files of `plan`, in order.

    Raises:
      FileNotFoundError: one is not there.
    """
    paths = [out / NOTES / _note(shard) for shard in plan]
    return [json.loads(content) for content in in_parallel(places.read_bytes, paths)]


def describe_split(
    split: str, plan: Sequence[shards.Shard], done: list[dict], output: Output
) -> dict:
    """What the description says of a split. Writes the file of its labels."""
    files = [note for shard, note in zip(plan, done, strict=True) if shard.split == split]
    described = {
        "examples": sum(note["examples"] for note in files),
        "class_counts": [sum(c) for c in zip(*(n["class_counts"] for n in files), strict=True)],
        "image_bytes": [sum(n["image_bytes"][i] for n in files) for i in range(2)],
        "shards": [
            {key: note[key] for key in ("file", "examples", "bytes", "sha256")} for note in files
        ],
    }
    labels = [note.get("labels") for note in files]  # an earlier version did not note them
    if None not in labels:
        file = f"{split}-labels.npy"
        content = output.write_labels(file, list(itertools.chain.from_iterable(labels)))
        described["labels"] = {"file": file, "sha256": hashlib.sha256(content).hexdigest()}
    return described


def clear(out: epath.Path) -> None:
    """Removes the notes of a finished data set, and what killed processes have left."""
    if not places.in_bucket(out):
        shutil.rmtree(out / NOTES, ignore_errors=True)
        for path in pathlib.Path(out).glob("*.unfinished"):
            path.unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):  # another process that ends is doing the same
        places.remove(out / NOTES)
