"""Where a prepared data set is written: a folder, or a prefix of a bucket. Its files appear there whole
or not at all.
"""

import io
import json
import os
import pathlib
import shutil
import tempfile

import numpy as np
from etils import epath

from vit_jax.base import places


class Output:
    """The place of a prepared data set, used in a `with` statement, which removes unfinished files.

    Attributes:
      folder: the place.
      in_bucket: whether it is in a bucket. Files are then made on this machine, in the folder for
        temporary files (TMPDIR), and uploaded.
    """

    def __init__(self, folder: epath.Path, worker: str):
        """Args:
        worker: part of the names of unfinished files; no other process has the same at a time.
        """
        self.folder, self.in_bucket, self._worker = folder, places.in_bucket(folder), worker
        self._unfinished: set[pathlib.Path] = set()

    def __enter__(self) -> "Output":
        if self.in_bucket:
            self._scratch = pathlib.Path(tempfile.mkdtemp(prefix="vit_jax-prepare-"))
        else:
            self._scratch = pathlib.Path(self.folder)
            self._scratch.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_) -> None:
        for path in self._unfinished:
            path.unlink(missing_ok=True)
        if self.in_bucket:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def scratch(self, file: str) -> pathlib.Path:
        """Where the file `file` is made on a local disk, before it is published; nothing is there."""
        path = self._scratch / f"{file}{self._worker}.unfinished"
        path.unlink(missing_ok=True)
        self._unfinished.add(path)
        return path

    def publish(self, scratch: pathlib.Path, file: str) -> None:
        """Gives a finished file its place and name."""
        if self.in_bucket:
            places.upload(scratch, self.folder / file)
            scratch.unlink()
        else:
            with open(scratch, "rb") as opened:
                os.fsync(opened.fileno())  # else the name may reach the disk before the content
            os.replace(scratch, self.folder / file)
        self._unfinished.discard(scratch)

    def write(self, file: str, content: bytes) -> None:
        """Writes a small file."""
        if self.in_bucket:
            places.write_whole(self.folder / file, content)
            return
        scratch = self.scratch(file)
        scratch.parent.mkdir(exist_ok=True)
        scratch.write_bytes(content)
        self.publish(scratch, file)

    def write_json(self, file: str, value: dict) -> None:
        self.write(file, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())

    def write_labels(self, file: str, labels: list[int]) -> bytes:
        """Writes labels as `prepared.Prepared` reads them; returns the content."""
        content = io.BytesIO()
        np.save(content, np.asarray(labels, np.int32))
        self.write(file, content.getvalue())
        return content.getvalue()
