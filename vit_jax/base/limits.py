"""The machine's limits for a process, above all for open files, and the errors of a process that reaches them.

These errors say nothing about the content of a file: a file that cannot be opened for want of a descriptor is not
damaged.
"""

import contextlib
import errno
import functools
import os
import resource
import sys

from vit_jax.base.errors import UserError

# Of these another try, or another start, may help; the content of the file has nothing to do with them.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class MachineError(UserError):
    """The machine lacks something, or its disk fails: start again."""

    exit_code = 42


@functools.cache
def given_open_files() -> int:
    """The number of files that this process may have open, as it was at its start: it plans with this number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Raises the soft limit of open files to the hard one. The soft one is 1,024 under systemd, ssh and SLURM, for the
    sake of programs that use select(2); a data set has more files.
    """
    given_open_files()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Systems that grant less than their hard limit says keep the soft one.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that a request failed for want of descriptors or memory."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def as_user_error(error: BaseException) -> MachineError | None:
    """The sentence for a shortage, or for a disk or mount that fails; `None` for any other error."""
    if not isinstance(error, OSError) or error.errno not in (*_SHORTAGES, errno.EIO):
        return None
    has_name = isinstance(error.filename, str | bytes)
    what = os.fsdecode(error.filename) if has_name else "a file"
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    why = {
        errno.EMFILE: f"this process has all the {most} files open that it may (ulimit -n; LimitNOFILE of "
        "systemd): raise that limit",
        errno.ENFILE: "this machine has all the files open that it may (sysctl fs.file-max): raise that limit, or end "
        "other processes",
        errno.ENOMEM: "this machine has no memory for it: end other processes, or raise the memory limit of the "
        "container or job",
        errno.EIO: "its disk or mount reports an input/output error, which says nothing about its content: see dmesg, "
        "or the log of the mount",
    }[error.errno]
    return MachineError(f"{what} cannot be read: {why}, and start again")
