"""Becomes the command in its arguments, COMMAND…, as an interactive shell would start it: no signal is ignored or
blocked, as they are in the background and by libraries of the tests' process, and where standard input is a terminal,
that controls the process, if it leads a session.

A process of its own does this, not `preexec_fn`: that would run Python in a copy of the tests' process, whose threads
are gone and may have held a lock.
"""

import fcntl
import os
import signal
import sys
import termios

AS_FROM_A_SHELL = [sys.executable, "-S", __file__]

if __name__ == "__main__":
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    if os.isatty(0) and os.getsid(0) == os.getpid():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.execvp(sys.argv[1], sys.argv[1:])
