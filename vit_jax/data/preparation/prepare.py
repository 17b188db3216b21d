"""From any source to a prepared data set: what is made, in which order, and continuing after a kill.

The order is important:
1. every file of records is written under another name or on another disk, and gets its place and name
   when it is whole;
2. what is in it is noted, in unfinished/; with that note it counts as done;
3. when all files are done, the report and then the description are written: with the description
   the data set counts as finished; the notes go. The index of the files follows where they need one.

Steps 1 and 2 are in `work.py`.
"""

import errno
import hashlib
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from etils import epath

from vit_jax.base import buckets, places
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.data import sources
from vit_jax.data.labels.masks import mask_table
from vit_jax.data.options import MAX_PIXELS, Data
from vit_jax.data.preparation import shards, work
from vit_jax.data.preparation.download import download
from vit_jax.data.preparation.index import index
from vit_jax.data.preparation.output import Output
from vit_jax.data.preparation.reencode import measure
from vit_jax.data.record import DataSet, Source
from vit_jax.data.sources import folder as folders
from vit_jax.data.sources import tfds
from vit_jax.data.sources.mixture import MixedSet
from vit_jax.data.sources.prepared import DESCRIPTION, FORMAT, open_prepared, read_description
from vit_jax.data.sources.text import readable

REPORT = "report.jsonl"
PER_SHARD = 4096


def prepare(
    source: str,
    out: str,
    *,
    splits: tuple[str, ...] = (),
    num_shards: int = 0,
    workers: int = 0,
    options: shards.ShardOptions = shards.AS_THEY_ARE,
    holdout: float = 0.1,
    holdout_by: str = "file",
    examine: bool = False,
    holdout_from: str = "",
    layout: str = "auto",
    mask_files: str = "ask",
    label_separator: str = "",
    data_dir: str = "",
    features: Mapping[str, str] | None = None,
    part: work.Part = (1, 1),
) -> dict:
    """Makes the prepared data set `out` of `source`; continues where a killed run stopped.

    Args:
      source: a folder of images or of class folders, a CSV or JSON-lines file, tar files, or the
        name of a TFDS data set, which is downloaded if it is not there (that needs TensorFlow).
      splits: which splits, or expressions; by default all there are.
      num_shards: files per split; 0: one for every 4,096 examples.
      workers: threads; 0: one for every core.
      options: how images are stored.
      holdout, holdout_by, examine: the share of 'test' where the source has no splits, and how it is chosen;
        see `table.hold_out`.
      holdout_from, layout, mask_files, label_separator: the meaning of folders, files and labels, as in `config.data`.
      data_dir: where TFDS keeps its data sets.
      features: of a TFDS data set, `image_feature`, `mask_feature` and `mask_table` of `config.data`.
      part: (i, n): write every n-th file alone, from the i-th on, one of n processes.

    Returns:
      While files of other parts are missing, {"out", "files": of this part, "missing", "of": files in
      all}. When all are there, {"splits": {name: examples}, "classes", "bytes", "bad", "ignored",
      "kept", "out"}; re-encoded, also {"image_bytes", "stored_bytes", "decode_speed_up", "psnr", "psnr_worst"}.

    Raises:
      ConfigError: the source cannot be used, or `out` holds something else.
      UserError: `out` cannot be written, or TFDS cannot prepare the data set.
      Locked: another process writes the same files.
    """
    given = Data(
        path=data_dir,
        holdout=holdout,
        holdout_by=holdout_by,
        holdout_from=holdout_from,
        examine=examine,
        layout=layout,
        mask_files=mask_files,
        label_separator=label_separator,
        **(features or {}),
    )
    config_data = sources.locate(source, given, "SOURCE")
    if examine and config_data.name != "folder":
        raise ConfigError(
            f"--examine is for folders and lists of images on a disk, not for {source}"
        )
    sources.check_features(config_data)
    if config_data.name not in sources.OPENERS and not tfds.is_there(config_data):
        _check_name(source)
        if part[1] > 1:
            raise ConfigError(
                f"--shard={part[0]}/{part[1]}: {source!r} is not prepared by TFDS, which one process has to do "
                f"alone: start the command once without --shard, or with --splits of a few examples"
            )
        download(config_data)
    data_set = sources.open_data_set(config_data)
    if isinstance(data_set, MixedSet):
        raise ConfigError("a mixture is made when it is trained on: prepare each of its sets")
    wanted = {name: name for name in splits or _all_splits(config_data.name, data_set)}
    opened = {_file_name(name): data_set.open(name) for name in wanted}
    if options.max_side and any(map(mask_table, opened.values())):
        raise ConfigError(
            f"--max_side={options.max_side} makes images smaller, and {source} has masks, which stay as they are: "
            "leave it out; --quality alone keeps the sizes"
        )
    plan = shards.plan({n: len(examples) for n, examples in opened.items()}, num_shards, PER_SHARD)
    recipe = {
        "identity": hashlib.sha256(data_set.identity().encode()).hexdigest(),
        "splits": list(wanted),
        "files": len(plan),
        "max_side": options.max_side,
        "quality": options.quality,
    }
    if options.max_pixels != MAX_PIXELS:
        recipe["max_pixels"] = options.max_pixels
    out = places.locate(out, "--out")
    if not (out / DESCRIPTION).exists():
        arguments = _root(config_data), options
        with _errors_of(out), work.output_of(out, recipe, part) as output:
            mine = work.mine(plan, part)
            work.write_part(mine, opened, output, arguments, workers or os.cpu_count())
            missing = len({f"{shard.file}.json" for shard in plan} - work.noted(out))
            # Without notes but with a description, another process has just put all together.
            if missing and not (out / DESCRIPTION).exists():
                return {"out": str(out), "files": len(mine), "missing": missing, "of": len(plan)}
            try:
                done = work.notes(plan, out)
            except FileNotFoundError:
                if not (out / DESCRIPTION).exists():
                    raise
            else:
                _merge(source, config_data, data_set, opened, plan, done, recipe, output)
                index(str(out))
    elif read_description(out)["recipe"] != recipe:
        raise ConfigError(f"--out={out} holds another data set, or another form of this one")
    work.clear(out)
    return _result(out, opened, options)


