"""What `follow` finds, of one checkpoint after the other: WORKDIR/evaluations/NAME.jsonl and
WORKDIR/tensorboard/NAME.
"""

import json
import pathlib
import shutil
import tempfile

from absl import logging
from etils import epath

from vit_jax.base import buckets, places
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.pins import FOLDER
from vit_jax.devices import processes
from vit_jax.training.upkeep import writers


class Series:
    """The file and the TensorBoard folder of what is found, of the first process; in a bucket copies of
    local ones.

    Attributes:
      path: of the file.
      done: the steps in it.
    """

    def __init__(self, workdir: epath.Path, name: str, marks: dict):
        self.path = workdir / FOLDER / f"{name}.jsonl"
        self._workdir, self._name, self._marks = workdir, name, marks
        self.done: set[int] = set()
        # In a bucket nothing can be appended to.
        self._local: pathlib.Path | None = None
        self._copied: dict[pathlib.Path, int] = {}

    def __enter__(self) -> "Series":
        self._read()
        self._writers = writers.Writers()
        if processes.index():
            return self
        if places.in_bucket(self._workdir):
            self._local = pathlib.Path(tempfile.mkdtemp())
            (self._local / FOLDER).mkdir()
            if self.path.exists():
                (self._local / FOLDER / self.path.name).write_bytes(self.path.read_bytes())
        folder = self._local or pathlib.Path(self._workdir)
        self._writers = writers.Writers(
            writers.JsonLinesWriter(folder / FOLDER / self.path.name, self._marks),
            writers.TensorBoardWriter(folder / "tensorboard" / self._name),
        )
        return self

    def __exit__(self, *_) -> None:
        self._writers.close()
        if self._local:
            shutil.rmtree(self._local)

    def write(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Writes the metrics of a checkpoint at once."""
        self.done.add(step)
        scalars = {f"eval/{name}": value for name, value in metrics.items()}
        self._writers.write_scalars(step, scalars | {"seconds": seconds})
        self._writers.flush()
        if not self._local:
            return
        try:
            self._copied = writers.copy_grown(self._local, self._workdir, self._copied)
        except Exception as error:
            if not buckets.is_failure(error):
                raise
            why = buckets.reason(error)
            logging.warning("%s: %s; copied with the next checkpoint", self.path, why)

    def _read(self) -> None:
        """Finds the steps that are done. Raises `ConfigError` if they were evaluated otherwise."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # cut short by a kill: evaluated again
                continue
            before = {name: entry.get(name) for name in self._marks}
            if before != json.loads(json.dumps(self._marks)):
                raise ConfigError(
                    f"{self.path} was written with {_differing(before, self._marks)}: set --name=NAME for a "
                    "series of its own, or remove the file"
                )
            self.done.add(int(entry["step"]))


def _differing(before: dict, now: dict) -> str:
    return ", ".join(
        f"{name} = {value!r} (now {now[name]!r})"
        for name, value in before.items()
        if value != now[name]
    )
