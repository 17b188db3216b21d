"""Names of outputs: of random trees of images no output is shared, and no input is written over."""

import itertools
import os
import random

import pytest
from etils import epath
from PIL import Image

from tests.models.conftest import parameters
from vit_jax.base.errors import ConfigError
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.prediction.images import Named, find_images
from vit_jax.prediction.output_names import (
    check_folder,
    check_not_checkpoint,
    check_outputs,
    check_report_folder,
    name_outputs,
    never_writing_over,
)

ENDINGS = (".png", "_overlay.png", "_panoptic.png")
LISTS = ("maps.json", "panoptic.json", "maps.jsonl")
FOLDERS = (
    "",
    "a",
    "A",
    "a.png",
    "a/b",
    "maps.json",
    "x_overlay.png",
    "é",
    "e\u0301",
    "\udcff",
    " ",
    "-1",
)
STEMS = (
    "x", "X", "x_2", "x_2_2", "x_overlay", "x_panoptic", "maps", "a", "é", "e\u0301", "\udcff", "-", "=1+1", "a b",
    "x\n", "x.y", "n" * 250,
)  # fmt: skip
SUFFIXES = (".png", ".jpg", ".PNG", ".jpeg")


def outputs_of(stems: dict[str, str]) -> list[str]:
    return [stem + ending for stem in stems.values() for ending in ENDINGS]


def folders_of(names: list[str]) -> set[str]:
    """The folders of names, and those above."""
    found = set()
    for name in names:
        while name := os.path.dirname(name):
            found.add(name)
    return found


def check_names(stems: dict[str, str]) -> None:
    names = [*outputs_of(stems), *LISTS]
    assert len({name.casefold() for name in names}) == len(names)
    assert not set(names) & folders_of(names)
    assert all(".." not in name.split("/") and not name.startswith("/") for name in names)
    assert all(len(os.fsencode(os.path.basename(name))) <= 220 for name in names)


def random_files(draw: random.Random) -> list[Named]:
    files = []
    for _ in range(draw.randint(1, 12)):
        root = draw.choice(("photos", "photos/", "more", None))
        name = os.path.join(draw.choice(FOLDERS), draw.choice(STEMS) + draw.choice(SUFFIXES))
        files.append(Named(os.path.join(root or "", name), folder=root))
    return list({file.name: file for file in files}.values())


@pytest.mark.parametrize("seed", range(4))
def test_no_two_outputs_of_a_random_tree_share_a_name_and_those_of_a_run_before_stay(seed):
    for number in range(250):
        draw = random.Random(1000 * seed + number)
        files = random_files(draw)
        some = draw.sample(files, draw.randint(0, len(files)))
        before = name_outputs(some, ENDINGS, known={}, reserved=LISTS)
        stems = name_outputs(files, ENDINGS, known=before, reserved=LISTS)
        assert stems.keys() == {file.name for file in files} and before.items() <= stems.items()
        check_names(stems)
        again = name_outputs(files, ENDINGS, known=stems, reserved=LISTS)
        assert again == stems


def test_names_follow_the_path_in_the_folder_that_was_asked_about():
    files = [
        Named("photos/a/x.png", folder="photos/"), Named("photos/b/x.jpg", folder="photos/"),
        Named("elsewhere/a.b.png"), Named("there/a.b.jpg"), Named("-", b"image"),
        Named("gs://bucket/p/a/x.png", folder="gs://bucket/p"),
    ]  # fmt: skip
    stems = list(name_outputs(files, ENDINGS, known={}).values())
    assert stems == ["a/x", "b/x", "a.b", "a.b_2", "-", "a/x_2"]


def checked(sources: list[str], out: str, known: dict[str, str] | None = None) -> dict[str, str]:
    """The stems of images that are on the disk."""
    files, folder, known = list(find_images(sources)), epath.Path(out), known or {}
    check_folder(files, folder)
    stems = name_outputs(files, ENDINGS, known=known, reserved=LISTS)
    check_outputs(files, stems, ENDINGS, folder, known=known)
    return stems


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """`tree(NAME, …)` makes files below the current folder."""
    monkeypatch.chdir(tmp_path)

    def make(*names: str) -> None:
        for name in names:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "w") as file:
                file.write(name)

    return make


@pytest.mark.parametrize(
    ("sources", "out", "sentence"),
    [
        (["photos"], "photos", "is the folder photos"),
        (["photos"], "photos/maps", "lies in it"),
        (["photos"], "photos/a/new", "lies in it"),
        (["photos"], "link", "lies in it"),
        (["photos"], "more/maps", "lies in it"),  # photos/linked leads to more
        (["photos"], "inside", "lies in it"),  # inside/a leads to photos/a
        (["photos/a/x.png"], "photos/a", "is there and would be replaced"),
        (["photos"], "taken", "is there and would be replaced"),
        (["photos"], "file", "is a file, where a folder is needed"),
    ],
)
def test_what_would_be_lost_or_taken_for_an_image_is_refused(tree, sources, out, sentence):
    tree("photos/a/x.png", "photos/y.jpg", "more/deep/z.jpg", "taken/y_overlay.png", "file/a")
    os.symlink("photos", "link")
    os.symlink("../more", "photos/linked")
    os.mkdir("inside")
    os.symlink("../photos/a", "inside/a")
    with pytest.raises(ConfigError, match=sentence):
        checked(sources, out)


