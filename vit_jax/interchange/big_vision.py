"""Checkpoints of google-research/big_vision: `.npz` of ViT and Mixer, and of BiT's ResNets.

ViT's blocks may be scanned; a ResNet may have big_vision's names or the original TensorFlow ones.
"""

from vit_jax.checkpoints.reading import CheckpointError
from vit_jax.interchange import adapt, flax_models, flax_names, npz
from vit_jax.interchange.formats import Foreign, Preprocessing
from vit_jax.models import hybrid, resnet

NAME = "big_vision"
CANNOT_TELL = ()
_CODE = "big_vision"


def recognises(path) -> bool:
    """Whether the file has this code's or BiT's names; a Mixer's are also the official ones."""
    return flax_names.find_prefix(npz.names(path)) is not None


def read(path, **overrides) -> Foreign:
    """See `formats.read`."""
    return flax_models.read(path, NAME, _preprocessing, overrides)


def write(foreign: Foreign, path) -> None:
    """Writes the names the model was read with, or `params/...` with a tensor for each block's.

    big_vision's class token has no position; a class row is added to the token, which gives the
    same numbers.
    """
    config = foreign.model_config
    if type(config) is hybrid.Config:
        raise CheckpointError(f"{path} is not written: {_CODE} has no hybrid")
    flax_models.refuse_other_conventions(foreign, path, _CODE)
    if foreign.layout.get("format") == NAME:
        flax_models.write(foreign, path, foreign.layout)
        return
    bit = isinstance(config, resnet.Config) and config.preactivation
    layout = dict(
        prefix="params/", numbers="linen", scanned=False, position=flax_names.POSITION_BIG_VISION
    )
    layout |= dict(pooling="MAPHead_0/", norm_axes=bit, resnet="flax", dtypes={}, renamed={})
    flax_models.write(adapt.without_class_row(foreign), path, layout)


def _preprocessing(image_size: int) -> Preprocessing:
    """The smaller side to 8/7 of the size (256 for 224), then the middle."""
    return Preprocessing(image_size, eval_crop="central", eval_resize=round(image_size * 8 / 7))
