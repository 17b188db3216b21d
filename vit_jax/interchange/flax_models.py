"""The files of vision_transformer, big_vision and BiT: `.npz` with the names of Flax.

What such a file cannot tell, and what is then taken (an override says otherwise): the image size of a
ResNet or of a ViT with sine-cosine positions, 224 or the next smaller multiple of the patch; activation
and epsilon, which all these code bases have as tanh GELU and 1e-6.
"""

from collections.abc import Callable

from absl import logging
from etils import epath

from vit_jax.base.sizes import Size
from vit_jax.interchange import named, npz
from vit_jax.interchange.formats import Foreign, Preprocessing, Wishes
from vit_jax.interchange.opened import Opened

# Where a file may keep its parameters: the two-tower models under `img`, old checkpoints beside the
# optimizer's state.
PREFIXES = ("", "params/", "opt/target/", "params/img/", "opt/target/img/")


def recognises(opened: Opened, format: str) -> bool:
    """Whether the file has the names of one of these code bases."""
    return opened.container == "npz" and named.is_found(opened, format, prefixes=PREFIXES)


def read(
    opened: Opened, format: str, wishes: Wishes, preprocessing: Callable[[Size], Preprocessing]
) -> Foreign:
    """A checkpoint of one of these code bases.

    Args:
      format: its name.
      wishes: see `formats`.
      preprocessing: image size -> how images are prepared.

    Raises:
      CheckpointError: the file is damaged or does not hold one whole model.
    """
    said = named.said(wishes)
    found = named.find(opened, format, said, PREFIXES)
    other = len(opened.tensors) - len(found.tensors)
    if other:
        logging.info(
            "%s: %d tensors beside '%s' (optimizer state, text tower) are left out",
            opened.path, other, found.prefix,
        )  # fmt: skip
    foreign = named.read(opened, found, format, wishes, {})
    foreign.layout["prefix"] = found.prefix
    foreign.preprocessing = preprocessing(foreign.model_config.image_size)
    foreign.assumed += ("preprocessing",)
    return foreign


def write(foreign: Foreign, path: epath.PathLike, format: str, prefix: str) -> None:
    """Writes the names that the model was read with, if these were of the same format, else those of
    a new file.

    Args:
      prefix: what stands before all names of a new file.

    Raises:
      CheckpointError: the code would compute other numbers, or the names have no place for a
        parameter; nothing is written.
    """
    conversion = named.conversion_of(foreign.model_config, format, path)
    foreign = named.expressed(foreign, conversion, format)
    prefix = foreign.layout.get("prefix", prefix)
    arrays = named.arrays(foreign, conversion)
    npz.write(path, ((prefix + name, array) for name, array in arrays))
