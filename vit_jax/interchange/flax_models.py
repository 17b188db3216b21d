"""The formats `official` (google-research/vision_transformer: `.npz` and Flax's checkpoints of ViT, hybrid and
Mixer) and `big_vision` (`.npz` of ViT, whose blocks may be scanned, of Mixer, and of BiT's ResNets, with big_vision's
names or the original TensorFlow ones): the names of Flax.

What such a file cannot tell, and what is then taken (an override says otherwise): the image size of a
ResNet or of a ViT with sine-cosine positions, 224 or the next smaller multiple of the patch; activation
and epsilon, which all these code bases have as tanh GELU and 1e-6.
"""

import dataclasses
import itertools
from collections.abc import Callable

from absl import logging
from etils import epath

from vit_jax.base.sizes import Size, height_width
from vit_jax.interchange import (
    answers,
    file_header,
    npz,
    read_again,
    saved_objectives,
    state_dicts,
    tensors_by_name,
)
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.conversions import flax, translation
from vit_jax.interchange.formats import LoadedCheckpoint, Preprocessing, ReadOptions

# Where a file may keep its parameters: the two-tower models under `img`, old checkpoints beside the
# optimizer's state.
_IMAGE = "img/"
PREFIXES = ("", "params/", "opt/target/", "params/img/", "opt/target/img/")
# Where a checkpoint of Flax does: (params, optimizer, step), and an optimizer of Flax from before Optax.
_OF_CHECKPOINTS = (*PREFIXES, "0/", "target/", "optimizer/target/", "params/params/", "0/params/")
_PREFIXES = {"npz": PREFIXES, "msgpack": _OF_CHECKPOINTS}


@dataclasses.dataclass(frozen=True)
class FlaxFormat:
    """The format of one of these code bases; see `formats`.

    Attributes:
      name: of the format.
      prefix: what stands before all names of a new file.
      preprocessing: image size -> how images are prepared.
    """

    name: str
    prefix: str
    preprocessing: Callable[[Size], Preprocessing]

    def recognises(self, file: CheckpointFile) -> bool:
        """Whether the file has the names of this code base. A Mixer's are those of both."""
        return file.container in _PREFIXES and tensors_by_name.is_found(
            file, self.name, prefixes=_PREFIXES[file.container]
        )

    def read(self, file: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
        """The checkpoint.

        Raises:
          CheckpointError: the file is damaged or does not hold one whole model.
        """
        match = tensors_by_name.find_family(
            file,
            self.name,
            file_header.requested_metadata(request),
            _PREFIXES[file.container],
        )
        other = [name for name in file.tensors if not name.startswith(match.prefix)]
        root = match.prefix.removesuffix(_IMAGE)
        two_towers = root != match.prefix
        text = {n: n.removeprefix(root) for n in other if two_towers and n.startswith(root)}
        if other := [name for name in other if name not in text]:
            logging.info(
                "%s: %d tensors beside '%s' (optimizer state) are skipped: %s",
                file.path, len(other), match.prefix, state_dicts.listed(other),
            )  # fmt: skip
        checkpoint = tensors_by_name.read_named(file, match, self.name, request, {})
        checkpoint.extras |= {short: file.tensors[name] for name, short in text.items()}
        if file.container == "npz":
            checkpoint.layout["prefix"] = match.prefix
        checkpoint.preprocessing = self.preprocessing(checkpoint.model_config.image_size)
        checkpoint.assumed += ("preprocessing",)
        return checkpoint

    def write(self, checkpoint: LoadedCheckpoint, path: epath.PathLike) -> None:
        """Writes the names that the model was read with, if these were of the same format, else those of a
        new file.

        A text tower of SigLIP's is written beside the image tower.

        Raises:
          CheckpointError: the code would compute other numbers, or the names have no place for a
            parameter; nothing is written.
        """
        extra = saved_objectives.beside(checkpoint, self.name, path)
        conversion = tensors_by_name.conversion_of(checkpoint.model_config, self.name, path)
        checkpoint = tensors_by_name.expressed(checkpoint, conversion, self.name)
        prefix = checkpoint.layout.get("prefix", self.prefix + (_IMAGE if extra.rules else ""))
        tensors = tensors_by_name.planned(checkpoint, conversion)
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        config = checkpoint.model_config
        read_again.check(config, self.name, self.read, epath.Path(path), "npz", tensors)
        arrays = tensors_by_name.arrays(checkpoint, conversion)
        named = ((prefix + name, array) for name, array in arrays)
        if extra.rules:
            # Both towers have their blocks stacked, or none.
            scanned, root = checkpoint.layout["scanned"], prefix.removesuffix(_IMAGE)
            rules = flax.stacked_blocks(extra.rules) if scanned else extra.rules
            text = translation.to_theirs(rules, extra.params)
            named = itertools.chain(named, ((root + name, array) for name, array in text))
        answers.warn_not_held(checkpoint, self.name, path)
        npz.write(path, named)


def _middle(image_size: Size) -> Preprocessing:
    """The smaller side to 8/7 of the size (256 for 224), then the middle."""
    side = round(min(height_width(image_size)) * 8 / 7)
    return Preprocessing(image_size, eval_crop="central", eval_resize=side)


# Images are resized, without a crop; a new file has names from before Linen, as published ones.
OFFICIAL = FlaxFormat("official", "", Preprocessing)
BIG_VISION = FlaxFormat("big_vision", "params/", _middle)
