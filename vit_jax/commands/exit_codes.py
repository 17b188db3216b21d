"""How a command ends: what a user can cause, a closed pipe and Ctrl-C become a message and an exit
code, without a traceback.

0 done; 1 error; 2 the command line or the config is wrong; 42 stopped by a signal after saving,
start me again; 130 stopped by Ctrl-C with nothing to save; 141 the reader of the output is gone.
"""

import contextlib
import errno
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterator

from absl import flags

from vit_jax.base import buckets, limits, logs, stopping
from vit_jax.base.errors import UserError

USAGE = 2
STOPPED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE
_PATIENCE_SECONDS = 3.0  # for cleaning up after Ctrl-C
_BYTES = re.compile(r"[Oo]ut of memory.*?(\d+) ?bytes")


class OutOfMemory(UserError):
    """The host or a device does not have the memory that a command needs."""


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """If the code inside fails, ends the process with a sentence and an exit code."""
    # Not where the signal is ignored, as by nohup.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        try:
            yield
        finally:
            _flush_output()
    except flags.Error as error:
        fail(str(error), USAGE)
    except UserError as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _stop()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        _leave(CLOSED_PIPE)
    except Exception as error:
        known = as_user_error(error)
        if known is None:
            raise
        fail(str(known), known.exit_code)
    finally:
        end_at_once_when_interrupted()  # What Python does before it exits needs no traceback.


@contextlib.contextmanager
def printing_what_is_saved(file: str) -> Iterator[None]:
    """Prints the result of work that is done and saved: a full disk behind standard output does not make it fail.

    Args:
      file: has the result too, for the message.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(
            f"vit_jax: the result cannot be printed ({error.strerror}); it is in {file}",
            file=sys.stderr,
        )
        _discard_output()


def end_at_once_when_interrupted() -> None:
    """From now on Ctrl-C ends the process silently, as SIGTERM does. For code that handles the
    first signal itself (`training/upkeep/preemption.py`): the second must not wait for Python.
    """
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def fail(message: str, code: int) -> None:
    """Ends the process with a message on standard error."""
    print(f"vit_jax: {logs.printable(message)}", file=sys.stderr)
    sys.exit(code)


def as_user_error(error: BaseException) -> UserError | None:
    """The sentence for an error of the machine or of storage; `None` for any other."""
    return (
        out_of_memory(error)
        or out_of_space(error)
        or limits.as_user_error(error)
        or buckets.as_user_error(error)
    )


def out_of_space(error: BaseException) -> UserError | None:
    """The sentence for a full disk behind an open file, such as standard output; `None` for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = error.filename or "the disk that standard output, or a file of this command, goes to"
    return UserError(f"{error.strerror}: free {where}")


def out_of_memory(error: BaseException) -> OutOfMemory | None:
    """The sentence for an error that says that memory did not suffice; `None` for any other."""
    on_device = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    if not on_device and not isinstance(error, MemoryError):
        return None
    size = _BYTES.search(str(error))
    asked = f", asked for {int(size[1]) / 2**30:.3g} GiB more" if size else ""
    where = "a device" if on_device else "the host"
    return OutOfMemory(
        f"{where} is out of memory{asked}. What helps: fewer images at a time (config.batch_size, "
        "config.eval.batch_size, or --batch_size of predict); the same batch in parts "
        "(config.accumulate=4); recomputing activations (config.model.remat=full); parameters cut "
        "over several devices (config.mesh.fsdp). 'vit_jax plan' counts what a step needs"
    )


def _flush_output() -> None:
    """Writes the rest of standard output. Raises `UserError` if it cannot be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        raise UserError(
            f"standard output cannot be written ({error.strerror}): free the disk that it goes to"
        ) from error


def _discard_output() -> None:
    """Drops the text in the buffer of standard output, which Python would write once more when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _interrupt(_, frame) -> None:
    """Raises `KeyboardInterrupt`, except during an import, where extensions turn it into other
    errors and there is nothing to clean up. A library's callback may swallow it: then the process
    ends a little later.
    """
    if stopping.is_importing(frame):
        _stop()
    timer = threading.Timer(_PATIENCE_SECONDS, _say_stopped)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def _stop() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say_stopped()


def _say_stopped() -> None:
    print(f"{logs.end_status()}vit_jax: stopped", file=sys.stderr, flush=True)
    _leave(STOPPED)


def _leave(code: int) -> None:
    """Ends the process without waiting for its threads, whose work is no longer needed."""
    os._exit(code)
