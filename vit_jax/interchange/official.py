"""Checkpoints of google-research/vision_transformer: `.npz` of ViT, hybrid and Mixer."""

from etils import epath

from vit_jax.interchange import flax_models
from vit_jax.interchange.formats import Foreign, Preprocessing, Wishes
from vit_jax.interchange.opened import Opened

NAME = "official"


def recognises(opened: Opened) -> bool:
    """Whether the file has this code's names. The Mixer's are big_vision's too."""
    return flax_models.recognises(opened, NAME)


def read(opened: Opened, wishes: Wishes) -> Foreign:
    """See `formats`. Images are resized, without a crop, and scaled to [-1, 1]."""
    return flax_models.read(opened, NAME, wishes, Preprocessing)


def write(foreign: Foreign, path: epath.PathLike) -> None:
    """Writes the names the model was read with, or those from before Linen, as published files."""
    flax_models.write(foreign, path, NAME, prefix="")
