"""What `evaluate --follow` asks a run to keep: checkpoints that it has not read yet. A pin lies in WORKDIR/evaluations,
beside the lock of its follower, and counts as long as that is held: a follower that was killed keeps nothing.
"""

import json
from collections.abc import Sequence

from absl import logging
from etils import epath

from vit_jax.base import buckets, lock, places

FOLDER = "evaluations"
_SUFFIX = ".pin"


class Pin:
    """A follower's pin, whose lock it holds."""

    def __init__(self, workdir: epath.Path, name: str):
        """Pins nothing yet.

        Args:
          workdir: of the run.
          name: of the follower's series.
        """
        self._path = workdir / FOLDER / f".{name}{_SUFFIX}"
        self._first: int | None = None

    def keep_from(self, step: int) -> None:
        """Asks the run to keep the checkpoints of this step and of later ones. Raises what storage does."""
        if step != self._first:
            places.write_whole(self._path, json.dumps({"from": step}))
            self._first = step

    def release(self) -> None:
        """Asks for nothing any more."""
        try:
            places.remove(self._path)
        except OSError as error:  # The lock is released too, without which a pin does not count.
            logging.warning("%s cannot be removed: %s", self._path, buckets.reason(error))


def lock_name(name: str) -> str:
    """The file name of the lock of a follower's series."""
    return f".{name}{lock.NAME}"


def pinned(workdir: epath.Path, steps: Sequence[int], most: int) -> set[int]:
    """Those of these steps that followers have not read yet, for each of them the oldest `most`."""
    kept: set[int] = set()
    if not steps or not most:
        return kept
    folder = workdir / FOLDER
    for file in sorted(places.names_in(folder)):
        name = file.removeprefix(".").removesuffix(_SUFFIX)
        if not file.endswith(_SUFFIX) or not lock.is_held(folder, lock_name(name)):
            continue
        first = (places.read_json(folder / file) or {}).get("from", 0)
        kept |= set([step for step in sorted(steps) if step >= first][:most])
    return kept
