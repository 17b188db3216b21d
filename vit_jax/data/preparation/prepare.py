"""From any source to a prepared data set: what is made, in which order, and going on after a kill.

The order is important:
1. every file of records is written under another name, and renamed when it is whole;
2. what is in it is noted, in unfinished/; with that note it counts as done;
3. when all files are done, the report and then the description are written: with the description
   the data set counts as finished; the notes go.
"""

import concurrent.futures
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from etils import epath
from tqdm import tqdm

from vit_jax.base import places
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.data import sources
from vit_jax.data.options import MAX_PIXELS, Data
from vit_jax.data.preparation import shards
from vit_jax.data.preparation.download import download
from vit_jax.data.preparation.reencode import measure
from vit_jax.data.record import DataSet, Source
from vit_jax.data.sources import folder as folders
from vit_jax.data.sources import tfds
from vit_jax.data.sources.mixture import MixedSet
from vit_jax.data.sources.prepared import DESCRIPTION, FORMAT, open_prepared, read_description
from vit_jax.data.sources.text import readable

REPORT = "report.jsonl"
PER_SHARD = 4096
_NOTES = "unfinished"


def prepare(
    source: str,
    out: str,
    *,
    splits: tuple[str, ...] = (),
    num_shards: int = 0,
    workers: int = 0,
    options: shards.Options = shards.AS_THEY_ARE,
    holdout: float = 0.1,
    holdout_by: str = "file",
    data_dir: str = "",
) -> dict:
    """Makes the prepared data set `out` of `source`; continues where a killed run stopped.

    Args:
      source: a folder of images or of class folders, a CSV or JSON-lines file, tar files, or the
        name of a TFDS data set, which is downloaded if it is not there (that needs TensorFlow).
      splits: which splits, or expressions; by default all there are.
      num_shards: files per split; 0: one for every 4,096 examples.
      workers: threads; 0: one for every core.
      options: how images are stored.
      holdout, holdout_by: the share of 'test' where the source has no splits, and how it is chosen;
        see `table.hold_out`.
      data_dir: where TFDS keeps its data sets.

    Returns:
      {"splits": {name: examples}, "classes", "bytes", "bad", "ignored", "kept", "out"}; re-encoded,
      also {"image_bytes", "stored_bytes", "decode_speed_up", "psnr", "psnr_worst"}.

    Raises:
      ConfigError: the source cannot be used, or `out` holds something else.
      UserError: `out` cannot be written, or TFDS cannot prepare the data set.
    """
    given = Data(path=data_dir, holdout=holdout, holdout_by=holdout_by)
    config_data = sources.locate(source, given)
    if config_data.name not in sources.OPENERS and not tfds.is_there(config_data):
        _check_name(source)
        download(config_data)
    data_set = sources.open_data_set(config_data)
    if isinstance(data_set, MixedSet):
        raise ConfigError("a mixture is made when it is trained on: prepare each of its sets")
    wanted = {name: name for name in splits or _all_splits(config_data.name, data_set)}
    opened = {_file_name(name): data_set.open(name) for name in wanted}
    plan = shards.plan({n: len(one) for n, one in opened.items()}, num_shards, PER_SHARD)
    recipe = {
        "identity": hashlib.sha256(data_set.identity().encode()).hexdigest(),
        "splits": list(wanted),
        "files": len(plan),
        "max_side": options.max_side,
        "quality": options.quality,
    }
    if options.max_pixels != MAX_PIXELS:
        recipe["max_pixels"] = options.max_pixels
    out = pathlib.Path(out).expanduser()
    if not (out / DESCRIPTION).exists():
        how = _root(config_data), options
        with _writing(out), _notes(out, recipe) as notes:
            done = _write_all(plan, opened, out, notes, how, workers or os.cpu_count())
            if not any(note["examples"] for note in done):
                raise ConfigError(f"none of the images of {source} can be read: see {notes}")
            shards.write_bytes(out / REPORT, _report(done, config_data).encode())
            described = {name: _describe(name, plan, done, out) for name in opened}
            aliases = {n: e for n, e in data_set.aliases.items() if e in opened and n not in opened}
            first = next(iter(opened.values()))
            shards.write_json(
                out / DESCRIPTION,
                {
                    "format": FORMAT,
                    "source": readable(source),
                    "recipe": recipe,
                    "multi_label": first.multi_label,
                    "classes": list(first.classes),
                    "aliases": aliases,
                    "splits": described,
                },
            )
    elif read_description(out)["recipe"] != recipe:
        raise ConfigError(f"--out={out} holds another data set, or another form of this one")
    _clear(out)
    return _result(out, opened, options)


