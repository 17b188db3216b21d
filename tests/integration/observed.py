"""The command line of vit_jax with data sources that tests can watch and disturb.

`python -m tests.integration.observed COMMAND …` is `python -m vit_jax COMMAND …`, except that the digits, and their
pairs with captions, write down which of them were read, and that reading does what the environment variable OBSERVED
says, as JSON:

  folder: where the numbers of the examples that process I read go to, in reads-I.txt, but not of those that hosts
    compare before they begin.
  seconds: every example takes at least so long; with `slow`, those of process `slow` alone.
  spoiled: numbers of examples which have all labels, so that their loss is a spike.
  split: which examples are watched, by default "train".
  saved: the save of that step stops at such a FIFO when the checkpoint lacks nothing but its name.
  process, example, action: at that example of its own, process `process` does "fail", or "block" on a
    FIFO at `folder`/fifo, which nobody writes to.
"""

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time

from vit_jax.base import places
from vit_jax.data import sources
from vit_jax.data.record import DataError, Record
from vit_jax.data.sources import digit_pairs, digits
from vit_jax.training import agreement

_SAID = json.loads(os.environ["OBSERVED"])
_PROCESS = int(os.environ.get("JAX_PROCESS_ID", 0))
_COMPARES = int(os.environ.get("JAX_NUM_PROCESSES", 1)) > 1 and "train" in sys.argv
_FOLDER = pathlib.Path(_SAID["folder"])
_ONE_BY_ONE = threading.Lock()
_read: list[int] = []  # the examples that this process has written down
_compared: list[
    int
] = []  # examples that this process still has to read for the comparison of hosts


def _observe(index: int) -> None:
    path = _FOLDER / f"reads-{_PROCESS}.txt"
    with _ONE_BY_ONE:  # threads that count the same examples would pass the example by
        if index in _compared:
            _compared.remove(index)
            return
        if disturbed := (_PROCESS, len(_read)) == (_SAID.get("process"), _SAID.get("example")):
            if _SAID["action"] == "fail":
                raise DataError("the disk of process 1 has crashed")
            os.mkfifo(_FOLDER / "fifo")
        with path.open("a") as file:
            file.write(f"{index}\n")
        _read.append(index)
    if disturbed:
        places.open_bytes(str(_FOLDER / "fifo")).read()
    if _SAID.get("slow", _PROCESS) == _PROCESS:
        time.sleep(_SAID.get("seconds", 0))


@dataclasses.dataclass(frozen=True)
class Observed(digits.Digits):
    multi_label: bool = "spoiled" in _SAID

    def __getitem__(self, index: int) -> Record:
        _observe(index)
        record = super().__getitem__(index)
        if not self.multi_label:
            return record
        labels = tuple(range(10)) if index in _SAID["spoiled"] else (record.label,)
        return dataclasses.replace(record, label=labels)


class ObservedPairs(digit_pairs.DigitPairs):
    def __getitem__(self, index: int) -> Record:
        _observe(index)
        return super().__getitem__(index)


def _opened(open_data_set, observe):
    def open_observed(config_data):
        data_set = open_data_set(config_data)

        def read(parts):
            source = data_set.read(parts)
            if _COMPARES and parts[0][0] == "train" and not _compared:
                _compared.extend(agreement.sampled(len(source)))
            return observe(source) if parts[0][0] == _SAID.get("split", "train") else source

        return dataclasses.replace(data_set, read=read)

    return open_observed


def _stop_in_a_save(event: str, arguments: tuple) -> None:
    if event == "os.rename" and pathlib.Path(os.fspath(arguments[1])).name == str(_SAID["saved"]):
        os.mkfifo(_FOLDER / "fifo")
        places.open_bytes(str(_FOLDER / "fifo")).read()


if __name__ == "__main__":
    if "saved" in _SAID:
        sys.addaudithook(_stop_in_a_save)
    from vit_jax.commands.main import run

    sources.OPENERS["digits"] = _opened(
        digits.open_digits, lambda source: Observed(source.images, source.labels, source.ids)
    )
    sources.OPENERS["digit_pairs"] = _opened(
        digit_pairs.open_digit_pairs, lambda source: ObservedPairs(source.digits, source.numbers)
    )
    run()
