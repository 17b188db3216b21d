"""The output of native libraries: it goes to standard error, without XLA's alarm of a slow compilation.

After two minutes of compiling, and at its end, XLA prints between lines of stars that one may want to file a bug, with
the flags for that. The log says already how long each step takes. XLA has no flag against it, and its level is that of
errors.

All else is passed on. A process of its own does that: this one may crash, and what it wrote last must not be lost.
It is run as `python -m vit_jax.base.native_log`.
"""

import contextlib
import io
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

from vit_jax.base.subprocesses import python_module

_START = re.compile(rb"[^\r\n]*slow_operation_alarm\.cc:\d+\]")
_ALARM = re.compile(_START.pattern + rb"[^\n]*\n\*{20,}\n(?:[^\n]*\n){1,6}?\*{20,}\r?\n")
_WHOLE_SECONDS = 1.0  # how long an alarm that has begun may take to end; else it is something else
_END_SECONDS = 5.0  # for what is still to be passed on
_CHUNK = 1 << 16


def without_alarms_of(text: bytes) -> tuple[bytes, bytes]:
    """A text without XLA's alarms, and what stands at its end and may be one that is not whole yet."""
    text = _ALARM.sub(b"", text)
    start = _START.search(text)
    at = start.start() if start else len(text)
    return text[:at], text[at:]


def keep_from_stdout() -> None:
    """From now on native libraries that write to standard output, as Gloo does when processes connect, write to
    standard error. `sys.stdout` gets a new descriptor, which is still standard output.
    """
    before = sys.stdout
    before.flush()
    binary = io.FileIO(os.dup(1), "w")
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(binary), before.encoding, before.errors, line_buffering=before.line_buffering
    )  # fmt: skip
    os.dup2(2, 1)


@contextlib.contextmanager
def without_alarms() -> Iterator[bool]:
    """Inside, file descriptor 2 is a pipe to the process that passes on. Gives whether there is one."""
    command, environment = python_module(__name__)
    before = os.dup(2)
    reader, writer = os.pipe()
    pipe = os.fstat(writer).st_ino
    try:
        # In a session of its own: Ctrl-C is not meant for it, and what is printed afterwards has to be read.
        passing = subprocess.Popen(
            command, stdin=reader, stdout=before, stderr=before, env=environment,
            start_new_session=True,
        )  # fmt: skip
        sys.stderr.flush()
        os.dup2(writer, 2)
    except OSError:
        passing = None
    finally:
        os.close(reader)
        os.close(writer)
    try:
        yield passing is not None
    finally:
        sys.stderr.flush()
        if os.fstat(2).st_ino == pipe:  # and not nowhere, since the terminal was closed
            os.dup2(before, 2)
        os.close(before)
        with contextlib.suppress(subprocess.TimeoutExpired):  # where children have the pipe too
            passing and passing.wait(_END_SECONDS)


def _pass_on() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    held = b""
    while True:
        if held and not select.select([0], [], [], _WHOLE_SECONDS)[0]:
            _write(held)
            held = b""
        chunk = os.read(0, _CHUNK)
        if not chunk:
            _write(held)
            return
        text, held = without_alarms_of(held + chunk)
        _write(text)


def _write(text: bytes) -> None:
    while text:
        text = text[os.write(1, text) :]


if __name__ == "__main__":
    _pass_on()
