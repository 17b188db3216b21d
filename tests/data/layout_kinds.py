"""Makes folders, lists, tar and Parquet files as people have them, by number, and says what each means."""

import dataclasses
import io
import json
import pathlib
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable

import numpy as np
import pyarrow
import pyarrow.parquet

PAIRS = (
    ("train", "test"), ("train", "val"), ("train", "valid"), ("training", "testing"), ("training", "validation"),
    ("train_set", "test_set"), ("train images", "test images"), ("seg_train", "seg_test"),
    ("plants-train", "plants-val"), ("train", "eval"), ("train2017", "val2017"), ("traindata", "holdout"),
)  # fmt: skip
CASES = (str.lower, str.upper, str.title)
CLASSES = ("fern", "moss", "palm")
HIDDEN = (
    ".hidden.png", "._0.png", ".thumbnails/0.png", ".ipynb_checkpoints/a/1.png", "@eaDir/2.png", "__MACOSX/._3.png",
    "#recycle/4.png", "$RECYCLE.BIN/5.png", ".git/6.png", "lost+found/7.png",
)  # fmt: skip
FOREIGN = ("notes.txt", "Thumbs.db", "raw.nef", "film.mp4", "labels.xml", "desktop.ini")


@dataclasses.dataclass(frozen=True)
class Made:
    """What was made, and what it means.

    Attributes:
      name: of `config.data.name`.
      path: of the data.
      classes: that it has; (): images have no labels.
      sizes: examples to train on, and to judge by; `None` where 'test' is held out of the first number.
      words: what the refusal or question must have; '' if it is read.
    """

    name: str
    path: pathlib.Path
    classes: tuple[str, ...] = CLASSES
    sizes: tuple[int, int | None] = (0, None)
    words: tuple[str, ...] = ()


def make_layout(number: int, root: pathlib.Path) -> Made:
    """The layout of a number: every kind in turn, in which a random generator of this number chooses."""
    kinds = [*READ, *ASKED]
    return kinds[number % len(kinds)](np.random.default_rng(number), root)


