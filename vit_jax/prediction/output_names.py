"""The names of the files that are written for images, below a folder: each follows its image's, no two outputs share
one, and what is not ours is never replaced.
"""

import collections
import functools
import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.prediction.images import Named

_Real = Callable[[str], str]  # from the path of a folder to where it is, links followed
_LONGEST = 180  # bytes of a stem: file systems take 255 of a name, and names get endings


def name_outputs(
    files: Iterable[Named],
    endings: Sequence[str],
    *,
    known: Mapping[str, str],
    reserved: Sequence[str] = (),
) -> dict[str, str]:
    """For each image by its name a stem such as 'a/x', to which each of the endings is added.

    An image photos/a/x.png of the folder photos is 'a/x', and one that was named by itself 'x'; where another has one
    of these files 'x_2', and so on. Names that differ in capital letters alone, or in how accents are written, are
    one: they are so for some file systems.

    Args:
      endings: of an image's files, such as '.png' and '_overlay.png'.
      known: the stems of an earlier run, which stay.
      reserved: names at the root that no image may get.
    """
    files = {file.name: file for file in files if file.name not in known}
    taken = {_key(stem + ending) for stem in known.values() for ending in endings}
    taken.update(map(_key, reserved))
    wanted = {name: _beside(_stem(file), taken) for name, file in files.items()}
    for stem in (*known.values(), *wanted.values()):
        taken.update(map(_key, _parents(stem)))
    stems = dict(known)
    numbers = collections.Counter()
    for name, stem in wanted.items():
        free = stem
        while True:
            numbers[_key(stem)] += 1
            if (number := numbers[_key(stem)]) > 1:
                free = f"{stem}_{number}"
            keys = [_key(free + ending) for ending in endings]
            if not any(key in taken for key in keys):
                break
        taken.update(keys)
        stems[name] = free
    return stems


def check_folder(files: Iterable[Named], folder: epath.Path, *, flag: str = "--out") -> None:
    """Raises `ConfigError` for a folder that is one of those asked about, or lies in one: what is written there would
    be taken for images by the next run. The folder need not be there yet.
    """
    real = functools.cache(_real)
    sources = _folders_of_images(files, real)
    _check_outside(str(folder), f"{flag}={folder}", sources, real)


def check_outputs(
    files: Sequence[Named],
    stems: Mapping[str, str],
    endings: Sequence[str],
    folder: epath.Path,
    *,
    known: Mapping[str, str],
    flag: str = "--out",
) -> None:
    """Checks that files which `name_outputs` named neither replace what is not ours nor become images of the next run.

    Args:
      folder: that the files go to.
      known: the stems of an earlier run, whose files may be replaced.
      flag: that names the folder, for messages.

    Raises:
      ConfigError: the folder is one that is asked about, or lies below one; an image is an output of an earlier run;
        or a file is there that no earlier run wrote.
    """
    real = functools.cache(_real)
    named = f"{flag}={folder}"
    sources = _folders_of_images(files, real)
    below = {part for stem in stems.values() for part in _parents(stem)}
    for part in sorted(below):
        _check_outside(os.path.join(folder, part), named, sources, real)
    ours = {
        os.path.join(
            real(os.path.dirname(os.path.join(folder, stem))), os.path.basename(stem) + ending
        )
        for stem in known.values()
        for ending in endings
    }
    for file in files:
        if file.content is None and _real_file(file.name, real) in ours:
            raise ConfigError(
                f"{named}: {file.name}, which is asked about, was itself written by an earlier run: leave it out, or "
                "name another folder"
            )
    is_there = existing(folder)
    for part in sorted(below):
        place = os.path.join(folder, part)
        if not places.in_bucket(folder) and os.path.lexists(place) and not os.path.isdir(place):
            raise ConfigError(
                f"{named}: {place} is a file, where a folder is needed: name another folder"
            )
    for name, stem in stems.items():
        for ending in endings if name not in known else ():
            check_not_there(os.path.join(folder, stem + ending), named, is_there)


def _check_outside(place: str, named: str, sources: Mapping[str, str], real: _Real) -> None:
    source = next((sources[x] for x in _and_above(real(place)) if x in sources), None)
    if source is not None:
        raise ConfigError(
            f"{named}: {place} is the folder {source}, whose images are asked about, or lies in it: what is written "
            "there would be taken for images the next time; name a folder beside it"
        )


def never_writing_over(files: Iterable[Named], output: epath.Path, flag: str) -> Iterator[Named]:
    """The images, as they come.

    Raises:
      ConfigError: one of them is the file that a flag names for an output.
    """
    real = functools.cache(_real)
    place = _real_file(str(output), real)
    for file in files:
        if file.content is None and _real_file(file.name, real) == place:
            raise ConfigError(f"{flag}={output} is one of the images: name another file")
        yield file


