"""Reads that are tried again: networks and what mounts buckets fail for moments."""

import errno
import threading

from absl import logging

from vit_jax.base import limits
from vit_jax.data.record import BadImage, DataError, Record, Source

PAUSES = (0.2, 1.0, 3.0, 6.0)  # seconds between tries
# Errors that another try does not mend.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def read_with_retries(source: Source, index: int, stopped: threading.Event) -> Record:
    """Example `index` of `source`, tried several times if that fails for a reason that may pass.

    Args:
      stopped: when it is set, nothing is tried again.

    Raises:
      DataError: the network or the file system fails for longer than that.
      MachineError: so long there are no descriptors or no memory. All else as the source does; also a
        disk's error, which is of that image alone.
    """
    tries = 1 + len(PAUSES)
    for number, pause in enumerate(PAUSES, 1):
        try:
            return source[index]
        except Exception as error:
            why = _passing(error)
            if not why:
                raise
            logging.log_every_n_seconds(
                logging.WARNING, "image number %d: %s (try %d of %d)", 5, index, why, number, tries
            )
        if stopped.wait(pause):
            break
    try:
        return source[index]
    except Exception as error:
        why = _passing(error)
        if not why or why.errno == errno.EIO:
            raise
        if shortage := limits.as_user_error(why):
            raise shortage from error
        name = error.name if isinstance(error, BadImage) else f"number {index}"
        raise DataError(
            f"image {name} cannot be read, at {tries} tries within {sum(PAUSES):.0f} s: {why!r}. Is the "
            "network up, and is the server?"
        ) from error


def _passing(error: Exception) -> OSError | None:
    """What the file system or network reported, if another try may succeed."""
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, OSError):
            return None if isinstance(cause, _LASTING) else cause
    return None
