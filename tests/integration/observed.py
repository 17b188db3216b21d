"""The command line of vit_jax with a data source that tests can watch and disturb.

`python -m tests.integration.observed COMMAND …` is `python -m vit_jax COMMAND …`, except that the digits write down
which of them were read, one line of JSON for each block, and that reading does what the environment
variable OBSERVED says, as JSON:

  record: folder; block by block, the examples that process I read go to reads-I.jsonl there.
  seconds: every block takes at least so long.
  spoiled: numbers of examples which have three labels, so that their loss is three times as high.
  process, block, action: at that block, process `process` does "fail", or "block" on a FIFO at
    `record`/fifo, which nobody writes to.
"""

import dataclasses
import json
import os
import pathlib
import time

from vit_jax.data import digits, sources
from vit_jax.data.record import DataError, Record

_SAID = json.loads(os.environ["OBSERVED"])
_PROCESS = int(os.environ.get("JAX_PROCESS_ID", 0))
_FOLDER = pathlib.Path(_SAID["record"])


@dataclasses.dataclass(frozen=True)
class Observed(digits.Digits):
    """Digits that are read in blocks, as data sets on disk are."""

    multi_label: bool = "spoiled" in _SAID

    def __getitem__(self, index: int) -> Record:
        record = super().__getitem__(index)
        if not self.multi_label:
            return record
        labels = (0, 1, 2) if index in _SAID["spoiled"] else (record.label,)
        return dataclasses.replace(record, label=labels)

    def read(self, indices) -> list[Record]:
        path = _FOLDER / f"reads-{_PROCESS}.jsonl"
        before = len(path.read_text().splitlines()) if path.exists() else 0
        if (_PROCESS, before) == (_SAID.get("process"), _SAID.get("block")):
            if _SAID["action"] == "fail":
                raise DataError("the disk of process 1 has crashed")
            os.mkfifo(_FOLDER / "fifo")
            (_FOLDER / "fifo").read_text()
        time.sleep(_SAID.get("seconds", 0))
        with path.open("a") as file:
            file.write(json.dumps([int(i) for i in indices]) + "\n")
        return [self[int(i)] for i in indices]


def _open(config_data):
    data_set = digits.open_digits(config_data)

    def read(parts):
        source = data_set.read(parts)
        if parts[0][0] != "train":
            return source
        return Observed(source.images, source.labels, source.ids)

    return dataclasses.replace(data_set, read=read)


if __name__ == "__main__":
    from vit_jax.main import run

    sources.OPENERS["digits"] = _open
    run()