def _merge(source, config_data, data_set, opened, plan, done, recipe, output: Output) -> None:
    """Writes the files that describe all others, the description last."""
    if not any(note["examples"] for note in done):
        raise ConfigError(
            f"none of the images of {source} can be read: see {output.folder / work.NOTES}"
        )
    output.write(REPORT, _report(done, config_data).encode())
    described = {name: work.describe_split(name, plan, done, output) for name in opened}
    aliases = {n: e for n, e in data_set.aliases.items() if e in opened and n not in opened}
    first = next(iter(opened.values()))
    output.write_json(
        DESCRIPTION,
        {
            "format": FORMAT,
            "source": readable(source),
            "recipe": recipe,
            "multi_label": first.multi_label,
            "classes": list(first.classes),
            **({"masks": masks.describe()} if (masks := mask_table(first)) else {}),
            "aliases": aliases,
            "splits": described,
        },
    )


@contextmanager
def _errors_of(out: epath.Path) -> Iterator[None]:
    """Turns an error of writing to `out` into a sentence for the user."""
    try:
        yield
    except Exception as error:
        if not buckets.is_failure(error):
            raise
        why = buckets.reason(error)
        if places.in_bucket(out) and getattr(error, "errno", None) == errno.ENOSPC:
            why += f" in {tempfile.gettempdir()} (TMPDIR), where files are made before they are uploaded"
        raise UserError(
            f"--out={out} cannot be written: {why}. What is finished is kept: when that is mended, the same "
            "command continues"
        ) from error


def _report(done: list[dict], config_data: Data) -> str:
    """A line of JSON for everything that a person may want to know of an image or a file."""
    lines = [finding for note in done for finding in note["findings"]]
    folder = epath.Path(config_data.path)
    if config_data.name == "folder" and folder.is_dir():
        lines += [
            {"what": "ignored", "name": readable(name), "why": why}
            for name, why in folders.unread_files(folder, config_data)
        ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def text(result: dict) -> str:
    """`prepare`'s result for a person."""
    if "missing" in result:
        return (
            f"the {result['files']} files of this shard are done; {result['missing']} of {result['of']} are "
            f"missing, of other shards: {result['out']}"
        )
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
            f"{result['bad']} bad images skipped, {result['ignored']} files ignored: {result['out']}/{REPORT}"
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
    if config_data.name not in ("folder", "masks", "tar", "prepared"):
        return ""
    return readable(str(path if path.is_dir() else path.parent))


def _file_name(split: str) -> str:
    return "".join(c if c.isalnum() or c in "_." else "_" for c in split)


def _result(out: epath.Path, opened: dict, options: shards.ShardOptions) -> dict:
    """The result of `prepare`, read back from the finished data set."""
    description = read_description(out)
    splits = description["splits"]
    report = [json.loads(line) for line in places.read_bytes(out / REPORT).splitlines()]
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
