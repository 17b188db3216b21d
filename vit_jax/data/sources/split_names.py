"""Which names stand for splits: of folders, of folders inside tar files and of these files, and in the column `split`
of a list. Names come as people write them: 'Training', 'seg_train', 'test_images', 'valid'.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from vit_jax.data.sources.text import same_text

SPLITS = ("train", "test", "val", "validation")
# What a held-out split may be called instead: the first that is there.
ALIASES = {
    "test": ("val", "validation"),
    "val": ("validation", "test"),
    "validation": ("val", "test"),
}

_SPLIT_OF_WORD = {
    **dict.fromkeys(("train", "training", "trn", "trainval"), "train"),
    **dict.fromkeys(("test", "testing", "tst", "holdout", "heldout"), "test"),
    **dict.fromkeys(("val", "valid", "validate", "eval", "evaluation", "evaluate"), "val"),
    **dict.fromkeys(("dev", "devel", "development"), "val"),
    "validation": "validation",
}
_OF_TWO_WORDS = {
    ("train", "val"): "trainval",
    ("hold", "out"): "holdout",
    ("held", "out"): "heldout",
}
# Words that say nothing of a split beside the one that names it.
_ANY_SET = (
    "set", "sets", "data", "dataset", "datasets", "image", "images", "img", "imgs", "picture", "pictures", "photo",
    "photos", "split", "splits", "sample", "samples", "folder", "directory", "dir",
)  # fmt: skip
_GLUED = re.compile(
    rf"(?:{'|'.join(_ANY_SET)})?({'|'.join(sorted(_SPLIT_OF_WORD, key=len, reverse=True))})(?:{'|'.join(_ANY_SET)})?"
)
_WORDS = re.compile(r"[^\W\d_]+|\d+")
_CAPITAL_WITHIN = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclasses.dataclass(frozen=True)
class _Parsed:
    """A name that has the word of one split.

    Attributes:
      split: that the word stands for.
      affix: the other words, with '*' where the word of the split is; ('*',) if there are none.
    """

    split: str
    affix: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return self.affix == ("*",)


def find_splits(names: Iterable[str], *, all_are_splits: bool = False) -> dict[str, str]:
    """The names among `names` that stand for splits, and the split that each stands for.

    Understood are
    - a name of `SPLITS` as it is;
    - another spelling without further words ('Training', 'test_set', 'VALID'), if all names are splits, or if one to
      train on and one to judge by are among them;
    - with further words ('seg_train'), if one to train on and one to judge by have the same ('seg_test').

    Of several names for the same split, one that is the split's name keeps it; all others are splits of their own
    names.

    Args:
      all_are_splits: all names are likely to be splits, so that the words beside the split need not be the same if
        there is one name alone to train on: 'train' and 'test_public'.

    Returns:
      name → split, those of `SPLITS` first.
    """
    names = list(dict.fromkeys(names))
    parsed = {name: _parse(name) for name in names}
    known = {name: of_name for name, of_name in parsed.items() if of_name is not None}
    understood = {name for name in known if name in SPLITS}
    affixes = {of_name.affix for of_name in known.values()}
    for affix in affixes:
        same = {name: of_name for name, of_name in known.items() if of_name.affix == affix}
        if has_both_sides(of_name.split for of_name in same.values()):
            understood.update(same)
    exact = [name for name, of_name in known.items() if of_name.is_exact]
    if len(exact) == len(names):
        understood.update(exact)
    trains = [name for name, of_name in known.items() if of_name.split == "train"]
    if all_are_splits and len(known) == len(names) and len(trains) == 1 and len(names) > 1:
        understood.update(known)
    return _named({name: known[name] for name in names if name in understood})


def splits_of_files(names: Sequence[str]) -> list[str]:
    """The split that the name of each file has as a word: 'imagenet-train-000.tar'; '' if there is none.

    Other words than those of `SPLITS` count if files to train on and files to judge by are among them.
    """
    words = [re.split(r"[^A-Za-z]+", name) for name in names]
    exact = [next((word for word in of_name if word in SPLITS), "") for of_name in words]
    lower = [[_SPLIT_OF_WORD.get(word.lower(), "") for word in of_name] for of_name in words]
    spelled = [next(filter(None, of_name), "") for of_name in lower]
    understood = [known or other for known, other in zip(exact, spelled, strict=True)]
    return understood if has_both_sides(filter(None, understood)) else exact


def first_split_name(folders: Sequence[str]) -> str:
    """The one of nested folders that may be the folder of a split; '' if none has the word of one."""
    for is_likely in (SPLITS.__contains__, is_split_name, has_split_word):
        for folder in folders:
            if is_likely(folder):
                return folder
    return ""


def has_both_sides(splits: Iterable[str]) -> bool:
    """Whether one of some splits is to train on and another one to judge by."""
    sides = {split == "train" for split in splits}
    return len(sides) == 2


def are_splits(texts: Collection[str]) -> bool:
    """Whether all texts name splits, at least one to train on and one to judge by."""
    splits = find_splits(filter(None, texts))
    return len(splits) == len(texts) and has_both_sides(splits.values())


def names_to_train_on(names: Collection[str]) -> list[str]:
    """The names that mean the examples to train on."""
    parsed = {name: _parse(name) for name in names}
    return [name for name, of_name in parsed.items() if of_name and of_name.split == "train"]


def is_split_name(name: str) -> bool:
    """Whether a name is that of a split in some spelling, without further words."""
    parsed = _parse(name)
    return parsed is not None and parsed.is_exact


def has_split_word(name: str) -> bool:
    """Whether a word of a name is that of a split."""
    return _parse(name) is not None


def aliases(splits: Collection[str], spelled: Mapping[str, str] | None = None) -> dict[str, str]:
    """What splits that are not there are called instead.

    Args:
      splits: their names.
      spelled: name as it is written → split, see `find_splits`.
    """
    instead = {
        name: next(other for other in others if other in splits)
        for name, others in ALIASES.items()
        if name not in splits and not set(splits).isdisjoint(others)
    }
    written = {name: split for name, split in (spelled or {}).items() if name not in splits}
    return instead | {name: split for name, split in written.items() if split in splits}


def _named(parsed: Mapping[str, _Parsed]) -> dict[str, str]:
    """The split of each name, so that no two names have the same."""
    splits = {name: name for name in parsed if name in SPLITS}
    taken = set(splits.values())
    others = [name for name in parsed if name not in splits]
    wanted = collections.Counter(parsed[name].split for name in others)
    for name in others:
        split = parsed[name].split
        splits[name] = name if split in taken or wanted[split] > 1 else split
    order = [*SPLITS, *(split for split in splits.values() if split not in SPLITS)]
    return dict(sorted(splits.items(), key=lambda item: order.index(item[1])))


@functools.lru_cache(4096)  # tar files have the same folders millions of times
def _parse(name: str) -> _Parsed | None:
    """A name by its words; `None` if it has not the word of exactly one split."""
    text = same_text(name)
    return _parse_words(text.casefold()) or _parse_words(_CAPITAL_WITHIN.sub("_", text).casefold())


def _parse_words(text: str) -> _Parsed | None:
    words = _join_two(_WORDS.findall(text))
    splits: list[str] = []
    affix: list[str] = []
    for word in words:
        match = _GLUED.fullmatch(word)
        if match:
            splits.append(_SPLIT_OF_WORD[match[1]])
            affix.append("*")
        elif word not in _ANY_SET:
            affix.append(word)
    return _Parsed(splits[0], tuple(affix)) if len(splits) == 1 else None


def _join_two(words: Sequence[str]) -> list[str]:
    """Words, of which two that are one ('hold', 'out') are joined."""
    joined: list[str] = []
    for word in words:
        pair = (joined[-1], word) if joined else None
        if pair in _OF_TWO_WORDS:
            joined[-1] = _OF_TWO_WORDS[pair]
        else:
            joined.append(word)
    return joined
