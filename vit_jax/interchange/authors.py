"""The names that a family has in the PyTorch code of its authors: what `torch.save` wrote, a
`.safetensors` file, or the same tensors in an `.npz` file.
"""

import dataclasses
import json

from etils import epath

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import named, pytorch, timm
from vit_jax.interchange.formats import LoadedCheckpoint, ReadOptions
from vit_jax.interchange.opened import CheckpointFile
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.objectives import mae_conversion

NAME = "authors"


def recognises(opened: CheckpointFile) -> bool:
    """Whether a family knows the names."""
    return opened.container not in ("folder", "") and named.is_found(
        opened, NAME, metadata=named.in_header(opened), prefixes=opened.prefixes
    )


def read(opened: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """See `formats`."""
    stated = named.in_header(opened)
    found = named.find_family(
        opened, NAME, stated | named.requested_metadata(request), opened.prefixes
    )
    foreign = named.with_header(named.read_named(opened, found, NAME, request, stated), opened)
    if opened.header:
        return foreign
    conversion = found.conversion.of(foreign.model_config)
    prepared = conversion.preprocessing_named(opened.path.parts, foreign.model_config)
    return named.with_preprocessing(foreign, prepared)


def write(foreign: LoadedCheckpoint, path: epath.PathLike) -> None:
    """Writes a `.safetensors` file. MAE's authors have timm's names for the encoder, and the decoder beside it.

    Raises:
      CheckpointError: the authors' code has no such model.
    """
    path = epath.Path(path)
    pytorch.refuse_to_pickle(path)
    if decoder := mae_conversion.decoder_in(foreign):
        check_mae_encoder(foreign.model_config, path)
        conversion = named.conversion_of(foreign.model_config, timm.NAME, path)
        foreign = named.expressed(foreign, conversion, timm.NAME)
        decoder_options = {mae_conversion.LAYOUT: dataclasses.asdict(decoder.options)}
        header = timm.header_of(foreign) | decoder_options
        beside = decoder.beside(timm.NAME)
    else:
        conversion = named.conversion_of(foreign.model_config, NAME, path)
        foreign = named.expressed(foreign, conversion, NAME)
        header = named.header(foreign, named.options_of_model(foreign.model_config))
        beside = ((), {})
    metadata = {pytorch.METADATA: json.dumps(header)}
    named.write_safetensors(foreign, conversion, path, metadata, beside)


def check_mae_encoder(config: ClassifierConfig, path: epath.PathLike) -> None:
    """Raises `CheckpointError` for an encoder that MAE's own code could not compute."""
    named.refuse_other_conventions(config, mae_conversion.CONVENTIONS, "the authors' code", path)
    if reason := mae_conversion.refusal(config):
        raise CheckpointError(f"{path} is not written: {reason}")
