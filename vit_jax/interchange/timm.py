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
from vit_jax.interchange import named, pytorch
from vit_jax.interchange.formats import LoadedCheckpoint, Preprocessing, ReadOptions, how_to_accept
from vit_jax.interchange.opened import CONFIG, CheckpointFile
from vit_jax.models.conversions import published, vit_arguments, vit_options

NAME = "timm"
# Families of timm that are not read, and what the names of tensors of no other have.
_NOT_READ = {
    "BEiT": r"(^|\.)relative_position_bias_table$",
    "CaiT": r"(^|\.)blocks_token_only\.",
    "ConvNeXt": r"(^|\.)stages\.\d+\.(blocks\.\d+\.conv_dw|\d+\.dwconv)\.weight$",
    "NaFlexViT": r"(^|\.)embeds\.proj\.weight$",
}
_STATED = (*vit_arguments.UNTOLD, "image_size")


def recognises(opened: CheckpointFile) -> bool:
    """Whether this is a file of PyTorch, or a folder whose config.json names an architecture of timm."""
    if opened.container == "folder":
        return isinstance(opened.config.get("architecture"), str)
    pytorch_file = opened.container in ("safetensors", "pickle")
    return pytorch_file or opened.container == "npz" and named.is_found(opened, NAME)


def read(opened: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """See `formats`."""
    _refuse_other_families(opened)
    stated = named.in_header(opened)
    architecture, tag = published_name(opened)
    metadata = {"architecture": architecture, "tag": tag} | _arguments(opened.config)
    metadata |= _image_size(opened.config) | stated | {"written_here": bool(opened.header)}
    found = named.find_family(
        opened, NAME, metadata | named.requested_metadata(request), opened.prefixes
    )
    if found is None:
        vit_options.check_supported(architecture)
        first = ", ".join(sorted(opened.tensors)[:3]) or "nothing"
        raise CheckpointError(
            f"{opened.path} holds no model with timm's names, nor with those of the authors of a family: it has "
            f"{first}, …. Of a Hugging Face model give the folder with its config.json"
        )
    foreign = named.with_header(named.read_named(opened, found, NAME, request, stated), opened)
    if not opened.header:
        foreign = named.with_preprocessing(foreign, published.preprocessing(architecture, tag))
    if opened.config:
        foreign.classes = tuple(opened.config.get("label_names", ())) or None
        metadata = opened.config.get("pretrained_cfg", opened.config)
        metadata = published.preprocessing_from(metadata, opened.path)
        same = metadata == _as_read(
            foreign.preprocessing
        )  # but for the rounding, which timm has not
        foreign = named.with_preprocessing(foreign, foreign.preprocessing if same else metadata)
    if foreign.preprocessing and not opened.header:
        foreign.preprocessing = published.at_size(
            foreign.preprocessing, foreign.model_config.image_size, opened.path
        )
    return foreign


def _refuse_other_families(opened: CheckpointFile) -> None:
    """Raises `CheckpointError` for a family that has much in common with ViTs, and is not read."""
    for family, pattern in _NOT_READ.items():
        if name := next((n for n in opened.tensors if re.search(pattern, n)), ""):
            raise CheckpointError(
                f"{opened.path} holds a model of the family {family} (it has {name}), which is not read: see 'vit_jax "
                "models --published' for those that are"
            )


def published_name(opened: CheckpointFile) -> tuple[str, str]:
    """The published model that config.json names, or the path: (architecture, tag), '' for what is not known."""
    if architecture := opened.config.get("architecture"):
        return architecture, opened.config.get("pretrained_cfg", {}).get("tag", "")
    return published.named_in(opened.path.parts)


def write(foreign: LoadedCheckpoint, path: epath.PathLike) -> None:
    """Writes a `.safetensors` file, or a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    Raises:
      CheckpointError: timm would compute the model with other numbers, or has no such model.
    """
    path = epath.Path(path)
    pytorch.refuse_to_pickle(path)
    conversion = named.conversion_of(foreign.model_config, NAME, path)
    again = foreign.layout.get("format") == NAME
    foreign = named.expressed(foreign, conversion, NAME)
    config = foreign.model_config
    header = {pytorch.METADATA: json.dumps(header_of(foreign))}
    if path.suffix == ".safetensors":
        # What was such a file can be one again.
        for name, value in {} if again else conversion.file_conventions.items():
            if getattr(config, name, value) != value:
                raise CheckpointError(
                    f"{path} is not written: a file cannot tell timm of the {name} {getattr(config, name)!r}, and it "
                    f"takes {value!r}. Write a folder, whose config.json tells it. "
                    + how_to_accept(name, value)
                )
        named.write_safetensors(foreign, conversion, path, header)
        return
    description = _description(foreign, *conversion.architecture(config, foreign.layout))
    with pytorch.NewFolder(path) as folder:
        named.write_safetensors(foreign, conversion, folder / pytorch.WEIGHTS, header)
        (folder / CONFIG).write_text(json.dumps(description, indent=2))


def header_of(foreign: LoadedCheckpoint) -> dict:
    """What a file with timm's names says beside its tensors, see `named.header`."""
    known = vars(foreign.model_config) | foreign.layout
    return named.header(foreign, {name: known[name] for name in _STATED if name in known})


def _arguments(metadata: dict) -> dict:
    """The arguments of the model's class that a config.json says; how it pools stands beside them."""
    pool = {"global_pool": metadata["global_pool"]} if "global_pool" in metadata else {}
    return pool | metadata.get("model_args", {})


def _image_size(metadata: dict) -> dict:
    """The size of the images that a folder's config.json says."""
    size = metadata.get("model_args", {}).get("img_size")
    pretrained = metadata.get("pretrained_cfg", metadata).get("input_size")
    return named.image_size_option(size if size is not None else pretrained and pretrained[1:])


def _as_read(prepared: Preprocessing | None) -> Preprocessing | None:
    """What is read of the config.json that we write for `prepared`: timm has but one way to round."""
    if prepared and prepared.eval_crop in ("central", "transformers"):
        return dataclasses.replace(prepared, eval_crop="torchvision")
    return prepared


def _description(foreign: LoadedCheckpoint, architecture: str, arguments: dict) -> dict:
    """The config.json of a folder."""
    config = foreign.model_config
    prepared = foreign.preprocessing
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
    if foreign.classes:
        description["label_names"] = list(foreign.classes)
    return description | {"pretrained_cfg": pretrained}
