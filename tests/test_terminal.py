"""The status line below the log, in real pseudo-terminals, and XLA's alarm, which is hidden."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.as_from_a_shell import AS_FROM_A_SHELL
from vit_jax.base import native_log

BEGIN = """
import os, sys, time
from absl import logging
from vit_jax.base import logs
logs.to_stderr()
"""
# As XLA writes it, stars and all.
ALARM = (
    b"E1126 04:10:01.250000   26450 slow_operation_alarm.cc:73] \n"
    b"********************************\n"
    b"[Compiling module jit_step for CPU] Very slow compile? If you want to file a bug, run with envvar "
    b"XLA_FLAGS=--xla_dump_to=/tmp/foo and attach the results.\n"
    b"********************************\n"
)


def in_terminal(code: str, columns: int, **environment: str) -> tuple[int, bytes]:
    """The exit code of a Python program, and all that it writes to a terminal of so many columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [*AS_FROM_A_SHELL, sys.executable, "-c", BEGIN + code],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env=os.environ | {"CI": "", "PYTHON_COLORS": "0"} | environment,
    )  # fmt: skip
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 65536):
            written += chunk
    except OSError:  # It has ended.
        pass
    os.close(master)
    return process.wait(), written


def screen(written: bytes) -> tuple[list[str], int]:
    """What stands on a wide terminal that was given these bytes, and the column of its cursor."""
    rows, column = [[]], 0
    for part in re.findall(r"\x1b\[K|[\r\n]|[^\r\n\x1b]+|.", written.decode()):
        row = rows[-1]
        match part:
            case "\x1b[K":
                del row[column:]
            case "\r":
                column = 0
            case "\n":
                rows.append([])
            case _:
                row[len(row) :] = " " * (column - len(row))
                row[column : column + len(part)] = part
                column += len(part)
    return ["".join(row).rstrip() for row in rows], column


def test_what_is_written_stands_whole_above_the_status_which_is_gone_at_the_end():
    code, written = in_terminal(
        """
with logs.status() as line:
    line.show("step 1 of 10 (10%)", "9 s left", "loss 2.5")
    logging.warning("a line of the log")
    print("of a callback")
    os.write(2, b"of a native library, which is longer than the status\\n")
    sys.stderr.write("in two "); line.show("step 2 of 10"); sys.stderr.write("parts\\n")
    with logs.status() as inner:
        inner.show("evaluating")
    line.show("step 3 of 10")
    logging.warning("another")
print("at the end")
""",
        columns=80,
    )
    lines, column = screen(written)
    assert code == 0 and column == 0
    assert [re.sub(r"^[\d:]+ ", "", line) for line in lines] == [
        "W a line of the log", "of a callback", "of a native library, which is longer than the status",
        "in two parts", "W another", "at the end", "",
    ]  # fmt: skip
    for status in (b"step 1 of 10 (10%)  9 s left  loss 2.5\x1b[K\r", b"\revaluating", b"\rstep 3"):
        assert status in written
    assert b"?25l" not in written  # The cursor is not hidden.


def test_in_a_narrow_terminal_the_last_parts_go_and_no_line_wraps():
    code, written = in_terminal(
        "with logs.status() as line:\n"
        "    line.show('step 1,000 of 10,000 (10%)', '9 s left', 'loss 2.5')\n",
        columns=40,
    )
    assert code == 0 and b"\rstep 1,000 of 10,000 (10%)  9 s left\x1b[K" in written
    _, written = in_terminal("with logs.status() as line: line.show('step 1,000', 'b')", columns=8)
    assert b"\rstep 1,\x1b[K" in written


def test_an_error_ends_the_status_and_leaves_the_cursor_at_the_left():
    for error in ("KeyboardInterrupt", "ValueError('wrong')"):
        code, written = in_terminal(
            f"with logs.status() as line:\n    line.show('step 1 of 10')\n    raise {error}\n", 80
        )
        lines, column = screen(written)
        assert code != 0 and column == 0 and "step 1 of 10" not in "".join(lines)
        assert lines[-2].startswith(error.partition("(")[0])


def test_what_is_written_past_python_where_the_process_ends_erases_the_status():
    code, written = in_terminal(
        "with logs.status() as line:\n"
        "    line.show('a status that is much longer')\n"
        "    print(f'{logs.end_status()}vit_jax: stopped', file=sys.__stderr__)\n"
        "    line.show('never seen')\n"
        "    os._exit(3)\n",
        80,
    )
    assert code == 3 and screen(written)[0] == ["vit_jax: stopped", ""]