def _touch(root: pathlib.Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def _pair(rng: np.random.Generator) -> tuple[str, str]:
    """The names of two splits."""
    case = CASES[rng.integers(len(CASES))]
    first, second = PAIRS[rng.integers(len(PAIRS))]
    return case(first), case(second)


def _images(rng: np.random.Generator, folder: str, count: int) -> list[str]:
    """Names of images in a folder, some of them deeper."""
    inner = ["", "", "deeper/", "2024/05/"][rng.integers(4)]
    return [f"{folder}/{inner if i % 2 else ''}{i}.jpg" for i in range(count)]


def _add_others(rng: np.random.Generator, root: pathlib.Path, folders: list[str]) -> None:
    """Adds files to folders that are no examples."""
    for folder in folders:
        for name in (*rng.permutation(HIDDEN)[:3], *rng.permutation(FOREIGN)[:2]):
            _touch(root, [f"{folder}/{name}"])


def splits_of_classes(rng, root):
    first, second = _pair(rng)
    counts = rng.integers(1, 5, 2)
    for split, count in zip((first, second), counts, strict=True):
        for name in CLASSES:
            _touch(root, _images(rng, f"{split}/{name}", count))
    _add_others(rng, root, ["", first, f"{first}/fern", f"{second}/moss"])
    return Made("folder", root, sizes=(3 * counts[0], 3 * counts[1]))


def classes_of_splits(rng, root):
    first, second = _pair(rng)
    for name in CLASSES:
        _touch(root, [f"{name}/{first}/{i}.png" for i in range(4)])
        _touch(root, [f"{name}/{second}/{i}.png" for i in range(2)])
    _add_others(rng, root, ["", "fern", f"fern/{first}"])
    return Made("folder", root, sizes=(12, 6))


def split_folders_within_themselves(rng, root):
    first, second = _pair(rng)
    inner = [("images", "images"), (first, second), ("a/b", "a/b")][rng.integers(3)]
    for split, within in zip((first, second), inner, strict=True):
        _touch(root, [f"{split}/{within}/{name}/{i}.png" for name in CLASSES for i in range(3)])
    return Made("folder", root, sizes=(9, 9))


def three_splits(rng, root):
    case = CASES[rng.integers(len(CASES))]
    val = case(["val", "valid", "validation", "dev", "eval"][rng.integers(5)])
    for split, count in ((case("train"), 4), (val, 2), (case("test"), 3)):
        _touch(root, [f"{split}/{name}/{i}.png" for name in CLASSES for i in range(count)])
    return Made("folder", root, sizes=(12, 9))


def splits_without_labels(rng, root):
    first, second = _pair(rng)
    _touch(root, [f"{first}/{i}.jpg" for i in range(5)] + [f"{second}/{i}.jpg" for i in range(2)])
    _add_others(rng, root, ["", first])
    return Made("folder", root, (), (5, 2))


def class_folders(rng, root):
    others = rng.permutation(["fern", "moss", "Train", "test", "valid"])
    names = tuple(sorted(["rock", *others[:2].tolist()]))
    for name in names:
        _touch(root, [f"{name}/{i}.jpg" for i in range(3)])
    if "Train" in names and {"test", "valid"} & set(names):
        return Made("folder", root, words=("layout=classes", "layout=splits"))
    _add_others(rng, root, ["", names[0]])
    return Made("folder", root, names, (9, None))


def one_class(rng, root):
    name = ["fern", "Tree fern", "été", "7"][rng.integers(4)]
    _touch(root, [f"{name}/{i}.jpg" for i in range(5)])
    _add_others(rng, root, ["", name])
    return Made("folder", root, (name,), (5, None))


def images_alone(rng, root):
    _touch(root, [f"{i}.jpg" for i in range(6)])
    _add_others(rng, root, [""])
    (root / "4.npy").touch()
    return Made("folder", root, (), (6, None))


def arrays_beside_images(rng, root):
    for name in CLASSES:
        _touch(root, [f"{name}/{i}.{suffix}" for i in range(4) for suffix in ("png", "npy")])
        _touch(root, [f"{name}/other.npy"])
    return Made("folder", root, sizes=(15, None))


def accents(rng, root):
    forms = [["NFC", "NFD"], ["NFD", "NFC"]][rng.integers(2)]
    first, second = _pair(rng)
    for split, form in zip((first, second), forms, strict=True):
        name = unicodedata.normalize(form, "cáscara")
        _touch(root, [f"{split}/{name}/{i}.png" for i in range(3)] + [f"{split}/moss/0.png"])
    return Made("folder", root, (unicodedata.normalize(forms[0], "cáscara"), "moss"), (4, 4))


def list_with_splits(rng, root):
    first, second = _pair(rng)
    rows = [(f"{i}.jpg", CLASSES[i % 3], second if i % 4 == 3 else first) for i in range(24)]
    path = root / ["a.csv", "a.jsonl"][rng.integers(2)]
    if path.suffix == ".csv":
        path.write_text("path,label,split\n" + "".join(f"{','.join(row)}\n" for row in rows))
    else:
        keys = ("path", "label", "split")
        lines = (json.dumps(dict(zip(keys, row, strict=True))) for row in rows)
        path.write_text("\n".join(lines))
    return Made("folder", path, sizes=(18, 6))


def list_with_another_column_of_splits(rng, root):
    first, second = _pair(rng)
    column = ["Split", "subset", "partition", "set", "phase"][rng.integers(5)]
    rows = [
        {
            "path": f"{i}.jpg",
            "label": CLASSES[i % 3],
            "patient": f"p{i}",
            "view": ["AP", "PA"][i % 2],
        }
        | {column: second if i % 4 == 3 else first}
        for i in range(24)
    ]
    if rng.integers(2):
        path = root / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path = root / "a.csv"
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        path.write_text("\n".join(lines))
    return Made("folder", path, sizes=(18, 6))


def list_without_splits(rng, root):
    labelled = bool(rng.integers(2))
    rows = [f"{i}.jpg" + f",{CLASSES[i % 3]}" * labelled for i in range(12)]
    (root / "a.csv").write_text("path" + ",label" * labelled + "\n" + "\n".join(rows))
    return Made("folder", root / "a.csv", CLASSES if labelled else (), (12, None))


def metadata_of_the_hub(rng, root):
    first, second = _pair(rng)
    name = ["metadata.csv", "metadata.jsonl"][rng.integers(2)]
    at_root = bool(rng.integers(2))
    rows = {split: [(f"{i}.png", CLASSES[i % 3]) for i in range(6)] for split in (first, second)}
    for split in rows:
        _touch(root, [f"{split}/{file}" for file, _ in rows[split]])
    if at_root:
        rows = {"": [(f"{split}/{file}", label) for split in rows for file, label in rows[split]]}
    for folder, lines in rows.items():
        if name.endswith(".csv"):
            text = "file_name,label\n" + "".join(f"{file},{label}\n" for file, label in lines)
        else:
            text = "\n".join(json.dumps({"file_name": f, "label": label}) for f, label in lines)
        (root / folder / name).write_text(text)
    return Made("folder", root, sizes=(6, 6))


def parquet_of_the_hub(rng, root):
    first, second = [("train", "test"), ("train", "validation"), ("Train", "Valid")][
        rng.integers(3)
    ]
    folder = root / ["", "data"][rng.integers(2)]
    folder.mkdir(exist_ok=True)
    for split, count in ((first, 6), (second, 3)):
        table = pyarrow.table(
            {"image": [b"x"] * count, "label": [CLASSES[i % 3] for i in range(count)]}
        )
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    return Made("folder", root, sizes=(6, 3))


def _write_tar(path: pathlib.Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def tar_with_splits(rng, root):
    first, second = _pair(rng)
    around = ["", "./", "set/"][rng.integers(3)]
    names = [
        f"{around}{split}/{name}/{i}.jpg"
        for split in (first, second)
        for name in CLASSES
        for i in range(3)
    ]
    names += [f"{around}{first}/fern/{hidden}" for hidden in HIDDEN] + [f"{around}notes.txt"]
    _write_tar(root / "a.tar", dict.fromkeys(names, b"x"))
    return Made("tar", root / "a.tar", sizes=(9, 9))


def zip_with_splits(rng, root):
    first, second = _pair(rng)
    method = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED][rng.integers(2)]
    with zipfile.ZipFile(root / "a.zip", "w", method) as archive:
        for split, count in ((first, 3), (second, 2)):
            for name in CLASSES:
                for i in range(count):
                    archive.writestr(f"set/{split}/{name}/{i}.jpg", b"x" * 20)
        archive.writestr(f"__MACOSX/set/{first}/fern/._0.jpg", b"x")
    return Made("folder", root / "a.zip", sizes=(9, 6))


def tar_with_splits_in_classes(rng, root):
    splits = _pair(rng)
    names = [f"{name}/{split}/{i}.jpg" for split in splits for name in CLASSES for i in range(3)]
    _write_tar(root / "a.tar", dict.fromkeys(names, b"x"))
    return Made("tar", root / "a.tar", sizes=(9, 9))


def tars_of_splits(rng, root):
    case = CASES[rng.integers(len(CASES))]
    first, second = [("train", "test"), ("training", "valid"), ("train", "eval")][rng.integers(3)]
    for split, count in ((first, 2), (second, 1)):
        for i in range(count):
            members = {f"{j}.jpg": b"x" for j in range(3)} | {
                f"{j}.cls": CLASSES[j].encode() for j in range(3)
            }
            _write_tar(root / f"set-{case(split)}-{i:04}.tar", members)
    return Made("tar", root, sizes=(6, 3))


def dots_in_tars(rng, root):
    dots = ["2023.01.05_{}", "plate7.A{}.t0", "v1.{}"][rng.integers(3)]
    members = {}
    for i in range(6):
        key = dots.format(i)
        label = CLASSES[i % 3]
        content = {"cls": label.encode(), "json": json.dumps({"label": label}).encode()}
        suffix = ["cls", "json"][rng.integers(2)]
        members |= {f"{key}.jpg": b"x", f"{key}.{suffix}": content[suffix]}
    _write_tar(root / "a.tar", members)
    return Made("tar", root / "a.tar", sizes=(6, None))


def parts(rng, root):
    names = [("part1", "part2"), ("raw", "resized", "small"), ("2023", "2024")][rng.integers(3)]
    for part in names:
        _touch(root, [f"{part}/{name}/{i}.png" for name in CLASSES for i in range(2)])
    return Made("folder", root, words=("layout=parts", "layout=classes"))


def several_data_sets(rng, root):
    first, second = _pair(rng)
    _touch(
        root,
        [
            f"set{i}/{split}/{name}/0.png"
            for i in "12"
            for split in (first, second)
            for name in CLASSES
        ],
    )
    return Made("folder", root, words=(f"config.data.path={root}/set1", "layout=classes"))


def data_sets_with_other_splits(rng, root):
    case = CASES[rng.integers(len(CASES))]
    first = case(["train", "training", "train_set"][rng.integers(3)])
    for folder, second in (("site_a", case("test")), ("site_b", case("valid"))):
        for name in CLASSES:
            _touch(root, [f"{folder}/{first}/{name}/0.png", f"{folder}/{second}/{name}/1.png"])
    return Made("folder", root, words=(f"config.data.path={root}/site_a", "layout=classes"))


def class_called_like_a_split(rng, root):
    name = ["train", "Train", "test"][rng.integers(3)]
    _touch(root, ["bus/0.png", "tram/0.png", f"{name}/freight/0.png", f"{name}/express/0.png"])
    return Made("folder", root, words=("layout=classes", "layout=splits"))


def folder_around(rng, root):
    inner = [CLASSES, tuple(f"{split}/{name}" for split in ("train", "val") for name in CLASSES)]
    around = ["dataset", "a/b"][rng.integers(2)]
    folders = inner[rng.integers(2)]
    _touch(root, [f"{around}/{name}/{i}.png" for name in folders for i in range(2)])
    return Made("folder", root, words=(f"config.data.path={root}/{around} ", "layout=classes"))


def masks(rng, root):
    mask = ["{}_mask.png", "mask_{}.png", "{}.seg.png", "{}-segmentation.png"][rng.integers(4)]
    for name in CLASSES:
        _touch(
            root,
            [f"{name}/{i}.jpg" for i in range(3)] + [f"{name}/{mask.format(i)}" for i in range(3)],
        )
    return Made("folder", root, words=("mask_files=skip", "keep"))


def a_png_for_each_jpeg(rng, root):
    suffix = [".jpg", ".jpeg", ".JPG"][rng.integers(3)]
    for name in CLASSES:
        _touch(root, [f"{name}/{i}{end}" for i in range(3) for end in (suffix, ".png")])
    return Made("folder", root, words=("0.png beside", "mask_files=skip", "keep"))


def two_to_train_on(rng, root):
    if rng.integers(2):
        splits = [f"{split}_{name}" for split in ("train", "test") for name in "ab"]
        _touch(root, [f"{split}/0.png" for split in splits])
        return Made("folder", root, words=("layout=splits", "train_split=train_a+train_b"))
    other = ["Training", "train_set", "TRAIN"][rng.integers(3)]
    _touch(
        root, [f"{split}/{name}/0.png" for split in ("train", other, "test") for name in CLASSES]
    )
    return Made("folder", root, words=("layout=splits", "train_split=train+"))


def other_classes_to_judge_by(rng, root):
    first, second = _pair(rng)
    _touch(root, [f"{first}/{name}/0.png" for name in CLASSES] + [f"{second}/Fern/0.png"])
    return Made("folder", root, words=("'Fern', which the training images lack; they have 'fern'",))


def label_given_twice(rng, root):
    with tarfile.open(root / "a.tar", "w") as tar:
        for label in CLASSES[:2]:
            for name, content in (("a/0.jpg", b"x"), ("a/0.cls", label.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return Made("tar", root / "a.tar", words=("a/0.cls twice, with the labels 'fern' and 'moss'",))


def numbers_given_twice(rng, root):
    members = {"a/0.jpg": b"x", "a/0.cls": b"1", "a/0.json": b'{"label": 2}'}
    _write_tar(root / "a.tar", members)
    return Made("tar", root / "a.tar", words=("a/0.cls says 1 and a/0.json says 2",))


def nested_labels(rng, root):
    label = [{"fern": 1, "moss": 0}, [["fern"]], [{"name": "moss"}]][rng.integers(3)]
    lines = (json.dumps({"path": f"{i}.png", "label": label}) for i in range(3))
    (root / "a.jsonl").write_text("\n".join(lines))
    return Made("folder", root / "a.jsonl", words=("a.jsonl, line 1: the label", "is nested"))


Kind = Callable[[np.random.Generator, pathlib.Path], Made]
READ: tuple[Kind, ...] = (
    splits_of_classes, classes_of_splits, split_folders_within_themselves, three_splits, splits_without_labels,
    class_folders, one_class, images_alone, arrays_beside_images, accents, list_with_splits, list_without_splits,
    tar_with_splits, tar_with_splits_in_classes, tars_of_splits, dots_in_tars, metadata_of_the_hub, parquet_of_the_hub,
    list_with_another_column_of_splits, zip_with_splits,
)  # fmt: skip
ASKED: tuple[Kind, ...] = (
    parts, several_data_sets, class_called_like_a_split, folder_around, masks, two_to_train_on,
    other_classes_to_judge_by, label_given_twice, data_sets_with_other_splits, a_png_for_each_jpeg, numbers_given_twice,
    nested_labels,
)  # fmt: skip
