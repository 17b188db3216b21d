"""The memory that the signal handlers of a thread run on, see sigaltstack(2).

A library may exchange it, and later free its own without putting the first one back. Then the next signal, such as
Ctrl-C, ends the process by a segmentation fault.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator


class _SignalStack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = [("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """At its end this thread's signal stack is the one of its beginning. Elsewhere than on Linux nothing is done."""
    if sys.platform != "linux":
        yield
        return
    before = _SignalStack(*of_thread())
    try:
        yield
    finally:
        ctypes.CDLL(None).sigaltstack(ctypes.byref(before), None)


def of_thread() -> tuple[int | None, int, int]:
    """This thread's signal stack: its address, flags and bytes."""
    stack = _SignalStack()
    ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
    return stack.pointer, stack.flags, stack.size
