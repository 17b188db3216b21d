"""The quick tests cover every folder of tests thinly, in about two minutes on two cores: `bash tests/run.sh --quick`.

They are the files of `quick.txt`, and the tests that find the faults of `tools/faults.py`. The files are chosen by what
they cost: `python -m tests.quick LOG` chooses them anew from the output of `pytest --processor_time=1000`.
"""

import pathlib
import re
import sys

from tools.faults import FAULTS

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = pathlib.Path(__file__).with_suffix(".txt")
MOST_SECONDS = (
    1.2  # of processor time for a file; of each folder the cheapest file is taken in any case
)


def quick_tests() -> list[str]:
    """Files, and single tests of other files."""
    files = FILES.read_text().split()
    of_faults = {fault.test for fault in FAULTS.values()}
    single = [test for test in sorted(of_faults) if test.partition("::")[0] not in files]
    return [*files, *single]


def choose(log: str) -> list[str]:
    """The files to list, from a log that says `SECONDS s  COUNT tests  FILE` in its lines."""
    lines = re.findall(r"^ +([\d.]+) s +\d+ tests +(tests/\S+)$", log, re.MULTILINE)
    costs = sorted((float(seconds), file) for seconds, file in lines)
    chosen = set()
    folders = set()
    for seconds, file in costs:
        folder = file.rpartition("/")[0]
        if seconds <= MOST_SECONDS or folder not in folders:
            chosen.add(file)
            folders.add(folder)
    return sorted(chosen)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        log = pathlib.Path(sys.argv[1]).read_text()
        FILES.write_text("\n".join(choose(log)) + "\n")
    print("\n".join(quick_tests()))
