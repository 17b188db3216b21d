"""Long work that a signal stops: finished parts are kept, and the command says how to continue and ends with 42."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from vit_jax.base import logs
from vit_jax.base.errors import UserError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_SECONDS = 3.0  # for leaving the block after a signal


class Interrupted(UserError):
    """A signal stopped the command, whose finished work is kept. Start it again to continue."""

    exit_code = 42


@contextlib.contextmanager
def keeping(how_to_continue: Callable[[], str]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise `KeyboardInterrupt`, which leaves the block as `Interrupted`.

    The work must be kept at any moment, since the process ends without more ado where a library swallows the
    exception. Outside the main thread, which alone may handle signals, none is noticed; a signal that is ignored, as
    by nohup, stays so.

    Args:
      how_to_continue: the message of `Interrupted`.
    """

    def end() -> None:
        message = logs.printable(how_to_continue())
        print(f"{logs.end_status()}vit_jax: {message}", file=sys.stderr, flush=True)
        os._exit(Interrupted.exit_code)

    timer = threading.Timer(_PATIENCE_SECONDS, end)
    timer.daemon = True

    def stop(_, frame: FrameType | None) -> None:
        for number in before:  # Programs such as `timeout` send their signal twice.
            signal.signal(number, signal.SIG_IGN)
        if is_importing(frame):
            end()
        timer.start()
        raise KeyboardInterrupt

    before = _handle(stop)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(how_to_continue()) from None
    finally:
        timer.cancel()
        _restore(before)


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM wait until the block has ended, so that it is done as a whole."""
    waiting = []
    before = _handle(lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        _restore(before)
    if waiting:
        signal.raise_signal(waiting[0])


def is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way, where extensions turn an exception into other errors."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _handle(handler: Callable) -> dict[int, object]:
    """Sets the handler of signals that are not ignored. Returns the earlier handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def _restore(before: dict[int, object]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
