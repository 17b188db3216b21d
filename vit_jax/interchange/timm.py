"""Checkpoints of timm: state dicts as a file or a folder.

What a file alone cannot tell, such as heads and activation, the families guess unless an override or
config.json says it; files that we write say it in their header.
"""

import dataclasses
import json
import re

from etils import epath

from vit_jax.base.errors import CheckpointError
from vit_jax.base.sizes import height_width
from vit_jax.interchange import answers, file_header, pytorch, read_again, tensors_by_name
from vit_jax.interchange.checkpoint_file import CONFIG, CheckpointFile
from vit_jax.interchange.conversions import vit_arguments, vit_options
from vit_jax.interchange.formats import LoadedCheckpoint, Preprocessing, ReadOptions, how_to_accept
from vit_jax.models import published

NAME = "timm"
# Families of timm that are not read: what the names of tensors of no other have, and why they are no plain ViTs.
_NOT_READ = {
    "ConvNeXt": (
        r"stages\.\d+\.(blocks\.\d+\.conv_dw|\d+\.dwconv)\.weight$", "is of convolutions, without attention",
    ),
    "Hiera": (r"blocks\.\d+\.proj\.weight$", "pools its tokens and widens them from stage to stage"),
    "Swin": (
        r"layers\.\d+\.blocks\.\d+\.attn\.(relative_position_bias_table|cpb_mlp\.0\.weight)$",
        "attends in shifted windows and merges its patches from stage to stage",
    ),
    "MobileCLIP": (r"patch_embed\.backbone\.0\.conv\.weight$", "makes tokens by convolutions with batch norms"),
}  # fmt: skip
_STATED = (*vit_arguments.NOT_IN_TENSORS, "table_corners", "image_size")


def recognises(file: CheckpointFile) -> bool:
    """Whether this is a file of PyTorch, or a folder whose config.json names an architecture of timm."""
    if file.container == "folder":
        return isinstance(file.config.get("architecture"), str)
    pytorch_file = file.container in ("safetensors", "pickle")
    return pytorch_file or file.container == "npz" and tensors_by_name.is_found(file, NAME)