def test_where_there_is_no_terminal_lines_are_plain():
    code = BEGIN + (
        "with logs.status() as line, logs.with_elapsed_time('compiling', about='once', after=0.1, every=0.1):\n"
        "    line.show('step 1 of 10')\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        lines = [process.stderr.readline(), process.stderr.readline()]
        written = b"".join([*lines, process.communicate()[1]])
    assert process.returncode == 0
    assert not set(written) & {0x1B, 0x0D} and b"step 1" not in written
    lines = [re.sub(r"^[\d:]+ I |\d+ s", "", line) for line in written.decode().splitlines()]
    assert lines[:2] == ["compiling … : once", "compiling … "] and lines[-1] == "compiling took "
    for environment in ({"TERM": "dumb"}, {"CI": "true"}):
        shown = in_terminal("with logs.status() as line: line.show('x')", 80, **environment)
        assert shown == (0, b"")


def test_xlas_alarm_is_hidden_and_all_else_passed_on_also_by_a_process_that_crashes(tmp_path):
    code = (
        "import os, sys\nfrom vit_jax.base import native_log\n"
        "alarm = open(sys.argv[1], 'rb').read()\n"
        "os.write(2, b'before\\n')\n"
        "with native_log.without_alarms():\n"
        "    os.write(2, alarm)\n"
        "    os.write(2, b'E1126 04:10:01.250000 1 gpu_timer.cc:82] of use\\n')\n"
        "    os.write(2, b'in \\rpart')\n"
        "    os.abort() if sys.argv[2] == 'crash' else None\n"
        "os.write(2, b'after\\n')\n"
    )
    (tmp_path / "alarm").write_bytes(ALARM)
    kept = b"before\nE1126 04:10:01.250000 1 gpu_timer.cc:82] of use\nin \rpart"
    for how, end in (("crash", b""), ("end", b"after\n")):
        command = [sys.executable, "-c", code, str(tmp_path / "alarm"), how]
        done = subprocess.run(command, stderr=subprocess.PIPE)
        assert done.stderr == kept + end


def test_only_whole_alarms_are_hidden():
    half, other = ALARM[:150], b"W1126 slow_operation_alarm.cc:140] Constant folding took 2s\n"
    assert native_log.without_alarms_of(b"a\n" + ALARM + b"b\n") == (b"a\nb\n", b"")
    assert native_log.without_alarms_of(b"a\n" + half) == (b"a\n", half)
    assert native_log.without_alarms_of(b"status\r" + ALARM) == (b"status\r", b"")
    assert native_log.without_alarms_of(other + b"b\n")[1] == other + b"b\n"  # until it is late


def test_of_a_library_below_a_clone_that_is_called_vit_jax_only_warnings_are_shown(tmp_path):
    library = tmp_path / "vit_jax/.venv/lib/library.py"
    library.parent.mkdir(parents=True)
    library.write_text(
        "from absl import logging\nlogging.info('a detail')\nlogging.warning('a warning')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}sys.path.append({str(library.parent)!r})\nimport library\n"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr.endswith(" W a warning\n") and "a detail" not in done.stderr


def test_what_native_libraries_print_is_no_part_of_a_result():
    code = (
        "import os, sys\nfrom vit_jax.base import native_log\n"
        "print('before')\nnative_log.keep_from_stdout()\nos.write(1, b'native\\n')\nprint('result')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("before\nresult\n", "native\n", 0)


@pytest.mark.parametrize(
    ("native", "encoding"),
    [
        ("import ctypes; c = ctypes.CDLL(None); c.puts(b'native'); c.fflush(None)", "utf-8"),
        ("import ctypes; ctypes.CDLL(None).puts(b'native')", "ascii:backslashreplace"),
        ("import subprocess; subprocess.run(['echo', 'native'])", "utf-8"),
    ],
    ids=["C", "C at exit", "a child"],
)
def test_a_result_is_alone_whoever_prints_and_in_any_encoding(native, encoding):
    code = (
        "import json\nfrom vit_jax.base import native_log\nnative_log.keep_from_stdout()\n"
        f"{native}\nprint(json.dumps(['Füße'], ensure_ascii=False), end='')\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert (done.stderr, done.returncode) == (b"native\n", 0)
    encoded = {"utf-8": "Füße".encode(), "ascii:backslashreplace": b"F\\xfc\\xdfe"}[encoding]
    assert done.stdout == b'["' + encoded + b'"]'
