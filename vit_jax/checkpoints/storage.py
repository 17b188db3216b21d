"""What Orbax can read and write where, and what its errors mean."""

import functools
import os
import re
import tempfile

from absl import logging
from etils import epath

from vit_jax.base import buckets, limits, places
from vit_jax.base.errors import ConfigError, UserError

_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")  # in the messages of TensorStore


def locate_to_save(path: epath.PathLike, field: str = "") -> epath.Path:
    """The folder that checkpoints are saved in.

    Raises:
      ConfigError: it cannot be used (`places.locate`), or Orbax does not write there.
    """
    check_can_save(path, field)
    return places.locate(path, field)


def check_can_save(path: epath.PathLike | None, field: str = "") -> None:
    """Raises `ConfigError` for a place where no checkpoint is saved, before anything is asked of it."""
    named = f"{field}={path}" if field else path
    if path is None or os.fspath(path) == "None":
        raise ConfigError(
            f"{named}: None names no folder; was a variable not set? (a folder of this name is ./None)"
        )
    if os.fspath(path).startswith("s3://"):
        raise ConfigError(
            f"{named}: Orbax writes checkpoints to local folders and gs:// only, not to S3: save in a "
            "local or shared folder, and copy it with 'aws s3 sync'; from S3 it can be read"
        )


def readable(folder: epath.Path) -> epath.Path:
    """Where Orbax can read a folder: there, or of S3 in a copy."""
    if not os.fspath(folder).startswith("s3://"):
        return folder
    return epath.Path(_copy_of(os.fspath(folder)).name)


@functools.lru_cache(1)  # arrays are read one by one
def _copy_of(folder: str) -> tempfile.TemporaryDirectory:
    """A local copy of a folder in a bucket, removed when it is used no more."""
    copy = tempfile.TemporaryDirectory(prefix="vit_jax-")
    logging.info("copying %s to %s", folder, copy.name)
    for file in places.files_below(folder):
        to = os.path.join(copy.name, os.path.relpath(file.path, folder))
        os.makedirs(os.path.dirname(to), exist_ok=True)
        with open(to, "wb") as written:
            written.write(places.read_bytes(file.path))
    return copy


def failure(folder: epath.Path, error: Exception) -> UserError | None:
    """Why a checkpoint cannot be read although it may be good, which is no reason to set it aside; `None` for damage.

    Args:
      folder: of the checkpoint.
      error: what Orbax or TensorStore raised.
    """
    cause = error.__cause__ or error
    if places.in_bucket(folder) and buckets.is_absence(cause):
        return buckets.failure(os.fspath(folder), why(error))
    if code := _ERROR_CODE.search(str(cause)):
        cause = OSError(int(code[1]), "", os.fspath(folder))
    return limits.as_user_error(cause) if limits.is_shortage(cause) else None


def why(error: Exception) -> str:
    """What Orbax or TensorStore say, without their description of how the array is stored."""
    cause = error.__cause__ or error
    first_line = (str(cause) or type(cause).__name__).splitlines()[0]
    return re.split(r" See full TensorStore details| \[tensorstore_spec", first_line)[0]
