"""How a run hears that it should stop: SIGTERM, as schedulers and spot machines send it, SIGINT, or SIGHUP, as a
terminal or a connection that is closed sends it.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jax.experimental import multihost_utils

from vit_jax.base import logs
from vit_jax.base.errors import UserError
from vit_jax.devices import processes

# `timeout` sends its signal twice, like all programs that signal a process and its group.
_SAME_SECONDS = 0.5


class Interrupted(UserError):
    """A signal asked the run to stop; its state is saved. Start it again to continue."""

    exit_code = 42


class StopRequest:
    """Asked after every step whether to stop there.

    One process stops after the step under way at the first signal, and says so at once. The second
    signal does what it did before: it ends the process at once where that is the system's default,
    and raises `KeyboardInterrupt` where Python's is. Of several processes, any one may get the
    signal: JAX's pre-emption service, which then owns SIGTERM, tells the others and finds a step
    that none of them has passed.

    Outside the main thread, which alone may handle signals, none is noticed.

    Attributes:
      name: of the signal.
      requests: how many runs of this process were asked to stop, also at their last step, where they end all the same.
    """

    name = "SIGTERM"
    requests = 0

    def __init__(self):
        self._heard_at: float | None = None
        self._call: Callable[[], None] = _nothing
        self._asked = 0
        self._several = processes.count() > 1
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs handlers between two of its instructions, and one of these, a compilation or a step, may take
        # minutes. But it writes the number of a signal to this pipe at once, and a thread reads it.
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        threading.Thread(
            target=self._listen, args=(reader,), name="vit_jax-signals", daemon=True
        ).start()
        self._pipe_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        signals = [signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signals.append(signal.SIGHUP)
        if not self._several:
            signals.append(signal.SIGTERM)
        self._terminals = [file for file in (1, 2) if os.isatty(file)]
        self._before = {number: signal.signal(number, self._hear) for number in signals}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._pipe_before)
            os.close(self._pipe)  # which ends the thread

    def after_step(self) -> bool:
        """Whether to stop now, the same in all processes; each calls it once after every step."""
        if not self._several:
            return self.requested
        self._asked += 1  # and not the step, which a rollback sets back
        return multihost_utils.reached_preemption_sync_point(self._asked)

    @property
    def requested(self) -> bool:
        """Whether this process, alone, was asked to stop."""
        return self._heard_at is not None and not self._several

    @contextlib.contextmanager
    def calling(self, function: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal calls `function`, so that a single process does not wait for something that may
        never come; several processes have to agree first.
        """
        self._call = function
        if self.requested:
            function()
        try:
            yield
        finally:
            self._call = _nothing

    def _hear(self, number: int, frame) -> None:
        """The handler: in the main thread, when Python gets to it."""
        if self._heard_at is None:
            self._heard_at = time.monotonic()
            self.name = signal.Signals(number).name
            StopRequest.requests += 1
            if self._several:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self._call()
        elif callable(self._before[number]) and _is_another(self._heard_at):
            self._before[number](number, frame)

    def _listen(self, reader: int) -> None:
        """Reports signals at once, in a thread."""
        heard_at = None
        while number := os.read(reader, 1):
            number = number[0]
            if number not in self._before:
                continue
            name = signal.Signals(number).name
            if number == signal.SIGHUP:
                self._leave_terminals()
            if heard_at is None:
                heard_at = time.monotonic()
                _say(f"{name}: saving after the steps under way; a second one ends without saving")
            elif self._before[number] == signal.SIG_DFL and _is_another(heard_at):
                _say(f"{name} again: ended without saving")
                os._exit(128 + number)
        os.close(reader)

    def _leave_terminals(self) -> None:
        """Discards further output to a terminal that was closed: writing to it would raise an error, and change the
        exit code.
        """
        for file in self._terminals:
            if not os.isatty(file):  # any more
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, file)
                os.close(nowhere)


def _nothing() -> None:
    pass


def _is_another(heard_at: float) -> bool:
    return time.monotonic() - heard_at > _SAME_SECONDS


def _say(message: str) -> None:
    # Not by `logging` or `print`, whose locks the main thread may hold.
    line = f"{logs.erase_status()}vit_jax: {message}\n"
    os.write(sys.__stderr__.fileno(), line.encode())
