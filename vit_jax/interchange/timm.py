"""Checkpoints of timm: state dicts as a file or a folder.

What a file alone cannot tell, such as heads and activation, the families guess unless an override or
config.json says it; files that we write say it in their header.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from absl import logging
from etils import epath

from vit_jax.base.errors import CheckpointError
from vit_jax.base.sizes import height_width
from vit_jax.interchange import named, pytorch
from vit_jax.interchange.formats import Foreign, Preprocessing, Wishes, how_to_accept
from vit_jax.interchange.opened import CONFIG, Opened

NAME = "timm"
_CROPS = {"center": "torchvision", "squash": "squash"}  # `crop_mode` -> `eval_crop`
_STATED = ("heads", "activation", "epsilon", "image_size")


def recognises(opened: Opened) -> bool:
    """Whether this is a file of PyTorch, or a folder whose config.json names an architecture of timm."""
    if opened.container == "folder":
        return isinstance(opened.config.get("architecture"), str)
    pytorch_file = opened.container in ("safetensors", "pickle")
    return pytorch_file or opened.container == "npz" and named.is_found(opened, NAME)


def read(opened: Opened, wishes: Wishes) -> Foreign:
    """See `formats`."""
    stated = named.in_header(opened)
    architecture = {n: opened.config[n] for n in ("architecture",) if n in opened.config}
    said = architecture | opened.config.get("model_args", {}) | _image_size(opened.config) | stated
    found = named.find(opened, NAME, said | named.said(wishes), opened.prefixes)
    if found is None:
        first = ", ".join(sorted(opened.tensors)[:3]) or "nothing"
        raise CheckpointError(
            f"{opened.path} holds no model with timm's names, nor with those of the authors of a family: it has "
            f"{first}, …. Of a Hugging Face model give the folder with its config.json"
        )
    foreign = named.with_header(named.read(opened, found, NAME, wishes, stated), opened)
    if opened.config:
        foreign.classes = tuple(opened.config.get("label_names", ())) or None
        said = preprocessing_of(opened.config.get("pretrained_cfg", opened.config), opened.path)
        if said != _as_read(foreign.preprocessing):
            foreign.preprocessing = said or foreign.preprocessing
    return foreign


def write(foreign: Foreign, path: epath.PathLike) -> None:
    """Writes a `.safetensors` file, or a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    Raises:
      CheckpointError: timm would compute the model with other numbers, or has no such model.
    """
    path = epath.Path(path)
    pytorch.refuse_to_pickle(path)
    conversion = named.conversion_of(foreign.model_config, NAME, path)
    foreign = named.expressed(foreign, conversion, NAME)
    config = foreign.model_config
    options = {name: getattr(config, name) for name in _STATED if hasattr(config, name)}
    header = {pytorch.METADATA: json.dumps(named.header(foreign, options))}
    if path.suffix == ".safetensors":
        for name, value in conversion.file_conventions.items():
            if getattr(config, name, value) != value:
                raise CheckpointError(
                    f"{path} is not written: a file cannot tell timm of the {name} {getattr(config, name)!r}, and it "
                    f"takes {value!r}. Write a folder, whose config.json tells it. "
                    + how_to_accept(name, value)
                )
        named.write_safetensors(foreign, conversion, path, header)
        return
    description = _description(foreign, *conversion.architecture(config))
    with pytorch.NewFolder(path) as folder:
        named.write_safetensors(foreign, conversion, folder / pytorch.WEIGHTS, header)
        (folder / CONFIG).write_text(json.dumps(description, indent=2))


def _image_size(said: dict) -> dict:
    """The size of the images that a folder's config.json says."""
    size = said.get("model_args", {}).get("img_size")
    pretrained = said.get("pretrained_cfg", said).get("input_size")
    return named.said_size(size if size is not None else pretrained and pretrained[1:])


def preprocessing_of(said: Mapping[str, Any], source: epath.PathLike) -> Preprocessing | None:
    """What a `pretrained_cfg` of timm says of images; fields that it leaves out are timm's own. `None`
    if it says nothing, or, with a warning, what we cannot do.
    """
    if not {"mean", "std", "input_size"} <= said.keys():
        return None
    interpolation, mode = said.get("interpolation", "bicubic"), said.get("crop_mode", "center")
    if interpolation not in ("bilinear", "bicubic") or mode not in _CROPS:
        logging.warning(
            "%s says of its images interpolation %r and crop_mode %r, which are not supported",
            source, interpolation, mode,
        )  # fmt: skip
        return None
    size = named.said_size(said["input_size"][1:])["image_size"]
    share, smaller = said.get("crop_pct", 0.875), min(height_width(size))
    crop = "resize" if mode == "squash" and share == 1 else _CROPS[mode]
    # Rounded down as in timm, plus a margin for rounding in our own division.
    side = 256 if crop == "resize" else math.floor(smaller / share + 1e-6)
    return Preprocessing(size, tuple(said["mean"]), tuple(said["std"]), crop, side, interpolation)


def _as_read(prepared: Preprocessing | None) -> Preprocessing | None:
    """What `preprocessing_of` makes of the config.json that we write for `prepared`: timm has but
    one way to round.
    """
    if prepared and prepared.eval_crop in ("central", "transformers"):
        return dataclasses.replace(prepared, eval_crop="torchvision")
    return prepared


def _description(foreign: Foreign, architecture: str, arguments: dict) -> dict:
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
