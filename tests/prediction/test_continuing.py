"""Maps, features and classes of many images: what a signal or a kill leaves is continued, or whole."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet
import pytest
from etils import epath
from PIL import Image

from tests.serving.test_maps import make_run
from vit_jax.base import places, stopping
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.prediction import maps, predict
from vit_jax.prediction.feature_files import write_features
from vit_jax.prediction.features import Wanted
from vit_jax.prediction.images import Named, find_images
from vit_jax.prediction.maps import Segmenter, write_maps

PATIENCE = 120


@pytest.fixture(autouse=True)
def heard_interrupts(monkeypatch):
    """SIGINT is ignored where tests are started in the background, and what is ignored stays so in the product.

    On a busy machine a block may take long to leave, and the process of the tests must not end meanwhile.
    """
    monkeypatch.setattr(stopping, "_PATIENCE_SECONDS", PATIENCE)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def segmenter():
    return Segmenter(make_run("eomt", score=0.0, overlap=0.0))


@pytest.fixture
def photos(tmp_path):
    """A folder of photos, one of which is none."""
    return write_photos(tmp_path / "photos", 7)


def write_photos(folder: pathlib.Path, count: int) -> pathlib.Path:
    draw = np.random.default_rng(0)
    for number in range(count):
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (20, 16 + number % 4, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number // 2}.png")
    (folder / "b/none.png").write_bytes(b"no image")
    return folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Files that are not hidden; of the log the last row of each image, in any order."""
    files = {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}
    log = files.pop("maps.jsonl").splitlines()
    rows = {row.get("file"): row for row in map(json.loads, log)}
    files["rows"] = json.dumps(sorted(rows.values(), key=str)).encode()
    return {name: content for name, content in files.items() if not name.startswith(".")}


def stop_after(count: int, monkeypatch, module, name: str, number=signal.SIGINT) -> None:
    """Has a function of a module send this process a signal when it is called for the last of `count` times."""
    function = getattr(module, name)
    calls = iter(range(count - 1))

    def stopping_function(*args, **kwargs):
        if next(calls, None) is None:
            signal.raise_signal(number)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, stopping_function)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_maps_that_were_stopped_are_continued_to_the_same_files(
    segmenter, photos, tmp_path, monkeypatch, number
):
    whole = write_maps(segmenter, find_images([str(photos)]), tmp_path / "whole", batch_size=2)
    assert (whole["images"], whole["unreadable"]) == (7, 1)
    with monkeypatch.context() as patched:
        stop_after(4, patched, maps, "_write_pictures", number)
        with pytest.raises(stopping.Interrupted, match="3 of 8 images .* start the same") as told:
            write_maps(segmenter, find_images([str(photos)]), tmp_path / "cut", batch_size=2)
    assert told.value.exit_code == 42 and not (tmp_path / "cut/maps.json").exists()
    with (tmp_path / "cut/maps.jsonl").open("ab") as log:
        log.write(b'{"file": "cut o')
    (tmp_path / "cut/a/.3.png.partial-4194305").touch()  # no process has such a number
    again = write_maps(segmenter, find_images([str(photos)]), tmp_path / "cut", batch_size=2)
    assert again == whole and contents(tmp_path / "cut") == contents(tmp_path / "whole")
    names = {path.name for path in (tmp_path / "cut/a").iterdir()}
    assert names == {
        f"{i}{end}" for i in range(4) for end in (".png", "_overlay.png", "_panoptic.png")
    }


def test_only_images_that_are_new_or_have_changed_are_computed_again(segmenter, photos, tmp_path):
    out = tmp_path / "maps"
    write_maps(segmenter, find_images([str(photos)]), out, batch_size=2)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.png")}
    Image.new("RGB", (30, 10)).save(photos / "a/1.png")
    Image.new("RGB", (12, 10)).save(photos / "b/none.png")
    (photos / "a/2.png").unlink()
    result = write_maps(segmenter, find_images([str(photos)]), out, batch_size=2)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*.png")}
    changed = {path.stem for path in after if after[path] != before.get(path)}
    assert changed == {
        f"{stem}{end}" for stem in ("1", "none") for end in ("", "_overlay", "_panoptic")
    }
    assert (result["images"], result["unreadable"]) == (7, 0)
    assert Image.open(out / "a/1.png").size == (30, 10)
    listed = [row["mask"] for row in json.loads((out / "maps.json").read_text())["images"]]
    assert len(listed) == len(set(listed)) == 8 and listed[-1] == "a/2.png"  # of the earlier run


