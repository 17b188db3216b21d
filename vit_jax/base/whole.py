"""Files and folders that appear under their names when they are whole. What a process that was killed left of one
is removed when the same name is written again.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator

from etils import epath

TERMINATED = 128 + signal.SIGTERM


def partial_path(path: epath.PathLike) -> epath.Path:
    """Where to write what gets the name `path` when it is whole."""
    path = epath.Path(path)
    _remove_left_over(path)
    return path.parent / f".{path.name}.partial-{os.getpid()}"


@contextlib.contextmanager
def written_whole(path: epath.PathLike) -> Iterator[epath.Path]:
    """`with written_whole(path) as partial:` a file to write; after an error or SIGTERM nothing stays of it."""
    partial = partial_path(path)
    with ended_by_sigterm():
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the process as an exception does, so that what is half written is removed."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _remove_left_over(path: epath.Path) -> None:
    """Removes what processes that are gone left beside a local `path`."""
    folder = os.fspath(path.parent)
    if not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        match = re.fullmatch(re.escape(f".{path.name}.partial-") + r"(\d+)", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            left = os.path.join(folder, name)
            shutil.rmtree(left) if os.path.isdir(left) else os.unlink(left)
