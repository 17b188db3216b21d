"""Checkpoints of google-research/vision_transformer: `.npz` of ViT, hybrid and Mixer."""

from vit_jax.checkpoints.reading import CheckpointError
from vit_jax.interchange import adapt, flax_models, flax_names, npz
from vit_jax.interchange.formats import Foreign, Preprocessing
from vit_jax.models import mixer, vit

NAME = "official"
CANNOT_TELL = ()
_CODE = "google-research/vision_transformer"


def recognises(path) -> bool:
    """Whether the file has this code's names. The Mixer's are big_vision's too."""
    names = set(flax_names.canonical(npz.names(path)).values())
    prefix = flax_names.find_prefix(names)
    own = (flax_names.POSITION_OFFICIAL, "stem/kernel")
    return prefix is not None and any(prefix + name in names for name in own)


def read(path, **overrides) -> Foreign:
    """See `formats.read`. Images are resized, without a crop, and scaled to [-1, 1]."""
    return flax_models.read(path, NAME, Preprocessing, overrides)


def write(foreign: Foreign, path) -> None:
    """Writes the names the model was read with, or those from before Linen, as published files."""
    config = foreign.model_config
    if not isinstance(config, vit.Config | mixer.Config) or getattr(config, "pool", "") == "map":
        raise CheckpointError(
            f"{path} is not written: {_CODE} has no ResNet of its own and no attention pooling"
        )
    flax_models.refuse_other_conventions(foreign, path, _CODE)
    if foreign.layout.get("format") == NAME:
        flax_models.write(foreign, path, foreign.layout)
        return
    layout = dict(
        prefix="", numbers="pre_linen", scanned=False, position=flax_names.POSITION_OFFICIAL
    )
    layout |= dict(pooling="", norm_axes=False, resnet="flax", dtypes={}, renamed={})
    flax_models.write(adapt.with_class_row(adapt.with_learned_position(foreign)), path, layout)