def read(file: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """The model of a file or folder with timm's names."""
    _refuse_other_families(file)
    stated = file_header.in_header(file)
    architecture, tag = published_name(file)
    metadata = {"architecture": architecture, "tag": tag} | _arguments(file.config)
    metadata |= _image_size(file.config) | stated | {"written_here": bool(file.header)}
    match = tensors_by_name.find_family(
        file, NAME, metadata | file_header.requested_metadata(request), file.prefixes
    )
    if match is None:
        vit_options.check_supported(architecture)
        if {"weight", "bias"} == set(file.tensors):
            raise CheckpointError(
                f"{file.path} holds one layer, such as a classifier that was trained on features, and no network: save "
                "both as one file. DINOv3's has the network's names after 'backbone.', the classifier's after "
                "'linear_head.'"
            )
        first = ", ".join(sorted(file.tensors)[:3]) or "nothing"
        raise CheckpointError(
            f"{file.path} holds no model with timm's names, nor with those of the authors of a family: it has "
            f"{first}, …. Of a Hugging Face model give the folder with its config.json; if something stands before the "
            f"names, say {file.path}#prefix=NAME"
        )
    checkpoint = file_header.with_header(
        tensors_by_name.read_named(file, match, NAME, request, stated), file
    )
    if not file.header:
        checkpoint = file_header.with_preprocessing(
            checkpoint, published.preprocessing(architecture, tag)
        )
    if file.config:
        checkpoint.classes = tuple(file.config.get("label_names", ())) or None
        metadata = file.config.get("pretrained_cfg", file.config)
        metadata = published.preprocessing_from(metadata, file.path)
        same = metadata == _as_read(
            checkpoint.preprocessing
        )  # but for the rounding, which timm has not
        checkpoint = file_header.with_preprocessing(
            checkpoint, checkpoint.preprocessing if same else metadata
        )
    if checkpoint.preprocessing and not file.header:
        checkpoint.preprocessing = published.at_size(
            checkpoint.preprocessing, checkpoint.model_config.image_size, file.path
        )
    return checkpoint


def _refuse_other_families(file: CheckpointFile) -> None:
    """Raises `CheckpointError` for a family that has much in common with ViTs, and is not read."""
    for family, (pattern, reason) in _NOT_READ.items():
        if name := next((n for n in file.tensors if re.search(rf"(^|\.){pattern}", n)), ""):
            raise CheckpointError(
                f"{file.path} holds a model of the family {family} (it has {name}), which {reason}: it is not read. "
                "See 'vit_jax models --published' for those that are"
            )


def published_name(file: CheckpointFile) -> tuple[str, str]:
    """The published model that config.json names, or the path: (architecture, tag), '' for what is not known."""
    if architecture := file.config.get("architecture"):
        return architecture, file.config.get("pretrained_cfg", {}).get("tag", "")
    return published.named_in(file.path.parts)


def write(checkpoint: LoadedCheckpoint, path: epath.PathLike) -> None:
    """Writes a `.safetensors` file, or a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    Raises:
      CheckpointError: timm would compute the model with other numbers, or has no such model.
    """
    path = epath.Path(path)
    pytorch.refuse_to_pickle(path)
    conversion = tensors_by_name.conversion_of(checkpoint.model_config, NAME, path)
    again = checkpoint.layout.get("format") == NAME
    checkpoint = tensors_by_name.expressed(checkpoint, conversion, NAME)
    config = checkpoint.model_config
    answers.warn_of_other_code(checkpoint, NAME, path)
    statements = header_of(checkpoint)
    header = {pytorch.METADATA: json.dumps(statements)}
    tensors = tensors_by_name.planned(checkpoint, conversion)
    if path.suffix == ".safetensors":
        # What was such a file can be one again.
        for name, value in {} if again else conversion.file_conventions.items():
            if getattr(config, name, value) != value:
                raise CheckpointError(
                    f"{path} is not written: a file cannot tell timm of the {name} {getattr(config, name)!r}, and it "
                    f"takes {value!r}. Write a folder, whose config.json tells it. "
                    + how_to_accept(name, value)
                )
        read_again.check(config, NAME, read, path, "safetensors", tensors, header=statements)
        tensors_by_name.write_safetensors(checkpoint, conversion, path, header)
        return
    description = _description(checkpoint, *conversion.architecture(config, checkpoint.layout))
    read_again.check(config, NAME, read, path, "folder", tensors, description, statements)
    with pytorch.NewFolder(path) as folder:
        tensors_by_name.write_safetensors(checkpoint, conversion, folder / pytorch.WEIGHTS, header)
        (folder / CONFIG).write_text(json.dumps(description, indent=2))


def header_of(checkpoint: LoadedCheckpoint) -> dict:
    """What a file with timm's names says beside its tensors, see `file_header.header`."""
    known = vars(checkpoint.model_config) | checkpoint.layout
    return file_header.header(checkpoint, {name: known[name] for name in _STATED if name in known})


def _arguments(metadata: dict) -> dict:
    """The arguments of the model's class that a config.json says; how it pools stands beside them."""
    pool = {"global_pool": metadata["global_pool"]} if "global_pool" in metadata else {}
    return pool | metadata.get("model_args", {})


def _image_size(metadata: dict) -> dict:
    """The size of the images that a folder's config.json says."""
    size = metadata.get("model_args", {}).get("img_size")
    pretrained = metadata.get("pretrained_cfg", metadata).get("input_size")
    return file_header.image_size_option(
        size if size is not None else pretrained and pretrained[1:]
    )


def _as_read(prepared: Preprocessing | None) -> Preprocessing | None:
    """What is read of the config.json that we write for `prepared`: timm has but one way to round."""
    if prepared and prepared.eval_crop in ("central", "transformers"):
        return dataclasses.replace(prepared, eval_crop="torchvision")
    return prepared


def _description(checkpoint: LoadedCheckpoint, architecture: str, arguments: dict) -> dict:
    """The config.json of a folder."""
    config = checkpoint.model_config
    prepared = checkpoint.preprocessing
    pretrained = {
        "input_size": [config.channels, *config.height_width],
        "num_classes": config.num_classes,
    }
    if prepared:
        share = min(height_width(prepared.image_size)) / prepared.eval_resize
        pretrained |= {
            "mean": list(prepared.mean),
            "std": list(prepared.std),
            "crop_pct": 1.0 if prepared.eval_crop == "resize" else share,
            "crop_mode": "squash" if prepared.eval_crop in ("resize", "squash") else "center",
            "interpolation": prepared.interpolation,
        }
    description = {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "model_args": arguments,
    }
    if checkpoint.classes:
        description["label_names"] = list(checkpoint.classes)
    return description | {"pretrained_cfg": pretrained}
