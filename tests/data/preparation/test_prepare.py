import collections
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image, ImageOps

from vit_jax.base.errors import ConfigError, UserError
from vit_jax.data import crops, sources
from vit_jax.data.decoding import decode
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.preparation.shards import ShardOptions, plan
from vit_jax.data.preparation.verify import verify
from vit_jax.data.sources.prepared import unpack
from vit_jax.data.sources.readers import open_reader


def opened(path, split="train", name="prepared", **fields):
    config = Data(name=name, path=str(path), **fields)
    return sources.open_source(config, split)


def report(out):
    return [json.loads(line) for line in (out / "report.jsonl").read_text().splitlines()]


def content(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


# What is found


def test_the_report_lists_exactly_what_is_bad_ignored_and_unusual(seeded, kinds, tmp_path):
    result = prepare(str(seeded), str(tmp_path / "out"), holdout=0.2)
    found = collections.defaultdict(list)
    for line in report(tmp_path / "out"):
        found[os.path.basename(line["name"])].append(line)
    for name, (expected, _) in kinds.items():
        whats, whys = [one["what"] for one in found[name]], [one["why"] for one in found[name]]
        if expected in ("", "hidden"):
            assert not whats, (name, whys)
        elif expected in ("bad", "ignored"):
            assert whats == [expected], (name, whys)
        else:
            assert whats and set(whats) == {"kept"}, (name, whys)
            assert any(expected in why for why in whys), (name, whys)
    assert found["link.jpg"][0]["why"] == "there is no such file"
    assert set(found) - set(kinds) == {"link.jpg"}
    bad = sum(expected == "bad" for expected, _ in kinds.values()) + 1
    ignored = sum(expected == "ignored" for expected, _ in kinds.values())
    assert (result["bad"], result["ignored"]) == (bad, ignored)
    assert sum(result["splits"].values()) == 40 + len(kinds) - (bad - 1) - ignored - 1
    assert verify(str(tmp_path / "out"))["bad"] == []


def test_what_is_kept_is_kept_as_it_is_and_decodes_to_the_right_picture(seeded, kinds, tmp_path):
    prepare(str(seeded), str(tmp_path / "out"), holdout=0.0)
    source = opened(tmp_path / "out")
    plain = np.asarray(Image.open(io.BytesIO(kinds["plain.png"][1])), int)
    for record in map(source.__getitem__, range(len(source))):
        name = os.path.basename(record.name)
        if name not in kinds:
            continue
        assert record.image == kinds[name][1]
        pixels = decode.decode(record.image, name=name).astype(int)
        with Image.open(io.BytesIO(record.image)) as image:
            if "16" in name:
                ramp = np.arange(48 * 64).reshape(48, 64, 1) * 21
                assert np.abs(pixels - ramp / 257).max() <= 1, name
                continue
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"), int)
        # OpenCV and Pillow invert CMYK by different formulas.
        assert np.abs(pixels - expected).mean() < 1.5, name
        if name in ("cmyk.jpg", "animated.webp", "a_jpeg.png", "transparent.png"):
            assert np.abs(pixels - plain).mean() < 3, name


def test_training_reads_what_prepare_keeps_and_refuses_nothing_else(seeded, kinds):
    """prepare is stricter: what it calls bad includes JPEG files with damage inside, which training
    may not see, since it decodes no more than its crop needs.
    """
    data = Data()
    source = opened(seeded, name="folder", holdout=0.0)
    refused, draws = set(), np.random.default_rng(0).random(crops.DRAWS).tolist()
    for index in range(len(source)):
        name = os.path.basename(source.paths[index])
        try:
            record = source[index]
            decode.train_crop(record.image, data, draws, name=name)
            decode.eval_crop(record.image, data, name=name)
        except sources.BadImage:
            refused.add(name)
    bad = {name for name, (expected, _) in kinds.items() if expected == "bad"} | {"link.jpg"}
    inside = {"zeros_inside.jpg", "ends_inside.jpg", "half_with_end.jpg"}
    assert bad - inside <= refused <= bad


def test_classes_counts_and_checksums_are_described(seeded, tmp_path):
    prepare(str(seeded), str(tmp_path / "out"), num_shards=3, holdout=0.2)
    description = json.loads((tmp_path / "out/dataset.json").read_text())
    assert description["classes"] == ["cat", "dog"] and not description["multi_label"]
    for name, split in description["splits"].items():
        stored = [
            unpack(row)
            for shard in split["shards"]
            for row in open_reader(str(tmp_path / "out" / shard["file"])).read_all()
        ]
        assert len(split["shards"]) == 3
        assert len(stored) == split["examples"] == sum(split["class_counts"])
        assert np.bincount([r.label for r in stored]).tolist() == split["class_counts"]
        assert all(record.name.startswith(("cat/", "dog/")) for record in stored), name
    sums = subprocess.run(
        ["sha256sum", *(s["file"] for s in description["splits"]["train"]["shards"])],
        cwd=tmp_path / "out", capture_output=True, text=True, check=True,
    ).stdout.split()[::2]  # fmt: skip
    assert sums == [shard["sha256"] for shard in description["splits"]["train"]["shards"]]


def test_damage_after_preparing_is_found_and_named(seeded, tmp_path):
    out = tmp_path / "out"
    prepare(str(seeded), str(out), num_shards=2, holdout=0.0)
    assert verify(str(out))["bad"] == []
    first, second = sorted(out.glob("*.array_record"))
    stored = bytearray(first.read_bytes())
    name = opened(out)[3].name
    place = stored.index(opened(out)[3].image) + 50
    stored[place] ^= 1
    first.write_bytes(stored)
    second.unlink()
    bad = verify(str(out))["bad"]
    assert [one["why"] for one in bad[::2]] == ["its checksum has changed", "the file is missing"]
    assert bad[1]["name"] == f"{first.name}, record 3" and "damaged" in bad[1]["why"], name
    # Training meets the damaged record as an image that cannot be read.
    record = opened(out)[3]
    with pytest.raises(sources.BadImage, match=f"{first.name}, record 3 .damaged"):
        decode.decode(record.image, name=record.name)


# How it is made


def test_the_same_bytes_for_any_number_of_threads_and_wherever_the_source_is(seeded, tmp_path):
    prepare(str(seeded), str(tmp_path / "a"), num_shards=3, workers=1)
    moved = seeded.rename(tmp_path / "elsewhere")
    (moved / "cat/link.jpg").unlink()
    (moved / "cat/link.jpg").symlink_to("nowhere.jpg")
    prepare(str(moved), str(tmp_path / "b"), num_shards=3, workers=5)
    a, b = content(tmp_path / "a"), content(tmp_path / "b")
    source = [json.loads(one.pop("dataset.json")) for one in (a, b)]
    assert a == b and source[0].pop("source") != source[1].pop("source") and source[0] == source[1]


def test_a_killed_prepare_goes_on_and_makes_the_same_bytes(seeded, tmp_path):
    """Killed at four moments that differ by machine: what matters holds for any."""
    arguments = [str(seeded), "--shards=8", "--workers=2", "--max_side=30"]
    command = [sys.executable, "-m", "vit_jax", "prepare", *arguments]
    done = subprocess.run([*command, f"--out={tmp_path}/whole"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "killed"
    kills = 0
    for wanted in (1, 4, 9, 14):
        process = subprocess.Popen([*command, f"--out={out}"], stderr=subprocess.DEVNULL)
        while process.poll() is None:
            if len(list(out.glob("*.array_record"))) >= wanted:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.0005)
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 1
    done = subprocess.run([*command, f"--out={out}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert content(out) == content(tmp_path / "whole")


def test_every_moment_of_a_kill_is_survived(seeded, tmp_path, monkeypatch):
    """The command is broken off after each of its renames, which are what a kill can fall between."""

    class Killed(BaseException):
        pass

    prepare(str(seeded), str(tmp_path / "whole"), num_shards=2)
    replace, moments = os.replace, 0
    while True:
        out, left = tmp_path / f"out{moments}", [moments]

        def replace_or_die(source, target, left=left):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            replace(source, target)

        monkeypatch.setattr(os, "replace", replace_or_die)
        try:
            prepare(str(seeded), str(out), num_shards=2)
            break
        except Killed:
            moments += 1
        monkeypatch.setattr(os, "replace", replace)
        prepare(str(seeded), str(out), num_shards=2)
        assert content(out) == content(tmp_path / "whole"), moments
    # The recipe; 4 files and their notes; the report; the labels of 2 splits; the description.
    assert moments == 13


@pytest.mark.parametrize("largest", [0, 100, 3000, 20_000])
def test_a_full_disk_is_a_sentence_and_the_same_command_goes_on(largest, seeded, tmp_path):
    """Files beyond some size cannot be written, which reaches the program as a full disk does."""
    prepare(str(seeded), str(tmp_path / "whole"), num_shards=2)
    out, (soft, hard) = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        with pytest.raises(UserError) as raised:
            prepare(str(seeded), str(out), num_shards=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(raised.value) == (
        f"--out={out} cannot be written: File too large. What is finished is kept: when that is mended, the "
        "same command continues"
    )
    assert raised.value.exit_code == 1 and not list(out.rglob("*.unfinished"))
    prepare(str(seeded), str(out), num_shards=2)
    assert content(out) == content(tmp_path / "whole")


def test_files_are_a_pure_function_of_the_sizes():
    shards = plan({"train": 10, "test": 2}, 3, 100)
    assert [(s.split, s.start, s.stop) for s in shards] == [
        ("train", 0, 3), ("train", 3, 6), ("train", 6, 10), ("test", 0, 1), ("test", 1, 2),
    ]  # fmt: skip
    assert shards[0].file == "train-00000-of-00003.array_record"
    assert [s.stop for s in plan({"train": 9000}, 0, 4096)] == [3000, 6000, 9000]


def test_what_is_there_is_not_overwritten(seeded, tmp_path):
    out = tmp_path / "out"
    first = prepare(str(seeded), str(out))
    assert prepare(str(seeded), str(out)) == first
    with pytest.raises(ConfigError, match="holds another data set, or another form"):
        prepare(str(seeded), str(out), options=ShardOptions(max_side=30))
    with pytest.raises(ConfigError, match="is not empty"):
        prepare(str(seeded), str(seeded))
    with pytest.raises(ConfigError, match="is no file, not prepared in"):
        prepare("no_such_set", str(tmp_path / "no"), data_dir=str(tmp_path))
    (tmp_path / "bad/a").mkdir(parents=True)
    (tmp_path / "bad/b").mkdir()
    for name in ("a/1.jpg", "b/1.jpg"):
        (tmp_path / "bad" / name).write_bytes(b"")
    with pytest.raises(ConfigError, match="none of the images of .* can be read"):
        prepare(str(tmp_path / "bad"), str(tmp_path / "none"))


# Smaller images


def test_reencoding_shrinks_large_images_upright_and_leaves_small_ones(tmp_path):
    generator = np.random.default_rng(0)
    small = generator.integers(0, 255, (8, 6, 3), np.uint8)
    large = np.asarray(Image.fromarray(small).resize((90, 120), Image.Resampling.BICUBIC))
    exif = Image.Exif()
    exif[0x0112] = 6
    for folder in ("a", "b"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        Image.fromarray(large).save(tmp_path / "in" / folder / "large.jpg", quality=98, exif=exif)
        Image.fromarray(small).save(tmp_path / "in" / folder / "small.png")
    result = prepare(
        str(tmp_path / "in"), str(tmp_path / "out"), holdout=0.0, options=ShardOptions(max_side=45)
    )
    source = opened(tmp_path / "out")
    shrunk, kept = decode.decode(source[0].image, name="large"), source[1]
    assert shrunk.shape == (45, 60, 3)  # upright: a quarter turn of 120 x 90
    expected = Image.fromarray(np.rot90(large, -1)).resize((60, 45), Image.Resampling.LANCZOS)
    error = np.square(shrunk.astype(float) - np.asarray(expected)).mean()
    assert 10 * np.log10(255**2 / error) > 30
    assert kept.image == (tmp_path / "in/a/small.png").read_bytes()
    assert result["stored_bytes"] < result["image_bytes"] and result["psnr"] > 30


# Real images


def test_the_imagenet_sample_is_prepared_whole(shared_data, tmp_path):
    labels = shared_data / "imagenet_sample/labels.csv"
    result = prepare(str(labels), str(tmp_path / "out"), options=ShardOptions(max_side=320))
    assert sum(result["splits"].values()) == 200 and result["classes"] == 996
    assert result["bad"] == 0 and result["stored_bytes"] < 0.45 * result["image_bytes"]
    assert result["psnr"] > 46
    assert verify(str(tmp_path / "out")) == {"examples": 200, "bad": []}


@pytest.mark.parametrize(
    "file, splits, classes",
    [
        ("tiny_imagenet_20classes.tar", {"train": 2000, "val": 500}, 20),
        ("cifar10_small_jpeg.tar", {"train": 2000, "test": 1000}, 10),
    ],
)
def test_tar_files_of_class_folders_are_prepared(shared_data, tmp_path, file, splits, classes):
    result = prepare(str(shared_data / file), str(tmp_path / "out"))
    assert result["splits"] == splits and result["classes"] == classes and result["bad"] == 0
    direct = opened(shared_data / file, "test", name="tar")
    stored = opened(tmp_path / "out", "test")
    assert len(direct) == len(stored)
    for index in (0, 77, len(direct) - 1):
        assert direct[index].image == stored[index].image
        assert direct[index].label == stored[index].label
