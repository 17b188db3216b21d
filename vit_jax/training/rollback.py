"""Going back to the last good checkpoint when the loss is lost, and on without the data it was lost
on.

When a step is bad is decided in `step.py`, on the devices; going back is the loop's.
"""

import json

from absl import logging
from etils import epath

from vit_jax.base import paths
from vit_jax.data.order import data_step
from vit_jax.devices import processes
from vit_jax.training.progress import Lost, NonFiniteError


class LeftOut:
    """The data a run does not train on, in WORKDIR/left_out.json: part of the run, so that whoever
    goes on with it, with any number of processes, has the same data in the same order.

    Attributes:
      ranges: (first, count) in steps of the order of all data; see `order.data_step`.
    """

    def __init__(self, workdir: epath.Path):
        self._path = workdir / "left_out.json"
        told = self._path.read_text() if processes.index() == 0 and self._path.exists() else "[]"
        self.ranges = [tuple(r) for r in json.loads(processes.agree("data left out", told))]

    def add(self, lost: Lost, count: int, most: int) -> None:
        """Leaves out the data of the step that was bad, and of the `count` - 1 after it.

        Raises:
          NonFiniteError: this has happened `most` times before.
        """
        if len(self.ranges) >= most:
            raise NonFiniteError(
                f"{lost} There were {most} rollbacks (config.max_rollbacks) before"
            )
        first = data_step(lost.step, self.ranges)
        self.ranges.append((first, count))
        if processes.index() == 0:
            logging.warning(
                "%s Going back to the last checkpoint, and on without the data of steps %d to %d",
                lost, first, first + count - 1,
            )  # fmt: skip
            paths.write_whole(self._path, json.dumps(self.ranges) + "\n")
        processes.barrier("rollback")
