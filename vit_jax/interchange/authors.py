"""The names that a family has in the PyTorch code of its authors: what `torch.save` wrote, a
`.safetensors` file, or the same tensors in an `.npz` file.
"""

import dataclasses
import json

from etils import epath

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import pytorch, tensors_by_name, timm
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.conversions import mae
from vit_jax.interchange.formats import LoadedCheckpoint, ReadOptions
from vit_jax.models.classifier import ClassifierConfig

NAME = "authors"


def recognises(file: CheckpointFile) -> bool:
    """Whether a family knows the names."""
    return file.container not in ("folder", "") and tensors_by_name.is_found(
        file, NAME, metadata=tensors_by_name.in_header(file), prefixes=file.prefixes
    )


def read(file: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """The model of a file with the names of its family's authors."""
    stated = tensors_by_name.in_header(file)
    found = tensors_by_name.find_family(
        file, NAME, stated | tensors_by_name.requested_metadata(request), file.prefixes
    )
    return tensors_by_name.with_header(
        tensors_by_name.read_named(file, found, NAME, request, stated), file
    )


def write(checkpoint: LoadedCheckpoint, path: epath.PathLike) -> None:
    """Writes a `.safetensors` file. MAE's authors have timm's names for the encoder, and the decoder beside it.

    Raises:
      CheckpointError: the authors' code has no such model.
    """
    path = epath.Path(path)
    pytorch.refuse_to_pickle(path)
    if decoder := mae.decoder_in(checkpoint):
        check_mae_encoder(checkpoint.model_config, path)
        conversion = tensors_by_name.conversion_of(checkpoint.model_config, timm.NAME, path)
        checkpoint = tensors_by_name.expressed(checkpoint, conversion, timm.NAME)
        decoder_options = {mae.LAYOUT: dataclasses.asdict(decoder.options)}
        header = timm.header_of(checkpoint) | decoder_options
        beside = decoder.beside(timm.NAME)
    else:
        conversion = tensors_by_name.conversion_of(checkpoint.model_config, NAME, path)
        checkpoint = tensors_by_name.expressed(checkpoint, conversion, NAME)
        header = tensors_by_name.header(
            checkpoint, tensors_by_name.options_of_model(checkpoint.model_config)
        )
        beside = ((), {})
    metadata = {pytorch.METADATA: json.dumps(header)}
    tensors_by_name.write_safetensors(checkpoint, conversion, path, metadata, beside)


def check_mae_encoder(config: ClassifierConfig, path: epath.PathLike) -> None:
    """Raises `CheckpointError` for an encoder that MAE's own code could not compute."""
    tensors_by_name.refuse_other_conventions(config, mae.CONVENTIONS, "the authors' code", path)
    if reason := mae.refusal(config):
        raise CheckpointError(f"{path} is not written: {reason}")
