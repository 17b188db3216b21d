"""Folders in which a script of others left several checkpoints: `checkpoint-500/` of transformers' Trainer, and the
files `checkpoint_700` of Flax.
"""

import re

from absl import logging
from etils import epath

from vit_jax.interchange import pytorch
from vit_jax.interchange.checkpoint_file import CONFIG, FLAX

_NAME = re.compile(r"checkpoint[-_](\d+)")
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")


def newest_checkpoint(folder: epath.Path) -> epath.Path:
    """The whole checkpoint with the highest number in such a folder, which the log names; `folder` itself if there is
    none, or if it is a checkpoint too.
    """
    if not folder.is_dir() or _is_whole(folder):
        return folder
    numbered = {
        int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    }
    whole = {number: path for number, path in numbered.items() if _is_whole(path)}
    if not whole:
        return folder
    newest = whole[max(whole)]
    cut = [path.name for number, path in sorted(numbered.items()) if number > max(whole)]
    logging.info(
        "%s holds %d checkpoints: the newest, %s, is read%s; to read another, name it",
        folder, len(whole), newest.name, f" ({', '.join(cut)} is not whole)" if cut else "",
    )  # fmt: skip
    return newest


def _is_whole(path: epath.Path) -> bool:
    """Whether it is a file of Flax's, or a folder with a description and weights."""
    if not path.is_dir():
        return path.exists()
    has_weights = any((path / name).exists() for name in (*pytorch.NAMES, FLAX))
    has_adapters = all((path / name).exists() for name in _ADAPTERS)
    return has_adapters or (has_weights and (path / CONFIG).exists())
