"""The meaning of the folders in a folder of images: splits, classes, or parts. Only names are read.

A folder holds, of these the first that fits:
1. images and no sub-folders: they have no labels;
2. train/ and test/ (or val/, validation/, or another spelling: `split_names.py`), each with one sub-folder per class;
3. nothing but train/ and test/ (or …) that hold images and no sub-folders: they have no labels;
4. one sub-folder per class, each with the folders train/ and test/ (or …);
5. one sub-folder per class. Images beside the class folders belong to no class and are skipped.

Where two of these may be meant, the user is asked, and answers with `config.data.layout`.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vit_jax.base.errors import ConfigError
from vit_jax.data.sources.split_names import (
    find_splits,
    has_both_sides,
    has_split_word,
    is_split_name,
    names_to_train_on,
)
from vit_jax.data.sources.table import is_image_name, natural
from vit_jax.data.sources.text import readable, same_text
from vit_jax.data.sources.trees import Tree

_NAMED = 4  # folders in a message

ClassFolders = dict[str, list[str]]  # class → its folders, from the root


@dataclasses.dataclass(frozen=True)
class Layout:
    """The meaning of folders. Names of folders are spelled like on the disk.

    Attributes:
      classes: split → class → the folders with its images, '' being the split where there are none; empty where images
        have no labels.
      unlabelled: split → the folder that has its images, where these have no labels.
      spelled: folder → split, for the folders of splits.
      passed_over: folders below which images are neither of a split nor of a class.
    """

    classes: Mapping[str, ClassFolders] = dataclasses.field(default_factory=dict)
    unlabelled: Mapping[str, str] = dataclasses.field(default_factory=dict)
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict)
    passed_over: Sequence[str] = ()

    def loose_files(self, tree: Tree) -> list[str]:
        """The files that lie in no folder of a class, or of a split without labels."""
        if self.unlabelled:
            folders = [] if "" in self.unlabelled.values() else [""]
        else:
            class_folders = [
                f for split in self.classes.values() for fs in split.values() for f in fs
            ]
            folders = sorted({parent for folder in class_folders for parent in _parents(folder)})
        direct = [os.path.join(folder, name) for folder in folders for name in tree.files(folder)]
        below = [name for folder in self.passed_over for name in tree.files_below(folder)]
        return [*direct, *below]


def read_layout(tree: Tree, choice: str) -> Layout:
    """The meaning of the folders of a tree.

    Args:
      choice: `config.data.layout`.

    Raises:
      ConfigError: two readings are possible, or the one that is chosen is not.
    """
    folders = tree.folders("")
    if not folders and choice != "auto":
        raise ConfigError(f"config.data.layout = {choice!r}, and {tree.root} has no sub-folders")
    if not folders:
        return Layout(unlabelled={"": ""})
    if choice == "classes":
        return Layout({"": {name: [name] for name in folders}})
    if choice == "parts":
        return Layout({"": _join_classes(tree, folders)})
    layout = (
        _read_splits(tree, folders, choice)
        or _read_flat_splits(tree, folders, choice)
        or _read_splits_in_classes(tree, folders)
    )
    if layout:
        return layout
    if choice == "splits":
        raise ConfigError(
            f"config.data.layout = 'splits', and no folder of {tree.root} is called train, test or the like: it has "
            f"{_some(folders)}"
        )
    _check_named_like_splits(tree, folders)
    _check_depth(tree, folders)
    _check_parts(tree, folders)
    return Layout({"": {name: [name] for name in folders}})


def _read_splits(tree: Tree, folders: Sequence[str], choice: str) -> Layout | None:
    """Folders of splits that hold class folders; `None` if there are none."""
    if not any(map(has_split_word, folders)):
        return None  # before all folders are looked into, of which there may be thousands
    deep = [name for name in folders if tree.folders(name)]
    all_splits = find_splits(folders, all_are_splits=len(deep) == len(folders))
    splits = {name: split for name, split in all_splits.items() if name in deep}
    if not splits:
        return None
    if choice != "splits":
        _check_trains_once(tree, splits)
    others = [name for name in folders if name not in all_splits and _has_images(tree, name)]
    if others and choice != "splits" and not has_both_sides(splits.values()):
        raise _ask_whether_splits(tree, list(splits), others)
    tops = _descend_all(tree, list(splits))
    classes: dict[str, ClassFolders] = {}
    names: dict[str, str] = {}  # in the form that is compared → as the first split has it
    for name, split in splits.items():
        classes[split] = _match_classes(tree, tops[name], names)
        names = names or {same_text(of_class): of_class for of_class in classes[split]}
    flat = [name for name in all_splits if name not in splits]
    return Layout(classes, spelled=splits, passed_over=[*flat, *others])


def _match_classes(tree: Tree, top: str, names: Mapping[str, str]) -> ClassFolders:
    """The class folders in the folder of a split.

    Args:
      top: that folder.
      names: of the allowed classes, in the form that is compared → as they are called; empty: all are allowed.
    """
    classes: ClassFolders = {}
    for folder in tree.folders(top):
        compared = same_text(folder)
        if names and compared not in names:
            near = [name for key, name in names.items() if key.casefold() == compared.casefold()]
            hint = f"; they have {near[0]!r}" if near else ""
            raise ConfigError(
                f"{tree.root / top} has the class folder {folder!r}, which the training images lack{hint}"
            )
        twin = next((name for name in classes if same_text(name) == compared), None)
        if twin is not None:
            raise ConfigError(
                f"{tree.root / top} has the class folder {readable(folder)!r} twice: the names differ in how their "
                f"accents are stored ({ascii(twin)} and {ascii(folder)}). Move the images into one folder"
            )
        classes[names.get(compared, folder)] = [os.path.join(top, folder)]
    return classes


def _read_flat_splits(tree: Tree, folders: Sequence[str], choice: str) -> Layout | None:
    """Folders of splits that hold images alone, which have no labels; `None` if they are anything else."""
    splits = find_splits(folders)
    if not names_to_train_on(splits) or any(tree.folders(name) for name in splits):
        return None
    others = [name for name in folders if name not in splits and _has_images(tree, name)]
    if others and choice != "splits":
        if not has_both_sides(splits.values()):
            return None  # a class that is called 'train'
        raise _ask_whether_splits(tree, list(splits), others)
    if choice != "splits":
        _check_trains_once(tree, splits)
    unlabelled = {split: name for name, split in splits.items()}
    return Layout(unlabelled=unlabelled, spelled=splits, passed_over=others)


def _read_splits_in_classes(tree: Tree, folders: Sequence[str]) -> Layout | None:
    """Class folders that hold nothing but the folders of splits; `None` if one of them does not."""
    of_class: dict[str, list[str]] = {}
    for name in folders:
        of_class[name] = tree.folders(name)
        if not of_class[name] or _has_direct_images(tree, name):
            return None
    names = {name: None for inner in of_class.values() for name in inner}
    splits = find_splits(names)
    if len(splits) < len(names) or not has_both_sides(splits.values()):
        return None
    if len(names_to_train_on(splits)) > 1:
        return None
    places = [os.path.join(name, inner) for name in folders for inner in of_class[name]]
    if not all(_has_direct_images(tree, place) for place in places):
        return None  # several data sets, each with splits
    classes: dict[str, ClassFolders] = {split: {} for split in splits.values()}
    for name, inner in of_class.items():
        for split_folder in inner:
            classes[splits[split_folder]][name] = [os.path.join(name, split_folder)]
    if missing := [name for name in folders if name not in classes["train"]]:
        raise ConfigError(
            f"{tree.root / missing[0]} has images to judge by and none to train on: it has "
            f"{_some(of_class[missing[0]])}"
        )
    return Layout(classes, spelled=splits)


def _join_classes(tree: Tree, parts: Sequence[str]) -> ClassFolders:
    """The class folders of several parts, joined by their names."""
    classes: ClassFolders = {}
    names: dict[str, str] = {}
    for part in parts:
        for folder in tree.folders(part):
            name = names.setdefault(same_text(folder), folder)
            classes.setdefault(name, []).append(os.path.join(part, folder))
    if not classes:
        raise ConfigError(
            f"config.data.layout = 'parts', and the folders of {tree.root} hold no folders of classes: {_some(parts)}"
        )
    return {name: classes[name] for name in sorted(classes, key=natural)}


def _descend_all(tree: Tree, folders: Sequence[str]) -> dict[str, str]:
    """Where the class folders of each split are: in its folder, or below folders that are the only ones in theirs in
    every split, such as train/images/ and test/images/.
    """
    tops = {folder: folder for folder in folders}
    while True:
        inner = {folder: _only_folder(tree, top) for folder, top in tops.items()}
        if any(top is None or not tree.folders(top) for top in inner.values()):
            return tops
        if any(_has_direct_images(tree, top) for top in inner.values()):
            return tops
        tops = inner


def _only_folder(tree: Tree, folder: str) -> str | None:
    """The only folder in one that has no images beside it; else `None`."""
    inner = tree.folders(folder)
    if len(inner) != 1 or _has_direct_images(tree, folder):
        return None
    return os.path.join(folder, inner[0])


def _check_trains_once(tree: Tree, splits: Mapping[str, str]) -> None:
    """Raises `ConfigError`, a question, if several folders are to train on."""
    trains = names_to_train_on(splits)
    if len(trains) < 2:
        return
    joined = "+".join(splits[name] for name in trains)
    raise _ask(
        tree,
        f"the folders {_some(trains)} are all named like images to train on",
        {
            f"config.data.layout=splits --config.data.train_split={joined}": "all of them, or name "
            "one of them as train_split",
            "config.data.layout=classes": "each folder is a class",
        },
    )


def _check_named_like_splits(tree: Tree, folders: Sequence[str]) -> None:
    """Raises `ConfigError`, a question, if a folder among others is named like a split and holds folders."""
    splits = [name for name in folders if is_split_name(name) and tree.folders(name)]
    if splits:
        raise _ask_whether_splits(tree, splits, [name for name in folders if name not in splits])


def _check_depth(tree: Tree, folders: Sequence[str]) -> None:
    """Raises `ConfigError`, a question, if all images are below one folder that only holds folders."""
    top = _only_folder(tree, "")
    if top is None or not tree.folders(top) or _has_direct_images(tree, top):
        return
    while (inner := _only_folder(tree, top)) and tree.folders(inner):
        if _has_direct_images(tree, inner):
            break
        top = inner
    raise _ask(
        tree,
        f"all images are below the folder {readable(folders[0])!r}, which only holds folders",
        {
            f"config.data.path={tree.root / top}": f"what this has are the classes or splits: "
            f"{_some(tree.folders(top))}",
            "config.data.layout=classes": f"all are of one class, {readable(folders[0])!r}",
        },
    )


def _check_parts(tree: Tree, folders: Sequence[str]) -> None:
    """Raises `ConfigError`, a question, if all folders hold the same folders, or mostly so, and no images."""
    if len(folders) < 2:
        return
    inner: list[set[str]] = []
    for name in folders:
        inner.append(set(map(same_text, tree.folders(name))))
        if not inner[-1] or _has_direct_images(tree, name):
            return
    union = set.union(*inner)
    common = set.intersection(*inner)
    hold_splits = (
        set(find_splits(union)) == union and common
    )  # which may differ, as valid and eval do
    if len(union) < 2 or (2 * len(common) < len(union) and not hold_splits):
        return
    names = sorted(union, key=natural)
    first = next((name for name in folders if _has_images(tree, name)), folders[0])
    answers = {
        "config.data.layout=parts": f"the classes are {_some(names)}, and each has the images of "
        "all parts",
        "config.data.layout=classes": f"the classes are {_some(folders)}",
        f"config.data.path={tree.root / first}": f"{readable(first)!r} alone",
    }
    if find_splits(names):  # data sets with splits, which cannot be joined
        del answers["config.data.layout=parts"]
    raise _ask(tree, f"the folders {_some(folders)} hold the same folders: {_some(names)}", answers)


def _ask_whether_splits(tree: Tree, splits: Sequence[str], others: Sequence[str]) -> ConfigError:
    """The question whether a folder is a split or a class."""
    return _ask(
        tree,
        f"{_some(splits)} is a name for a split, and {_some(others)} beside it is not",
        {
            "config.data.layout=classes": f"the classes are {_some([*splits, *others])}",
            "config.data.layout=splits": f"the splits are {_some(splits)}, and {_some(others)} "
            "are skipped",
        },
    )


def _ask(tree: Tree, problem: str, answers: Mapping[str, str]) -> ConfigError:
    """A question: `answers` has the flag for each, and what it means."""
    choices = "; ".join(f"--{flag} ({meaning})" for flag, meaning in answers.items())
    return ConfigError(
        f"{tree.root} can be read in {len(answers)} ways: {problem}. Set one of: {choices}. 'vit_jax prepare' has "
        "--layout, and its first argument"
    )


def _has_direct_images(tree: Tree, folder: str) -> bool:
    return any(map(is_image_name, tree.files(folder)))


def _has_images(tree: Tree, folder: str) -> bool:
    """Whether there are images in a folder or below it."""
    return _has_direct_images(tree, folder) or any(map(is_image_name, tree.files_below(folder)))


def _parents(folder: str) -> Iterator[str]:
    """The folders that a folder is in, from the root: 'a/b/c' is in '', 'a' and 'a/b'."""
    parts = folder.split("/")
    return ("/".join(parts[:count]) for count in range(len(parts)))


def _some(names: Iterable[str]) -> str:
    names = list(map(readable, names))
    more = f", … ({len(names)})" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
