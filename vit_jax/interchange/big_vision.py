"""Checkpoints of google-research/big_vision: `.npz` of ViT and Mixer, and of BiT's ResNets.

ViT's blocks may be scanned; a ResNet may have big_vision's names or the original TensorFlow ones.
"""

from etils import epath

from vit_jax.base.sizes import Size, height_width
from vit_jax.interchange import flax_models
from vit_jax.interchange.formats import Foreign, Preprocessing, Wishes
from vit_jax.interchange.opened import Opened

NAME = "big_vision"


def recognises(opened: Opened) -> bool:
    """Whether the file has this code's or BiT's names; a Mixer's are also the official ones."""
    return flax_models.recognises(opened, NAME)


def read(opened: Opened, wishes: Wishes) -> Foreign:
    """See `formats`."""
    return flax_models.read(opened, NAME, wishes, _preprocessing)


def write(foreign: Foreign, path: epath.PathLike) -> None:
    """Writes the names the model was read with, or `params/...` with a tensor for each block's."""
    flax_models.write(foreign, path, NAME, prefix="params/")


def _preprocessing(image_size: Size) -> Preprocessing:
    """The smaller side to 8/7 of the size (256 for 224), then the middle."""
    side = round(min(height_width(image_size)) * 8 / 7)
    return Preprocessing(image_size, eval_crop="central", eval_resize=side)
