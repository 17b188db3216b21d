"""Files of strangers that are none: pipes and devices, which may never open, or never end."""

import os
import stat

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import CheckpointError


def check_regular(path: epath.PathLike) -> None:
    """Raises `CheckpointError` for what is neither a file nor a folder. Call it before it is opened."""
    if places.in_bucket(path) or not os.path.exists(path):
        return
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise CheckpointError(f"{path} is no file, but a pipe or a device")