def check_report_folder(files: Sequence[Named], folder: epath.Path, flag: str) -> None:
    """Checks a folder for files whose names do not follow the images'.

    Raises:
      ConfigError: see `check_folder`; or an image lies in it, which a file could replace.
    """
    check_folder(files, folder, flag=flag)
    real = functools.cache(_real)
    place = real(str(folder))
    for file in files:
        if file.content is None and os.path.dirname(_real_file(file.name, real)) == place:
            raise ConfigError(
                f"{flag}={folder}: {file.name}, which is asked about, lies in it, and a file of the report could "
                "replace it: name another folder"
            )


def check_not_checkpoint(output: epath.PathLike, checkpoint: epath.PathLike, flag: str) -> None:
    """Raises `ConfigError` if an output would be written over the checkpoint that it is made of."""
    if _real_file(str(output), _real) == _real_file(str(checkpoint), _real):
        raise ConfigError(f"{flag}={output} is the checkpoint itself: name another file")


def check_not_there(path: str, named: str, is_there: Callable[[str], bool]) -> None:
    """Raises `ConfigError` for a file that is there, where one is to be written for the first time."""
    if is_there(path):
        raise ConfigError(
            f"{named}: {path} is there and would be replaced, and no earlier run of this command lists it: name "
            "another folder, or move the file"
        )


def check_same_work(
    path: str,
    named: str,
    is_there: Callable[[str], bool],
    before: Mapping[str, Any] | None,
    made_by: Mapping[str, Any],
) -> None:
    """Checks an output that the same command with the same arguments may replace, and nothing else.

    Args:
      before: the arguments of the command that wrote the output; `None`: it was not written by this command.
      made_by: the arguments now, as `command_arguments` returns them.

    Raises:
      ConfigError: the output is there, and is of another command or of other arguments.
    """
    if before is None:
        check_not_there(path, named, is_there)
        return
    others = [name for name, value in made_by.items() if before.get(name) != value]
    if others:
        raise ConfigError(
            f"{named}: {path} is there, and was made with other arguments ({', '.join(others)}): name another place, "
            "or remove it"
        )


def command_arguments(checkpoint: epath.PathLike, **others: Any) -> dict[str, Any]:
    """The arguments of a command, for `check_same_work`, in the types of JSON. The checkpoint has its absolute path."""
    name = os.fspath(checkpoint)
    path = os.path.abspath(name) if os.path.exists(name) else name
    return json.loads(json.dumps({"checkpoint": path, **others}))


def existing(folder: epath.Path) -> Callable[[str], bool]:
    """A function that says whether there is a file or folder at a path below `folder`."""
    if not places.in_bucket(folder):
        return os.path.lexists
    return {file.path for file in places.files_below(folder)}.__contains__


def _folders_of_images(files: Iterable[Named], real: _Real) -> dict[str, str]:
    """The real paths of folders that were asked about, and of those in them that have images, by the former's names."""
    walked = set()
    folders = {}
    for file in files:
        if file.folder is None:
            continue
        place = os.path.dirname(file.name)
        top = file.folder.rstrip("/")
        while place not in walked:
            walked.add(place)
            folders.setdefault(real(place), file.folder)
            if place.rstrip("/") == top or not place:
                break
            place = os.path.dirname(place)
    return folders


def _real(place: str) -> str:
    return place.rstrip("/") if places.in_bucket(place) else os.path.realpath(place)


def _real_file(path: str, real: _Real) -> str:
    """Where a file is, its links followed; `real` is asked for its folder alone, which many files share."""
    place = os.path.join(real(os.path.dirname(path)), os.path.basename(path))
    return real(place) if not places.in_bucket(path) and os.path.islink(place) else place


def _and_above(place: str) -> Iterator[str]:
    """A path and those of the folders above it."""
    yield place
    while (above := os.path.dirname(place)) != place:
        place = above
        yield place


def _stem(file: Named) -> str:
    """The path of an image in the folder that was asked about, without the ending."""
    inside = os.path.basename(file.name)
    if file.folder is not None:
        inside = file.name.removeprefix(file.folder).lstrip("/")
    folder, base = os.path.split(inside)
    base = os.path.splitext(base)[0]
    while len(os.fsencode(base)) > _LONGEST:
        base = base[:-1]
    return os.path.join(folder, base or "image")


def _parents(stem: str) -> Iterator[str]:
    """The folders of a stem: 'a' and 'a/b' of 'a/b/x'."""
    while stem := os.path.dirname(stem):
        yield stem


def _beside(stem: str, taken: set[str]) -> str:
    """A stem whose folders do not have the names of files."""
    folder, base = os.path.split(stem)
    place = ""
    for part in folder.split("/") if folder else ():
        place = os.path.join(place, part)
        while _key(place) in taken:
            place += "_2"
    return os.path.join(place, base)


def _key(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()
