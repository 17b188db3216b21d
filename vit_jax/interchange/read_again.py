"""Whether a file for another library says all of a model: before it is written, it is read as that library's files are.

A writer translates tensors and the options that it knows. Without this check, an option that is newer than the rules of
the format would get lost, and the other library would compute another network. Our reader computes what that library
does (tests compare them), so the model that it finds must be the one that is written.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import nnx

from vit_jax.base import schema
from vit_jax.base.errors import CheckpointError, UserError, reason
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange import state_dicts
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.formats import LoadedCheckpoint, ReadOptions
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig

_ROLES = ("size", "structure", "convention")
_TINY = {"epsilons"}  # options that change answers by less than 1e-5


class _Planned(CheckpointFile):
    """A file or folder that is going to be written.

    Args:
      path: where it is going to be.
      container: see `CheckpointFile`.
      tensors: by name, without the values of parameters.
      config_json: content of a folder's config.json.
      header: what a file says beside its tensors.
    """

    def __init__(
        self,
        path: epath.Path,
        container: str,
        tensors: Mapping[str, LazyArray],
        config_json: Mapping[str, Any],
        header: Mapping[str, Any],
    ):
        self.path = path
        self.container = container
        self.head = b""
        if container == "safetensors":
            tensors = state_dicts.without_wrappers(tensors)
        # In the place of cached properties.
        vars(self).update(
            config=dict(config_json), header=dict(header), _content=(dict(tensors), {})
        )


def check(
    config: ClassifierConfig,
    format: str,
    read: Callable[[CheckpointFile, ReadOptions], LoadedCheckpoint],
    path: epath.Path,
    container: str,
    tensors: Mapping[str, LazyArray],
    config_json: Mapping[str, Any] = types.MappingProxyType({}),
    header: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """Checks that what is going to be written is read as the same network.

    Args:
      config: of the model as the format expresses it.
      format: its name.
      read: the function that reads files of the format.
      path: of the file or folder.
      container: 'folder', 'npz' or 'safetensors'.
      tensors: what is going to be written, see `tensors_by_name.planned`.
      config_json: what a folder says beside its tensors.
      header: what a file says beside them.

    Raises:
      CheckpointError: the format leaves an option out, or has other tensors for such a model.
    """
    planned = _Planned(path, container, tensors, config_json, header)
    # Which images a model takes is up to its user, and what a file leaves open is for the reader to ask.
    request = ReadOptions({"image_size": config.image_size}, vars(config), allow_nonfinite=True)
    try:
        checkpoint = read(planned, request)
    except UserError as error:
        raise CheckpointError(
            f"{path} is not written: the format {format} has other tensors for such a model, and its file would be "
            f"refused: {reason(error)}"
        ) from error
    again = checkpoint.model_config
    # What no such file tells is checked by the conversion: see its `conventions`.
    lost = [name for name in _different_options(config, again) if name not in checkpoint.assumed]
    if not lost or _program(config) == _program(_with_options_of(again, lost, config)):
        return
    ours = ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
    theirs = ", ".join(f"{name}={getattr(again, name)!r}" for name in lost)
    raise CheckpointError(
        f"{path} is not written: the format {format} cannot say {ours}, and its code would compute another network, "
        f"with {theirs}"
    )


def _different_options(config: ClassifierConfig, read: ClassifierConfig) -> list[str]:
    """The options that change what a network computes and differ between two configs."""
    names = [name for name in schema.with_role(type(config), *_ROLES) if name not in _TINY]
    return [name for name in names if getattr(config, name) != getattr(read, name)]


def _with_options_of(
    again: ClassifierConfig, names: list[str], config: ClassifierConfig
) -> ClassifierConfig:
    return dataclasses.replace(config, **{name: getattr(again, name) for name in names})


def _program(config: ClassifierConfig) -> str:
    """The forward pass of a network as a text. Equal texts compute the same, whatever options say: many have no effect
    beside others.
    """
    definition, weights = registry.abstract_weights(config)
    images = jax.ShapeDtypeStruct((1, *config.height_width, config.channels), np.float32)
    program = jax.make_jaxpr(lambda weights, images: nnx.merge(definition, *weights)(images))
    return str(program(weights, images))
