"""A machine with a faulty disk or a clock that jumps, for real processes: `faulty_machine.c`, preloaded."""

import os
import pathlib
import struct
import subprocess

SOURCE = pathlib.Path(__file__).with_suffix(".c")
FOREVER = 2**31 - 1
_FAULTS, _TIMES = struct.Struct("<6iq488s"), struct.Struct("<i")
_TIMES_AT = 16


class FaultyMachine:
    """What goes wrong in processes that are started with `environment`, each on its own; nothing at first.

    Attributes:
      environment: variables of the processes, which know their index by JAX_PROCESS_ID.
    """

    def __init__(self, folder: pathlib.Path, processes: int = 2):
        """Compiles the library in a folder."""
        library = folder / "faulty_machine.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAULTY_MACHINE": str(folder / "faults"),
        }
        self._files = [folder / f"faults.{process}" for process in range(processes)]
        self._times = [0] * processes
        for process in range(processes):
            self.set(process)

    def set(
        self, process: int = 0, below: object = "", *, writing: int = 0, syncing: int = 0, reading: int = 0,
        opening: int = 0, times: int = FOREVER, seconds: int = 0,
    ) -> None:  # fmt: skip
        """Decides what goes wrong from now on.

        Args:
          process: in which process.
          below: a part of the paths of the files that are hit.
          writing, syncing, reading, opening: the error number that these end with.
          times: how often.
          seconds: by which the clock of the day is wrong.
        """
        path = os.fsencode(below if isinstance(below, pathlib.Path) else str(below))
        fields = _FAULTS.pack(writing, syncing, reading, opening, 0, 0, seconds, path)
        with open(self._files[process], "r+b" if self._files[process].exists() else "w+b") as file:
            file.write(fields)
            file.flush()
            file.seek(_TIMES_AT)
            file.write(_TIMES.pack(times))
        self._times[process] = times

    def failed(self, process: int = 0) -> int:
        """How often something has failed since `set`."""
        content = self._files[process].read_bytes()
        return self._times[process] - max(_TIMES.unpack_from(content, _TIMES_AT)[0], 0)
