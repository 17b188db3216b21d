"""Pictures of extreme shapes, by the commands: they take the memory of a square of as many pixels, or are refused."""

import json
import math
import pathlib

import numpy as np
import pytest
from PIL import Image

from tests.integration.test_segmentation import TINY

CLASSES = ("road", "car", "sky")
MOST_MORE = 2**30  # bytes
SHAPES = [
    (1, 1), (1, 2), (2, 1), (3, 3), (1, 7), (2, 9), (5, 3), (1, 64), (64, 1), (3, 65),
    (1, 1_000), (1_000, 1), (2, 1_000), (4, 1_000), (16, 1_000), (1_000, 16), (17, 999), (999, 17), (15, 960),
    (16, 1_025),
    (4, 4_000), (4_000, 4), (1, 4_000), (64, 4_000), (4_000, 64), (63, 4_000), (62, 4_000), (100, 4_000), (4_000, 100),
    (1, 10_000), (10_000, 1), (3, 10_000), (160, 10_000), (10_000, 160), (157, 10_000), (156, 10_000), (300, 10_000),
    (1, 30_000), (30_000, 1), (500, 30_000), (30_000, 500), (469, 30_000), (8, 60_000), (60_000, 8),
    (1, 65_000), (65_000, 1), (1_016, 65_000), (65_000, 200), (7_000, 7_000), (6_000, 9_000),
]  # fmt: skip


def write_scene(folder: pathlib.Path, height: int, width: int) -> None:
    """A data set of one picture, for both splits, and its mask."""
    rows, columns = np.indices((height, width), np.int32, sparse=True)
    labels = ((rows // 5 + columns // 7) % len(CLASSES)).astype(np.uint8)
    for split in ("train", "val"):
        for kind, pixels in (("images", labels * 90), ("masks", labels)):
            path = folder / kind / split / "0.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, compress_level=1)
    (folder / "classes.csv").write_text("\n".join(["name", *CLASSES]))


def peak_of(work) -> tuple[int, object]:
    """The bytes that this process held at most while it did `work()`, and what that returned."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # begins anew, see proc(5)
    result = work()
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return 1024 * int(peak), result


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Workdirs of finished runs, by recipe."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_pictures_of_any_shape_take_the_memory_of_a_square_or_are_refused(
    command, made, tmp_path, tmp_path_factory, caplog, shape
):
    if not made:
        scenes = tmp_path_factory.mktemp("scenes")
        write_scene(scenes, 24, 30)
        made["run"] = tmp_path_factory.mktemp("run")
        recipe = "--config=configs/segmentation.py:linear", f"--config.data.path={scenes}"
        code, _, err = command("train", *recipe, *TINY, f"--workdir={made['run']}")
        assert code == 0, err
    run = f"--checkpoint={made['run']}"
    side = math.ceil(math.sqrt(math.prod(shape)))
    peaks = {}
    for name, size in (("square", (side, side)), ("shape", shape)):
        scenes = tmp_path / name
        write_scene(scenes, *size)
        images, out = str(scenes / "images/val"), f"--out={tmp_path / name}_maps"
        for arguments in (
            ("evaluate", run, f"--config.data.path={scenes}", "--json"),
            ("predict", run, images, out),
        ):
            peaks[name, arguments[0]], (code, printed, err) = peak_of(
                lambda a=arguments: command(*a)
            )
            if code:
                assert name == "shape" and code in (1, 2), err
                assert "it is so long" in err + caplog.text
            elif arguments[0] == "evaluate":
                assert json.loads(printed.splitlines()[-1])["images"] == 1
    for name in ("evaluate", "predict"):
        assert peaks["shape", name] <= peaks["square", name] + MOST_MORE
