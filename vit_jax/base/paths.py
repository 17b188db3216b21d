"""Where files may be: in a local folder, or in a bucket of Google Cloud Storage (`gs://`)."""

import importlib.util
import os
from typing import BinaryIO

from etils import epath

from vit_jax.base.errors import ConfigError


def locate(path: str | os.PathLike) -> epath.Path:
    """A path as a user says it: a local one absolute, with `~` expanded; a bucket's as it is.

    Raises:
      ConfigError: it is in a bucket, and the package that reads buckets is not installed.
    """
    path = epath.Path(path).expanduser()
    if not in_bucket(path):
        return path.absolute()
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigError(f"{path}: reading buckets needs gcsfs: pip install 'vit_jax[gcs]'")
    return path


def write_whole(path: epath.Path, text: str) -> None:
    """Writes a file of which a reader never sees a part, whatever happens to the writer."""
    if in_bucket(path):
        path.write_text(text)
    else:
        new = path.with_name(f"{path.name}.new")
        new.write_text(text)
        new.replace(path)


def open_bytes(path: str) -> BinaryIO:
    """Opens a file to read; a local one without the cost of a path object, which readers of many
    small files would feel.
    """
    return epath.Path(path).open("rb") if in_bucket(path) else open(path, "rb")


def in_bucket(path: str | os.PathLike) -> bool:
    """Whether a path is a bucket's: there files appear whole, and nothing can be appended to them."""
    return "://" in os.fspath(path)