def test_maps_of_another_model_and_files_that_are_not_ours_are_kept(segmenter, photos, tmp_path):
    out = tmp_path / "maps"
    write_maps(segmenter, find_images([str(photos)]), out, batch_size=2)
    other = Segmenter(make_run("linear"))
    with pytest.raises(ConfigError, match="is of work with other weights, settings: --out="):
        write_maps(other, find_images([str(photos)]), out, batch_size=2)
    older = tmp_path / "older"
    older.mkdir()
    (older / "maps.jsonl").write_text("of mine")
    with pytest.raises(ConfigError, match="maps.jsonl was not written by this command"):
        write_maps(other, find_images([str(photos)]), older, batch_size=2)
    (older / "maps.jsonl").unlink()
    (older / "maps.json").write_text("{}")
    with pytest.raises(ConfigError, match="no earlier run of this command lists it"):
        write_maps(other, find_images([str(photos)]), older, batch_size=2)
    with pytest.raises(ConfigError, match="or lies in it"):
        write_maps(other, find_images([str(photos)]), photos / "maps", batch_size=2)
    assert not (photos / "maps").exists()


@pytest.mark.parametrize("ending", [".npz", ".parquet"])
def test_features_that_were_stopped_are_continued_to_the_same_file(
    photos, tmp_path, monkeypatch, ending
):
    run, wanted = make_run("linear"), Wanted(layers=(-1,))
    (photos / "b" / os.fsdecode(b"\xff.png")).write_bytes((photos / "a/0.png").read_bytes())

    def write(name: str, **changed) -> dict:
        target = epath.Path(tmp_path / f"{name}{ending}")
        options = {"batch_size": 2, "wanted": wanted} | changed
        return write_features(run, find_images([str(photos)]), target, **options)

    whole = write("whole")
    assert (whole["images"], whole["unreadable"]) == (8, 1)
    with monkeypatch.context() as patched:
        stop_after(3, patched, write_features.__globals__["FeatureStore"], "add")
        with pytest.raises(stopping.Interrupted, match="of 4 images are kept in .*unfinished"):
            write("cut")
    assert not (tmp_path / f"cut{ending}").exists()
    with pytest.raises(ConfigError, match="other settings: remove .*unfinished"):
        write("cut", wanted=Wanted())
    assert write("cut") == whole and not (tmp_path / f"cut{ending}.unfinished").exists()
    one, other = (tmp_path / f"{name}{ending}" for name in ("whole", "cut"))
    assert one.read_bytes() == other.read_bytes()
    read = {
        ".npz": lambda: np.load(one)["files"].tolist(),
        ".parquet": lambda: pyarrow.parquet.read_table(one)["file"].to_pylist(),
    }
    names = read[ending]()
    assert len(names) == 8 and names[-1] == rf"{photos}/b/\udcff.png"


def test_features_of_images_that_have_changed_meanwhile_are_computed_again(
    photos, tmp_path, monkeypatch
):
    run, target = make_run("linear"), epath.Path(tmp_path / "cut.npz")
    with monkeypatch.context() as patched:
        stop_after(4, patched, write_features.__globals__["FeatureStore"], "add")
        with pytest.raises(stopping.Interrupted, match="of 6 images"):
            write_features(run, find_images([str(photos)]), target, batch_size=2)
    Image.new("RGB", (30, 10)).save(photos / "a/3.png")  # in the second batch
    write_features(run, find_images([str(photos)]), target, batch_size=2)
    write_features(run, find_images([str(photos)]), epath.Path(tmp_path / "new.npz"), batch_size=2)
    assert target.read_bytes() == (tmp_path / "new.npz").read_bytes()
    with monkeypatch.context() as patched:
        stop_after(2, patched, write_features.__globals__["FeatureStore"], "add")
        with pytest.raises(stopping.Interrupted):
            write_features(run, find_images([str(photos)]), target, batch_size=2)
    with pytest.raises(ConfigError, match="has features of other images: remove"):
        write_features(run, [Named(str(photos / "b/0.png"))], target, batch_size=2)


def test_when_no_image_can_be_read_nothing_stays(tmp_path):
    (tmp_path / "x.png").write_bytes(b"")
    (tmp_path / "g.npz.unfinished").mkdir()
    (tmp_path / "g.npz.unfinished/mine").touch()
    with pytest.raises(ConfigError, match="has other files: move them"):
        write_features(make_run("linear"), [], epath.Path(tmp_path / "g.npz"), batch_size=2)
    shutil.rmtree(tmp_path / "g.npz.unfinished")
    with pytest.raises(UserError, match="none of the 1 images"):
        files = [Named(str(tmp_path / "x.png"))]
        write_features(make_run("linear"), files, epath.Path(tmp_path / "f.npz"), batch_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "text"])
