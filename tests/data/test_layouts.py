"""What folders, lists and tar files mean: each layout is read right, asked about, or refused with the cure."""

import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data

from .layout_kinds import ASKED, READ, make_layout

GATE = 2 * len([*READ, *ASKED])


def check(number, root):
    """Opens the layout of a number and compares it with what was meant. Returns whether it was read."""
    made = make_layout(number, root)
    config = Data(
        name=made.name, path=str(made.path), holdout=0.0 if made.sizes[1] is None else 0.1
    )
    if made.words:
        with pytest.raises(ConfigError) as raised:
            sources.open_train(config)
        assert all(words in str(raised.value) for words in made.words), raised.value
        return False
    train = sources.open_train(config)
    assert train.classes == made.classes and len(train) == made.sizes[0]
    if made.sizes[1] is not None:
        test = sources.open_eval(config)
        assert test.classes == made.classes and len(test) == made.sizes[1]
    return True


def test_layouts_of_all_kinds_are_read_right_or_asked_about(tmp_path_factory):
    for number in range(GATE):
        check(number, tmp_path_factory.mktemp(f"layout{number}"))


@pytest.mark.slow
def test_400_layouts_are_read_right_or_asked_about(tmp_path_factory):
    read = [check(n, tmp_path_factory.mktemp(f"layout{n}")) for n in range(GATE, GATE + 400)]
    assert sum(read) >= 240


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def opened(root, split="train", **fields):
    config = Data(name="folder", path=str(root), **{"holdout": 0.0} | fields)
    return sources.open_source(config, split)


def test_each_answer_to_a_question_is_a_reading(tmp_path):
    touch(
        tmp_path, *(f"{p}/{c}/{i}.png" for p in ("b", "a") for c in ("moss", "fern") for i in "12")
    )
    joined = opened(tmp_path, layout="parts")
    assert joined.classes == ("fern", "moss") and joined.labels.tolist() == [0] * 4 + [1] * 4
    assert opened(tmp_path, layout="classes").classes == ("a", "b")
    assert opened(tmp_path / "a").classes == ("fern", "moss")
    with pytest.raises(ConfigError, match="no folder .* is called train"):
        opened(tmp_path, layout="splits")


def test_a_folder_called_train_is_a_class_or_a_split_as_the_user_answers(tmp_path):
    touch(tmp_path, "bus/1.png", "train/express/1.png", "train/freight/1.png")
    assert opened(tmp_path, layout="classes").classes == ("bus", "train")
    split = opened(tmp_path, layout="splits")
    assert split.classes == ("express", "freight") and len(split) == 2


def test_several_folders_to_train_on_are_splits_by_option(tmp_path):
    touch(tmp_path, *(f"{s}/{c}/1.png" for s in ("train", "Training", "test") for c in "ab"))
    assert len(opened(tmp_path, "train+Training", layout="splits")) == 4


def test_masks_beside_images_are_skipped_or_kept_by_option(tmp_path):
    touch(
        tmp_path, "a/1.png", "a/1_mask.png", "b/1.png", "b/1.seg.png", "b/gt_1.png", "b/my_mask.png"
    )
    touch(tmp_path, "c/images/1.png", "c/masks/1.png")
    assert len(opened(tmp_path, mask_files="keep")) == 8
    assert opened(tmp_path, mask_files="skip").paths == (
        "a/1.png", "b/1.png", "b/my_mask.png", "c/images/1.png",
    )  # fmt: skip


def test_a_class_that_is_stored_in_two_forms_is_refused(tmp_path):
    touch(tmp_path, "train/c\u00e1/1.png", "train/ca\u0301/1.png", "val/c\u00e1/1.png")
    with pytest.raises(ConfigError, match=r"twice: .*c\\xe1"):
        opened(tmp_path)


def test_how_a_folder_was_understood_is_logged_once_before_anything_runs(tmp_path, caplog):
    touch(
        tmp_path,
        *(f"{s}/{c}/{i}.png" for s in ("Training", "valid", "test") for c in "ab" for i in "12"),
    )
    touch(tmp_path, "Training/a/.git/0.png", "Training/a/notes.txt", "Training/b/1.npy", "0.png")
    config = Data(name="folder", path=str(tmp_path))
    with caplog.at_level("INFO", logger="absl"):
        for open_side in (sources.open_train, sources.open_eval):
            open_side(config)
    lines = [
        r.message.removeprefix(f"{tmp_path}: ") for r in caplog.records if r.levelname == "INFO"
    ]
    assert lines == [
        "splits: train 4 ('Training'), test 4, val 4 ('valid'); judged by test, not by val: "
        "--config.data.eval_split=val judges by it",
        "2 classes from the names of folders: a (2 + 2 + 2), b (2 + 2 + 2)",
        "skipped: 1 .txt, 1 images beside the folders of classes, 1 arrays (.npy) beside a picture of "
        "the same name, 1 hidden, or in hidden folders or those of a file system",
    ]  # fmt: skip


def test_a_line_of_many_classes_is_bounded(tmp_path, caplog):
    touch(tmp_path, *(f"c{i}/{j}.png" for i in range(50) for j in range(1 + i % 3)))
    with caplog.at_level("INFO", logger="absl"):
        opened(tmp_path)
    assert "50 classes from the names of folders (1 to 3 images each): c0 (1 + 0)" in caplog.text
    assert "c29 (3 + 0), and 20 others" in caplog.text


def test_every_command_shows_how_a_folder_was_understood_or_asks_with_exit_code_2(
    command, tmp_path, caplog
):
    for name in ("a", "b"):
        touch(tmp_path / name, "Training/x/0.png", "Training/y/0.png", "dev/x/0.png")
    touch(tmp_path / "c", "train/x/0.png", "other/0.png")
    recipe = ["--config=configs/folder.py", "--config.data.examine=False", "--dry_run"]
    for name, arguments in (
        ("a", ["train", *recipe, f"--config.data.path={tmp_path}/a", f"--workdir={tmp_path}/run"]),
        ("b", ["prepare", f"{tmp_path}/b", f"--out={tmp_path}/out"]),
    ):
        with caplog.at_level("INFO", logger="absl"):
            command(*arguments)
        assert f"{tmp_path}/{name}: splits: train 2 ('Training'), val 1 ('dev')" in caplog.text
        assert f"{tmp_path}/{name}: 2 classes from the names of folders: x (1 + 1)" in caplog.text
    for arguments in (
        ["train", *recipe, f"--config.data.path={tmp_path}/c", f"--workdir={tmp_path}/run"],
        ["prepare", f"{tmp_path}/c", f"--out={tmp_path}/new"],
        ["classify", f"{tmp_path}/c", f"--out={tmp_path}/new", "--weights=none"],
    ):
        code, _, err = command(*arguments)
        assert code == 2 and "--config.data.layout=classes" in err
    assert not (tmp_path / "new").exists() and not (tmp_path / "run").exists()
