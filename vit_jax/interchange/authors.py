"""The names that a family has in the PyTorch code of its authors: what `torch.save` wrote, a
`.safetensors` file, or the same tensors in an `.npz` file.
"""

import json

from etils import epath

from vit_jax.interchange import (
    file_header,
    pytorch,
    read_again,
    saved_objectives,
    tensors_by_name,
    timm,
)
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.conversions import clip_names, vit_open_clip
from vit_jax.interchange.formats import LoadedCheckpoint, ReadOptions

NAME = "authors"


def recognises(file: CheckpointFile) -> bool:
    """Whether a family knows the names."""
    return file.container not in ("folder", "") and tensors_by_name.is_found(
        file, NAME, metadata=file_header.in_header(file), prefixes=file.prefixes
    )


def read(file: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """The model of a file with the names of its family's authors."""
    stated = file_header.in_header(file)
    metadata = stated | _open_clip(file) | file_header.requested_metadata(request)
    match = tensors_by_name.find_family(file, NAME, metadata, file.prefixes)
    checkpoint = file_header.with_header(
        tensors_by_name.read_named(file, match, NAME, request, stated), file
    )
    if file.header:
        if stated := file.header.get(clip_names.KEY):
            checkpoint.layout[clip_names.KEY] = stated
        return checkpoint
    conversion = match.conversion.of(checkpoint.model_config)
    prepared = conversion.preprocessing_named(file.path.parts, checkpoint.model_config)
    return file_header.with_preprocessing(checkpoint, prepared)


def _open_clip(file: CheckpointFile) -> dict:
    """What open_clip's config beside a file says of its model, as metadata; {} where there is none."""
    open_clip_json = file.path.parent / "open_clip_config.json"
    if not open_clip_json.exists():
        return {}
    return {vit_open_clip.OPEN_CLIP: pytorch.read_json(open_clip_json).get("model_cfg", {})}


def write(checkpoint: LoadedCheckpoint, path: epath.PathLike) -> None:
    """Writes a `.safetensors` file, with what the objective owns if its authors keep it beside the model.

    Raises:
      CheckpointError: the authors' code has no such model.
    """
    path = epath.Path(path)
    pytorch.refuse_to_pickle(path)
    extra = saved_objectives.beside(checkpoint, NAME, path)
    names = extra.model_format or NAME
    conversion = tensors_by_name.conversion_of(
        checkpoint.model_config, names, path, alone=not extra.rules
    )
    checkpoint = tensors_by_name.expressed(checkpoint, conversion, names)
    if names == timm.NAME:
        header = timm.header_of(checkpoint)
    else:
        options = file_header.options_of_model(checkpoint.model_config)
        header = file_header.header(checkpoint, options)
    header |= extra.stated
    if names == NAME:
        tensors = tensors_by_name.planned(checkpoint, conversion, extra)
        read_again.check(
            checkpoint.model_config, NAME, read, path, "safetensors", tensors, header=header
        )
    metadata = {pytorch.METADATA: json.dumps(header)}
    tensors_by_name.write_safetensors(checkpoint, conversion, path, metadata, extra)
