"""The log of a run on standard error: readable lines of our own, and from libraries only warnings."""

import contextlib
import logging as python_logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import flags, logging

if TYPE_CHECKING:
    from vit_jax.base.terminal import Screen, StatusLine

# Characters that move the cursor, or colour, hide or reorder text: controls except tabs and line ends, and the marks
# that change the direction of writing. Lone surrogates, which cannot be encoded, come from file names that are not
# UTF-8.
_CONTROL = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

# Files of libraries may be below a clone that is called vit_jax, too.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# After this many seconds of one thing XLA's alarms are hidden, which it raises after 120.
_ALARMS = 60.0
_screen: "Screen | None" = None  # of this process, once it has shown a status
_shows_status = True  # of several processes only the first does


def printable(text: str) -> str:
    r"""A text for a terminal: names that come from strangers cannot control it.

    >>> printable("cat\x1b[2J")
    'cat\\x1b[2J'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def to_stderr(process: int | None = None, *, quiet: bool = False) -> None:
    """Sends log lines to standard error, with their time.

    Args:
      process: which of several processes this is, printed in each line; `None` where there is one.
      quiet: nothing below warnings.
    """
    flags.FLAGS.mark_as_parsed()  # From Python there are no flags; absl waits for them before it logs.
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING if quiet else logging.INFO)
    prefix = "" if process is None else f"[{process}] "
    global _shows_status
    _shows_status = not (process or quiet)
    handler = logging.get_absl_handler()
    line = f"{prefix}%(asctime)s %(levelname).1s %(message)s"
    handler.setFormatter(_Printable(line, datefmt="%H:%M:%S"))
    handler.addFilter(_of_ours_or_a_warning)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


def to_stderr_by_default(process: int | None = None, *, quiet: bool = False) -> None:
    """As `to_stderr`, unless the surrounding program or notebook has configured logging."""
    if not _configured():
        to_stderr(process, quiet=quiet)


class NoStatus:
    """A `terminal.StatusLine` where there is no terminal."""

    shown = due = False

    def __enter__(self) -> "NoStatus":
        return self

    def __exit__(self, *_) -> None: ...

    def show(self, *parts: str) -> None: ...


def status(shown: bool = True) -> "NoStatus | StatusLine":
    """For `with`: a status line below the log that is redrawn, if standard error is a terminal that someone looks at.

    Args:
      shown: whether there may be one.
    """
    kept = os.environ.get("CI") or os.environ.get("TERM") == "dumb"  # as text
    if kept or not (shown and _shows_status and sys.stderr.isatty()):
        return NoStatus()
    from vit_jax.base.terminal import Screen

    global _screen
    if not (_screen and _screen.lines):
        _screen = Screen(sys.stderr)
    return _screen.open()


def erase_status() -> str:
    """A prefix for text that is written past `sys.stderr`: it erases the status line. Takes no lock."""
    return "\r\x1b[K" if _screen and _screen.drawn else ""


def end_status() -> str:
    """The same, where the process ends: no status is drawn any more."""
    erased = erase_status()
    if _screen:
        _screen.ended = True
    return erased


@contextlib.contextmanager
def with_elapsed_time(
    what: str, *, about: str = "", after: float = 5.0, every: float = 30.0
) -> Iterator[None]:
    """Reports the elapsed time of work that takes long, and logs its duration at the end: in a terminal on the status
    line, elsewhere in the log.

    Args:
      what: the name of the work, such as 'compiling the training step'.
      about: a hint for the user, logged once.
      after: seconds until the first line; shorter work is not logged.
      every: seconds between further lines.
    """
    start = time.monotonic()
    ended = threading.Event()
    hidden = contextlib.ExitStack()

    def report(line: "NoStatus | StatusLine") -> None:
        due = after
        more = about and f": {about}"
        hiding = False
        period = 1.0 if line.shown else every
        while not ended.wait(min(due - (time.monotonic() - start), period)):
            seconds = time.monotonic() - start
            line.show(f"{what} … {seconds:.0f} s")
            if seconds >= due:
                if more or not line.shown:
                    logging.info("%s … %.0f s%s", what, seconds, more)
                due = seconds + every
                more = ""
            if seconds >= _ALARMS and not hiding and _ours():
                from vit_jax.base import native_log

                hiding = hidden.enter_context(native_log.without_alarms())

    with status() as line:
        thread = threading.Thread(target=report, args=(line,), name="elapsed time", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            hidden.close()
    if (seconds := time.monotonic() - start) >= after:
        logging.info("%s took %.0f s", what, seconds)


def number_text(value: float, figures: int = 4) -> str:
    """A number with `figures` figures; a whole one, such as a count, with all: '10,000', not '1e+04'.

    >>> number_text(10000.0), number_text(0.123456)
    ('10,000', '0.1235')
    """
    whole = float(value).is_integer() and abs(value) < 1e9
    return f"{value:,.0f}" if whole else f"{value:.{figures}g}"


class _Printable(python_logging.Formatter):
    def format(self, record: python_logging.LogRecord) -> str:
        return printable(super().format(record))


def _configured() -> bool:
    if _ours():
        return True
    root = python_logging.root
    # Importing some libraries gives the root logger a handler for standard error.
    if any(getattr(handler, "stream", None) is not sys.stderr for handler in root.handlers):
        return True
    verbosity = flags.FLAGS["verbosity"]
    return root.level != python_logging.WARNING or verbosity.value != verbosity.default


def _ours() -> bool:
    """Whether `to_stderr` was called."""
    return _of_ours_or_a_warning in logging.get_absl_handler().filters


def _of_ours_or_a_warning(record: python_logging.LogRecord) -> bool:
    return record.pathname.startswith(_PACKAGE) or record.levelno >= python_logging.WARNING


def _unraisable(unraisable) -> None:
    """Drops errors that are reported elsewhere. When a save fails, say on a full disk, each write still under way
    would print a traceback because Orbax's event loop is closed. Ctrl-C is reported by the code that handles it.
    """
    error = unraisable.exc_value
    if not isinstance(error, KeyboardInterrupt) and str(error) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
