"""The last line of a terminal, drawn again in place below the log: how far a command is. `logs.status` gives one,
and imports this only where standard error is a terminal.

The cursor stays at the beginning of the line and is never hidden: what a native library, Ctrl-C or the end of the
process writes there begins at the left edge.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

from absl import logging

ERASE = "\r\x1b[K"
_SECONDS = 0.1  # at least, between two drawings of changed numbers
_COLUMNS = 80  # of a terminal that does not state its width


def fitted(parts: Sequence[str], columns: int) -> str:
    """As many of the parts, the first ones first, as a line of `columns` holds.

    >>> fitted(("step 5 of 10", "2 s left", "loss 0.1"), 24)
    'step 5 of 10  2 s left'
    """
    text = parts[0][:columns]
    for part in parts[1:]:
        if len(text) + 2 + len(part) > columns:
            break
        text += f"  {part}"
    return text


class Screen:
    """The terminal of standard error, and the lines that are to stand on its last one: the newest is shown, and when it
    ends, the previous one.

    While there is one, `sys.stderr`, `sys.stdout` and the log's handler write above it.

    Attributes:
      lines: all, the newest last.
      drawn: whether one stands on the terminal.
      ended: whether none is to be drawn any more.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._lock = stream, threading.RLock()
        self._opening = threading.Lock()  # and not `_lock`, which writing takes below the log's
        self.lines: list[StatusLine] = []
        self._columns = _COLUMNS
        self._middle = False  # whether a line was begun above, and not ended
        self._streams: dict[str, Any] = {}
        self.drawn = self.ended = False

    def open(self) -> "StatusLine":
        """A line for `with`."""
        return StatusLine(self)

    def push(self, line: "StatusLine") -> None:
        """Shows another line."""
        with self._opening:
            if not self.lines:
                self._write_above()
            with self._lock:
                self.lines.append(line)

    def remove(self, line: "StatusLine") -> None:
        """Shows the line that was shown before."""
        with self._opening:
            with self._lock:
                self.lines.remove(line)
                self._erase()
                self.draw()
            if not self.lines:
                self._write_as_before()

    def draw(self) -> None:
        """Draws the newest line that has something to show."""
        with self._lock:
            parts = next((line.parts for line in reversed(self.lines) if line.parts), None)
            if parts and not (self._middle or self.ended):
                text = fitted(parts, max(self._width() - 1, 1))  # A full line would wrap.
                self._put(f"\r{text}\x1b[K\r")
                self.drawn = True

    def write(self, stream: TextIO, text: str) -> int:
        """Writes a text to one of the terminal's streams, above the line."""
        with self._lock:
            self._erase()
            count = stream.write(text)
            if text:
                self._middle = not text.endswith("\n")
            if self.lines and not self._middle:
                stream.flush()
                self.draw()
            return count

    def _erase(self) -> None:
        if self.drawn:
            self._put(ERASE)
            self.drawn = False

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # The terminal is gone, which `training/upkeep/preemption.py` handles.
            self.ended = True

    def _width(self) -> int:
        with contextlib.suppress(OSError):  # behind `native_log`
            self._columns = os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        return self._columns

    def _write_above(self) -> None:
        self._streams = {
            name: getattr(sys, name) for name in ("stderr", "stdout") if getattr(sys, name).isatty()
        }
        for name, stream in self._streams.items():
            setattr(sys, name, _Above(self, stream))
        _exchange(self._streams.get("stderr"), sys.stderr)

    def _write_as_before(self) -> None:
        _exchange(sys.stderr, self._streams.get("stderr"))
        for name, stream in self._streams.items():
            if isinstance(getattr(sys, name), _Above):
                setattr(sys, name, stream)


class StatusLine:
    """A line of a `Screen`, from `with` to its end."""

    shown = True

    def __init__(self, screen: Screen):
        self._screen, self._drawn_at = screen, 0.0
        self.parts: tuple[str, ...] = ()

    def __enter__(self) -> "StatusLine":
        self._screen.push(self)
        return self

    def __exit__(self, *_) -> None:
        self._screen.remove(self)

    @property
    def due(self) -> bool:
        """Whether what changes all the time is worth drawing again."""
        return time.monotonic() - self._drawn_at >= _SECONDS

    def show(self, *parts: str) -> None:
        """Draws these parts, as many as there is room for."""
        self.parts, self._drawn_at = parts, time.monotonic()
        self._screen.draw()


class _Above:
    """A stream of the terminal, whose text stands above the line."""

    def __init__(self, screen: Screen, stream: TextIO):
        self._screen, self._stream = screen, stream

    def write(self, text: str) -> int:
        return self._screen.write(self._stream, text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _exchange(old: Any, new: Any) -> None:
    """Has the log write to another stream, where it writes to `old`."""
    handler = logging.get_absl_handler().python_handler
    if old is not None and handler.stream is old:
        handler.setStream(new)