def test_what_is_printed_is_whole_when_a_signal_comes(form, capfd, monkeypatch):
    image = np.zeros((8, 8, 3), np.uint8)
    made = [predict.Prediction(name, ("-1", "-a"), (0.75, 0.25), image) for name in "xyz"]
    monkeypatch.setattr(predict, "check_head", lambda run: None)
    monkeypatch.setattr(predict, "predict", lambda *args, **kwargs: iter(made))

    def write() -> str:
        predict.predict_files(None, [], topk=2, batch_size=2, form=form)

    write()
    whole = capfd.readouterr().out
    stop_after(2, monkeypatch, predict.outputs if form == "csv" else predict.logs, *{
        "csv": ["as_cell"]}.get(form, ["printable"]))  # fmt: skip
    with pytest.raises(stopping.Interrupted, match="what is printed is whole"):
        write()
    cut = capfd.readouterr().out
    if form == "json":
        assert json.loads(whole)[: len(json.loads(cut))] == json.loads(cut)
    else:
        assert whole.startswith(cut) and (not cut or cut.endswith("\n"))
    if form == "jsonl":
        rows = [json.loads(line) for line in whole.splitlines()]
        assert rows[0] == {
            "file": "x",
            "predictions": [
                {"class": "-1", "probability": 0.75},
                {"class": "-a", "probability": 0.25},
            ],
        }
    if form == "csv":
        assert "x,1,-1,0.750000" in whole and "x,2,'-a,0.250000" in whole


def test_a_signal_waits_until_a_text_is_printed():
    done = []
    with pytest.raises(stopping.Interrupted, match="go on"), stopping.keeping(lambda: "go on"):
        with stopping.delayed():
            signal.raise_signal(signal.SIGTERM)
            done.append("printed")
        done.append("not reached")
    assert done == ["printed"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


WRITE = """
import sys
from tests.serving.test_maps import make_run
from vit_jax.commands import exit_codes
from vit_jax.prediction.images import find_images
from vit_jax.prediction.maps import Segmenter, write_maps

with exit_codes.report_errors():
    segmenter = Segmenter(make_run("eomt", score=0.0, overlap=0.0))
    write_maps(segmenter, find_images([sys.argv[1]]), sys.argv[2], batch_size=8)
"""


@pytest.mark.slow
def test_maps_that_are_killed_at_ten_moments_are_those_of_an_unbroken_run(tmp_path):
    photos, draw = write_photos(tmp_path / "photos", 10_000), random.Random(0)

    def start(out: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", WRITE, photos, tmp_path / out])

    assert start("whole").wait() == 0
    log, ends = tmp_path / "cut/maps.jsonl", []
    for number in [signal.SIGKILL, signal.SIGTERM, signal.SIGINT] * 3 + [signal.SIGKILL]:
        process, size = start("cut"), log.stat().st_size if log.exists() else 0
        until = time.monotonic() + PATIENCE
        grown = size + draw.randint(1, 100_000)
        while time.monotonic() < until and not (log.exists() and log.stat().st_size > grown):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        ends.append(process.wait())
    assert ends == [-9, 42, 42] * 3 + [-9]
    assert start("cut").wait() == 0
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    shutil.rmtree(tmp_path)


def test_maps_and_photos_in_a_bucket_are_continued_by_name(
    segmenter, photos, s3_bucket, tmp_path, monkeypatch
):
    for path in photos.rglob("*.png"):
        place = epath.Path(f"{s3_bucket}/photos/{path.relative_to(photos)}")
        place.write_bytes(path.read_bytes())
    sources, out = [f"{s3_bucket}/photos"], f"{s3_bucket}/maps"
    with monkeypatch.context() as patched:
        stop_after(3, patched, maps, "_write_pictures")
        with pytest.raises(stopping.Interrupted, match="2 of 8 images"):
            write_maps(segmenter, find_images(sources), out, batch_size=2)
    result = write_maps(segmenter, find_images(sources), out, batch_size=2)
    assert (result["images"], result["unreadable"]) == (7, 1)
    listed = json.loads(places.read_bytes(f"{out}/maps.json"))["images"]
    assert [row["mask"] for row in listed][:2] == ["a/0.png", "a/1.png"] and len(listed) == 7
    with pytest.raises(ConfigError, match="or lies in it"):
        write_maps(segmenter, find_images(sources), f"{s3_bucket}/photos/maps", batch_size=2)
