"""Files and folders below a folder, on a disk or in a bucket. Hidden ones are skipped, and so are folders that file
systems and file managers make for themselves. Names are those from the root: 'train/cat/1.jpg'; the root is ''.
"""

import bisect
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from etils import epath

from vit_jax.base import places
from vit_jax.data.sources.ranges import list_objects
from vit_jax.data.sources.table import natural

# Folders that a NAS, a disk, an archive or a program makes for itself, in lower case. Other names may begin with the
# same characters: '#beach' is a class.
_ADMINISTRATIVE = {
    "@eadir", "@recycle", "@recently-snapshot", "@tmp", "@sharebin", "@sharesnap", "@__thumb", "#recycle", "#snapshot",
    "~snapshot", "$recycle.bin", "recycler", "recycled", "system volume information", "lost+found", "found.000",
    "__macosx", "__pycache__", "network trash folder", "temporary items",
}  # fmt: skip


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or a folder that file systems make for themselves."""
    return name.startswith(".") or name.casefold() in _ADMINISTRATIVE


class Tree(Protocol):
    """Folders and files.

    Attributes:
      root: the folder that names begin at.
      links_back: links that were met and are not followed, since they lead to a folder that contains
        them, or all of the data set.
      hidden: the files that were met and are hidden, or in hidden folders, see `is_hidden`.
    """

    root: epath.Path
    links_back: set[str]
    hidden: set[str]

    def folders(self, folder: str) -> list[str]:
        """The names in a folder of its sub-folders; none if it is not there."""

    def files(self, folder: str) -> list[str]:
        """The names in a folder of the files directly in it; none if it is not there."""

    def files_below(self, folder: str) -> list[str]:
        """The names from the root of the files in a folder and in the folders below it."""

    def contents(self, names: Sequence[str]) -> np.ndarray | None:
        """Numbers that differ where the contents of these files do, (n,) uint64, as the listing has them; `None` on
        a disk, where finding out takes a look at each.
        """


def tree_at(root: epath.Path) -> Tree:
    """The tree below a folder."""
    return _BucketTree(root) if places.in_bucket(root) else _DiskTree(root)


class _BucketTree:
    """A tree of objects, by one listing of all: folders exist in their names alone."""

    def __init__(self, root: epath.Path):
        self.root = root
        self.links_back: set[str] = set()
        # Names that end with a slash are what some tools leave for an empty folder.
        objects = [entry for entry in list_objects(str(root)) if not entry[0].endswith("/")]
        self.hidden = {name for name, _ in objects if any(map(is_hidden, name.split("/")))}
        entries = sorted(entry for entry in objects if entry[0] not in self.hidden)
        self._names = [name for name, _ in entries]
        self._contents = np.fromiter((content for _, content in entries), np.uint64, len(entries))

    def folders(self, folder: str) -> list[str]:
        prefix, names = _prefix(folder), []
        place, end = self._range(prefix)
        while place < end:
            name, slash, _ = self._names[place][len(prefix) :].partition("/")
            if slash:
                names.append(name)
                place = self._range(f"{prefix}{name}/")[1]
            else:
                place += 1
        return sorted(names, key=natural)

    def files(self, folder: str) -> list[str]:
        prefix = _prefix(folder)
        start, end = self._range(prefix)
        names = (name[len(prefix) :] for name in self._names[start:end])
        return sorted((name for name in names if "/" not in name), key=natural)

    def files_below(self, folder: str) -> list[str]:
        start, end = self._range(_prefix(folder))
        return sorted(self._names[start:end], key=natural)

    def contents(self, names: Sequence[str]) -> np.ndarray:
        return self._contents[[bisect.bisect_left(self._names, name) for name in names]]

    def _range(self, prefix: str) -> tuple[int, int]:
        """Where names that begin with `prefix` start and end."""
        if not prefix:
            return 0, len(self._names)
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return bisect.bisect_left(self._names, prefix), bisect.bisect_left(self._names, after)


class _DiskTree:
    """Files of a disk. Links are followed, except those back; of a class, every folder is visited
    once, however many links lead to it.
    """

    def __init__(self, root: epath.Path):
        self.root = root
        self.links_back: set[str] = set()
        self.hidden: set[str] = set()

    def folders(self, folder: str) -> list[str]:
        path = os.path.join(self.root, folder)
        if not os.path.isdir(path):
            return []
        with os.scandir(path) as entries:
            all_folders = [e for e in entries if e.is_dir()]
        folders = [e for e in all_folders if not is_hidden(e.name)]
        self._note_hidden(path, [e.name for e in all_folders if is_hidden(e.name)])
        links = {e.name for e in folders if e.is_symlink() and self._leads_back(e.path)}
        return sorted((e.name for e in folders if e.name not in links), key=natural)

    def files(self, folder: str) -> list[str]:
        path = os.path.join(self.root, folder)
        if not os.path.isdir(path):
            return []
        with os.scandir(path) as entries:
            names = [e.name for e in entries if not e.is_dir()]
        self.hidden.update(self._from_root(path, name) for name in names if is_hidden(name))
        return sorted((name for name in names if not is_hidden(name)), key=natural)

    def files_below(self, folder: str) -> list[str]:
        paths, visited, starts = [], set(), [os.path.join(self.root, folder)]
        while starts:  # first what is there without links, then what links lead to
            links = []
            for where, folders, names in (step for start in starts for step in os.walk(start)):
                status = os.stat(where)
                if (status.st_dev, status.st_ino) in visited:
                    folders.clear()
                    continue
                visited.add((status.st_dev, status.st_ino))
                paths += [os.path.join(where, name) for name in names if name[0] != "."]
                self.hidden.update(self._from_root(where, name) for name in names if name[0] == ".")
                self._note_hidden(where, list(filter(is_hidden, folders)))
                folders[:] = [name for name in folders if not is_hidden(name)]
                links += [path for f in folders if os.path.islink(path := os.path.join(where, f))]
            starts = sorted((link for link in links if not self._leads_back(link)), key=natural)
        start = len(os.path.join(self.root, ""))
        return [path[start:] for path in sorted(paths, key=natural)]

    def contents(self, names: Sequence[str]) -> None:
        return None

    def _note_hidden(self, path: str, folders: Sequence[str]) -> None:
        """Keeps the names of all files in hidden folders at a path."""
        for folder in folders:
            for where, _, names in os.walk(os.path.join(path, folder)):
                self.hidden.update(self._from_root(where, name) for name in names)

    def _from_root(self, folder: str, name: str) -> str:
        return os.path.relpath(os.path.join(folder, name), self.root)

    def _leads_back(self, link: str) -> bool:
        target = os.path.realpath(link)
        inside = (os.path.realpath(os.path.dirname(link)), os.path.realpath(self.root))
        back = any(os.path.commonpath([target, place]) == target for place in inside)
        if back:
            self.links_back.add(link)
        return back


def _prefix(folder: str) -> str:
    return f"{folder}/" if folder else ""