@contextmanager
def _writing(out: pathlib.Path) -> Iterator[None]:
    """Turns an error of writing to `out` into a sentence for the user."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise UserError(
            f"--out={out} cannot be written: {why}. What is finished is kept: when that is mended, the same "
            "command goes on"
        ) from error


def _report(done: list[dict], config_data: Data) -> str:
    """A line of JSON for everything that a person may want to know of an image or a file."""
    lines = [one for note in done for one in note["findings"]]
    folder = pathlib.Path(config_data.path)
    if config_data.name == "folder" and folder.is_dir():
        lines += [
            {"what": "ignored", "name": readable(name), "why": why}
            for name, why in folders.unread_files(folder)
        ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def text(result: dict) -> str:
    """`prepare`'s result for a person."""
    splits = ", ".join(f"{examples} {name}" for name, examples in result["splits"].items())
    classes = f"of {result['classes']} classes" if result["classes"] else "without labels"
    lines = [f"{splits} images {classes}, {result['bytes'] / 1e6:.1f} MB: {result['out']}"]
    if "psnr" in result:
        share = result["stored_bytes"] / max(result["image_bytes"], 1)
        lines.append(
            f"re-encoded: {share:.0%} of the bytes, decoding {result['decode_speed_up']}x as fast, "
            f"PSNR {result['psnr']} dB (worst {result['psnr_worst']}) at 224 pixels"
        )
    if result["bad"] or result["ignored"]:
        lines.append(
            f"{result['bad']} bad images left out, {result['ignored']} files ignored: {result['out']}/{REPORT}"
        )
    return "\n".join(lines)


def _check_name(source: str) -> None:
    """Raises `ConfigError` if `source`, which is not there, cannot be the name of a TFDS data set:
    'name', 'name/config' or 'name:1.0.0'.
    """
    first, *more = re.split("[/:]", source)
    if not first.isidentifier() or (more and pathlib.Path(first).is_dir()):
        raise ConfigError(f"there is no {source}{places.nearest_existing(source)}")


def _all_splits(name: str, data_set: DataSet) -> list[str]:
    """The splits that have examples; of a data set of the papers those that they name."""
    papers = [split for split in ("train", "test") if split in data_set.aliases]
    if papers and name not in sources.OPENERS:
        return papers
    return [split for split, size in data_set.sizes.items() if size]


def _root(config_data: Data) -> str:
    """The folder that names of images begin with, or ''."""
    path = epath.Path(config_data.path).expanduser()
    if config_data.name not in ("folder", "tar", "prepared"):
        return ""
    return readable(str(path if path.is_dir() else path.parent))


def _file_name(split: str) -> str:
    return "".join(c if c.isalnum() or c in "_." else "_" for c in split)


@contextmanager
def _notes(out: pathlib.Path, recipe: dict) -> Iterator[pathlib.Path]:
    """The folder of what is done so far, for this process alone.

    Raises:
      ConfigError: something else is there, or another process is working on it.
    """
    notes = out / _NOTES
    if out.is_dir() and any(out.iterdir()) and not notes.is_dir():
        raise ConfigError(f"--out={out} is not empty, and not of an earlier start of this command")
    notes.mkdir(parents=True, exist_ok=True)
    with open(notes / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out={out}: another process is preparing it") from None
        noted_recipe = notes / "recipe.json"
        if not noted_recipe.exists():
            shards.write_json(noted_recipe, recipe)
        elif json.loads(noted_recipe.read_text()) != recipe:
            raise ConfigError(
                f"--out={out} was begun from another source or with other options: choose another "
                "folder, or remove this one"
            )
        yield notes


def _write_all(plan, opened, out, notes, how: tuple, workers: int) -> list[dict]:
    """Writes all files of `plan` and returns the note of each."""
    done = []
    total = sum(shard.stop - shard.start for shard in plan)
    with (
        tqdm(total=total, unit="img", smoothing=0.05, dynamic_ncols=True) as bar,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        for shard in plan:
            note = notes / f"{shard.file}.json"
            if note.exists():
                bar.update(shard.stop - shard.start)
            else:
                made = shards.write(shard, opened[shard.split], out, *how, pool, bar.update)
                shards.write_json(note, made)
            done.append(json.loads(note.read_text()))
    return done


def _describe(split: str, plan: list[shards.Shard], done: list[dict], out: pathlib.Path) -> dict:
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
        path = out / f"{split}-labels.npy"
        shards.write_labels(path, list(itertools.chain.from_iterable(labels)))
        described["labels"] = {"file": path.name, "sha256": shards.sha256(path)}
    return described


def _clear(out: pathlib.Path) -> None:
    shutil.rmtree(out / _NOTES, ignore_errors=True)


def _result(out: pathlib.Path, opened: dict, options: shards.Options) -> dict:
    """The result of `prepare`, read back from the finished data set."""
    description = read_description(out)
    splits = description["splits"]
    report = [json.loads(line) for line in (out / REPORT).read_text().splitlines()]
    result = {
        "out": str(out),
        "splits": {name: split["examples"] for name, split in splits.items()},
        "classes": len(description["classes"]),
        "bytes": sum(shard["bytes"] for split in splits.values() for shard in split["shards"]),
    }
    for what in ("bad", "ignored", "kept"):
        result[what] = sum(line["what"] == what for line in report)
    if options.reencodes:
        result["image_bytes"], result["stored_bytes"] = (
            sum(split["image_bytes"][i] for split in splits.values()) for i in range(2)
        )
        name = next(name for name, split in splits.items() if split["examples"])
        bad = {
            line["index"] for line in report if (line["what"], line.get("split")) == ("bad", name)
        }
        good = [index for index in range(len(opened[name])) if index not in bad]
        stored = open_prepared(Data(path=str(out))).open(name)
        result |= measure(_Subset(opened[name], good), stored)
    return result


class _Subset:
    """Some of the examples of a source."""

    def __init__(self, source: Source, indices: Sequence[int]):
        self._source, self._indices = source, indices

    def __len__(self):
        return len(self._indices)

    def __getitem__(self, index):
        return self._source[self._indices[index]]
