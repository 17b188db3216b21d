"""Becomes the command in its arguments, PARENT COMMAND…, which is killed when the process PARENT, by which it was
started, ends: a pytest that is killed leaves no server behind.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, *command = sys.argv[1:]
    if os.getppid() == int(parent):  # otherwise it ended before
        os.execv(command[0], command)