def test_maps_beside_photos_and_above_them_are_written_and_are_no_photos_later(tree):
    tree("photos/a/x.jpg")
    assert checked(["photos"], ".") == {"photos/a/x.jpg": "a/x"}
    stems = checked(["photos/a/x.jpg"], "photos/a")
    tree("photos/a/x.png")
    assert checked(["photos/a/x.jpg"], "photos/a", stems) == stems
    with pytest.raises(ConfigError, match="was itself written by an earlier run"):
        checked(["photos/*/x.*"], "photos/a", stems)


def test_random_trees_with_links_are_named_or_refused_and_nothing_of_theirs_is_touched(tree):
    refused = 0
    for number in range(60):
        draw, root = random.Random(number), f"tree{number}"
        folders, stems = ("", "a", "b", "a.png", "a/b"), ("x", "x_2", "x_overlay")
        made = {
            os.path.join(root, draw.choice(folders), draw.choice(stems) + end)
            for end in itertools.islice(itertools.cycle(SUFFIXES), draw.randint(1, 8))
        }  # fmt: skip
        tree(*made)
        if draw.random() < 0.5:
            os.symlink(draw.choice((".", "a", "..")), os.path.join(root, "link"))
        out = draw.choice(
            (f"out{number}", root, f"{root}/a", f"{root}/link/maps", f"{root}_maps", ".")
        )
        try:
            stems = checked([root], out)
        except ConfigError:
            refused += 1
            continue
        check_names(stems)
        written = {os.path.realpath(os.path.join(out, name)) for name in outputs_of(stems)}
        assert len(written) == len(stems) * len(ENDINGS)
        assert not written & {os.path.realpath(name) for name in made}
        assert not any(name.startswith(os.path.realpath(root) + os.sep) for name in written)
    assert 10 < refused < 50


def test_a_sheet_of_images_is_none_of_them(tree):
    tree("photos/x.png", "photos/y.png")
    os.symlink("photos", "link")
    assert (
        len(list(never_writing_over(find_images(["photos"]), epath.Path("z.png"), "--picture")))
        == 2
    )
    with pytest.raises(ConfigError, match="--picture=link/y.png is one of the images"):
        list(never_writing_over(find_images(["photos"]), epath.Path("link/y.png"), "--picture"))


def test_images_behind_links_are_found_and_loops_end(tree):
    tree("photos/a/x.png", "elsewhere/y.png")
    os.symlink("../elsewhere", "photos/link")
    os.symlink("..", "photos/a/back")
    assert [x.name for x in find_images(["photos"])] == ["photos/a/x.png", "photos/link/y.png"]


def test_names_that_a_spreadsheet_would_compute_are_paths(tree):
    tree("-1.png", "=a/x.png")
    assert [x.name for x in find_images(["*.png", "=a"])] == ["./-1.png", "./=a/x.png"]


def test_a_report_goes_to_no_folder_of_images(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "class_maps.png").write_bytes(b"")
    (tmp_path / "link").symlink_to("photos")
    for sources in (["photos"], ["photos/class_maps.png"], ["photos/*.png"]):
        files = list(find_images([str(tmp_path / source) for source in sources]))
        for folder in ("photos", "link"):
            with pytest.raises(
                ConfigError, match="--out=.* which is asked about|--out=.* is the f"
            ):
                check_report_folder(files, epath.Path(tmp_path / folder), "--out")
        check_report_folder(files, epath.Path(tmp_path / "report"), "--out")


def test_features_and_exports_do_not_replace_the_checkpoint(command, tmp_path):
    config = registry.model_config("ViT-mu/16", image_size=32, num_classes=7)
    checkpoint = tmp_path / "model.npz"
    weights = formats.LoadedCheckpoint(config, parameters(config))
    formats.write_checkpoint(weights, checkpoint, "official")
    before = checkpoint.read_bytes()
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    (tmp_path / "link.npz").symlink_to("model.npz")
    prepared = ["--config.data.mean=(0.5,)", "--config.data.std=(0.5,)"]
    for out in ("model.npz", "link.npz"):
        code, _, err = command(
            "predict", f"--checkpoint={checkpoint}", tmp_path / "a.png", f"--features={tmp_path / out}", *prepared
        )  # fmt: skip
        assert code == 2 and "is the checkpoint itself: name another file" in err
        with pytest.raises(ConfigError, match="is the checkpoint itself"):
            check_not_checkpoint(tmp_path / out, checkpoint, "--out")
    assert checkpoint.read_bytes() == before
    check_not_checkpoint(tmp_path / "m.onnx", checkpoint, "--out")
