"""Folders of Hugging Face `transformers`, as `save_pretrained` writes them, and their files of weights alone.

`config.json` says what the model is, `model.safetensors` has the tensors,
`preprocessor_config.json` says how images are prepared. The families say which classes of theirs
are which models of ours.
"""

import dataclasses
import json
import math
import re

from absl import logging
from etils import epath

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.base.sizes import Size, height_width
from vit_jax.interchange import (
    answers,
    file_header,
    pytorch,
    read_again,
    saved_objectives,
    tensors_by_name,
)
from vit_jax.interchange.checkpoint_file import CONFIG, PROCESSOR, CheckpointFile
from vit_jax.interchange.formats import LoadedCheckpoint, Preprocessing, ReadOptions

NAME = "huggingface"
_KIND = "image_processor_type"
_OURS = "vit_jax"  # in config.json, what transformers has no name for
_MULTI_LABEL = "multi_label_classification"
_PROBLEMS = ("single_label_classification", _MULTI_LABEL, "regression")
_FILTERS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_USUAL = {
    "image_mean": (0.5,) * 3,
    "image_std": (0.5,) * 3,
    "do_center_crop": False,
    "size": 256,
    "resample": 2,
}
_CROPPING = {"do_center_crop": True, "resample": 3}
_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "size": {"shortest_edge": 224},
}
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
# The processors that are known: where each differs from ViT's.
_OF_PROCESSORS = {
    "ViT": {},
    "DeiT": _CROPPING,
    "Bit": _CROPPING | _CLIP,
    "CLIP": _CROPPING | _CLIP,
    "Siglip": {"resample": 3},
    "DINOv3ViT": _IMAGENET,
    "EfficientNet": {"resample": 3},
    "Beit": {"resample": 3, "size": 224},
    "Tipsv2": {"do_normalize": False, "size": 448},
}
# Networks that normalise images by themselves, after their processor, with these numbers.
_NORMALISING = {"radio": {name: _CLIP[name] for name in ("image_mean", "image_std")}}
# Which of them a file that names none is for, by the beginning of config.json's `model_type`; else ViT's.
_OF_MODELS = {
    "deit": "DeiT",
    "dinov2": "Bit",
    "dinov3": "DINOv3ViT",
    "siglip2": "Siglip2",
    "siglip": "Siglip",
    "clip": "CLIP",
    "aimv2": "CLIP",
    "beit": "Beit",
    "data2vec": "Beit",
    "tipsv2": "Tipsv2",
    "bit": "Bit",
    "efficientnet": "EfficientNet",
    "radio": "CLIP",
}


def recognises(file: CheckpointFile) -> bool:
    """Whether this is a folder whose config.json names a model of a family, or a file with a family's names."""
    if file.container == "folder":
        is_theirs = "model_type" in file.config
        return is_theirs and tensors_by_name.is_found(file, NAME, metadata=file.config)
    pytorch_file = file.container in ("safetensors", "pickle")
    return pytorch_file and tensors_by_name.is_found(file, NAME, prefixes=file.prefixes)


def read(file: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """The model of a folder of `transformers`; `layout` keeps `config.json` too."""
    path = file.path / PROCESSOR
    processor = _filled(file, path) if path.exists() else {}
    # Networks that take images of any size leave it to what prepares these.
    cut = _cut_size(processor) if processor and processor[_KIND] in _OF_PROCESSORS else {}
    metadata = file.config | {"processor_size": cut.get("image_size")}
    metadata |= file_header.requested_metadata(request)
    match = tensors_by_name.find_family(file, NAME, metadata, file.prefixes)
    checkpoint = tensors_by_name.read_named(file, match, NAME, request, {})
    config = checkpoint.model_config
    if processor:
        stated = _preprocessing(processor, config.image_size, path)
        checkpoint = dataclasses.replace(
            file_header.with_preprocessing(checkpoint, stated), preprocessing=stated
        )
    checkpoint.classes = _classes(file.config, config.num_classes)
    checkpoint.probabilities = _probabilities(file)
    stated = file.config.get(_OURS, {}).get(answers.KEY, {})
    checkpoint.settings = answers.known_settings(stated, file.path)
    if file.config:
        checkpoint.layout["config"] = file.config
    return checkpoint


def write(checkpoint: LoadedCheckpoint, path: epath.PathLike) -> None:
    """Writes a new folder for `from_pretrained`; of a checkpoint with MAE's decoder, for ViTMAEForPreTraining.

    Raises:
      CheckpointError: transformers has no such model.
    """
    path = epath.Path(path)
    layout = checkpoint.layout
    as_it_was = layout.get("format") == NAME and "kind" in layout
    conversion = tensors_by_name.conversion_of(
        checkpoint.model_config, NAME, path, as_it_was=as_it_was
    )
    extra = saved_objectives.beside(checkpoint, NAME, path)
    checkpoint = tensors_by_name.expressed(checkpoint, conversion, NAME)
    config = checkpoint.model_config
    # What config.json says of the model; the rest of one that was read stays.
    described = checkpoint.layout.get("config", {}) | {"dtype": "float32"}
    described |= conversion.config_json(config, checkpoint.layout)
    described |= extra.stated
    described.pop(_OURS, None)
    if checkpoint.settings:
        described[_OURS] = {answers.KEY: checkpoint.settings}
        answers.warn_of_other_code(checkpoint, "transformers", path)
    if not as_it_was:
        checkpoint.layout |= extra.layout
    if config.num_classes:
        names = checkpoint.classes or [f"LABEL_{i}" for i in range(config.num_classes)]
        described["id2label"] = {str(i): name for i, name in enumerate(names)}
        described["label2id"] = {name: i for i, name in enumerate(names)}
        if checkpoint.probabilities == "sigmoid":
            described["problem_type"] = _MULTI_LABEL
    processor = checkpoint.preprocessing and _processor(checkpoint.preprocessing, path)
    if processor and described["model_type"] in _NORMALISING:
        normalised = {name: tuple(processor[name]) for name in ("image_mean", "image_std")}
        if normalised != _NORMALISING[described["model_type"]]:
            raise CheckpointError(
                f"{path} is not written: a {described['model_type']} of transformers normalises images by itself, by "
                f"other numbers than this model's {normalised}"
            )
        processor["do_normalize"] = False
    tensors = tensors_by_name.planned(checkpoint, conversion, extra)
    read_again.check(config, NAME, read, path, "folder", tensors, described)
    with pytorch.NewFolder(path) as folder:
        tensors_by_name.write_safetensors(
            checkpoint, conversion, folder / pytorch.WEIGHTS, {}, extra
        )
        (folder / CONFIG).write_text(json.dumps(described, indent=2))
        if processor:
            (folder / PROCESSOR).write_text(json.dumps(processor, indent=2))


def _classes(metadata: dict, count: int) -> tuple[str, ...] | None:
    """The label names, unless they are mere placeholders."""
    names = {int(index): name for index, name in (metadata.get("id2label") or {}).items()}
    given = sorted(names) == list(range(count))
    if not count or not given or all(re.fullmatch(r"LABEL_\d+", n) for n in names.values()):
        return None
    return tuple(names[i] for i in range(count))


def _probabilities(file: CheckpointFile) -> str:
    """The function from logits to probabilities, by config.json; '' where it does not say it."""
    problem = file.config.get("problem_type")
    if problem not in (None, *_PROBLEMS):
        raise CheckpointError(
            f"{file.path / CONFIG} says problem_type = {problem!r}, which transformers does not know: set it to one of "
            f"{', '.join(_PROBLEMS)}, or remove it"
        )
    if problem == "regression":
        logging.warning(
            "%s says problem_type = regression: its outputs are numbers, and not the logits of classes, of which "
            "probabilities are made here", file.path / CONFIG,
        )  # fmt: skip
    return "sigmoid" if problem == _MULTI_LABEL else ""


def _preprocessing(metadata: dict, image_size: Size, path: epath.Path) -> Preprocessing | None:
    """What preprocessor_config.json says, older and newer, see `_filled`; `None`, with a warning, for what we cannot
    do.
    """
    if problem := _unsupported(metadata):
        logging.warning(
            "%s says %s: how images are prepared is taken as unknown; set it with --config.data.mean, std, eval_crop, "
            "eval_resize and interpolation",
            path, problem,
        )  # fmt: skip
        return None
    filter, (mean, std) = _FILTERS[metadata["resample"]], _normalization(metadata)
    if not metadata["do_center_crop"]:
        return Preprocessing(image_size, tuple(mean), tuple(std), "resize", interpolation=filter)
    size, crop = metadata["size"], "squash" if metadata[_KIND] == "DeiT" else "transformers"
    if isinstance(size, dict):
        crop = "transformers" if "shortest_edge" in size else "squash"
        size = size.get("shortest_edge") or min(size["height"], size["width"])
    cut = _cut_size(metadata).get("image_size", image_size)
    if cut != image_size:
        wanted, actual = (min(height_width(size_of)) for size_of in (image_size, cut))
        size = round(size * wanted / actual)
        logging.warning(
            "%s cuts images of %s pixels, and the model is for %s: they are resized to %d, in proportion, and "
            "cut to that", path, sizes.size_text(cut), sizes.size_text(image_size), size,
        )  # fmt: skip
    return Preprocessing(image_size, tuple(mean), tuple(std), crop, size, filter)


def _unsupported(metadata: dict) -> str:
    """What of a processor we cannot do, and what we can; '' if there is nothing."""
    if metadata[_KIND] not in _OF_PROCESSORS:
        known = ", ".join(f"{kind}ImageProcessor" for kind in _OF_PROCESSORS)
        return f"{_KIND} = {metadata[_KIND]}ImageProcessor, which is not supported ({known} are)"
    if not metadata.get("do_resize", True):
        return "do_resize = false, which is not supported"
    if metadata["resample"] not in _FILTERS:
        return (
            f"resample = {metadata['resample']}, which is not supported (resample is 2, bilinear, or 3, "
            "bicubic)"
        )
    mean, std = _normalization(metadata)
    if not all(0 <= x <= 1 for x in mean) or not all(0 < x <= 1 for x in std):
        return (
            "rescale_factor, rescale_offset, image_mean and image_std that subtract "
            f"{', '.join(f'{x:.4g}' for x in mean)} from pixels in [0, 1] and divide by "
            f"{', '.join(f'{x:.4g}' for x in std)}, where only numbers from 0 to 1 are supported"
        )
    return ""


def _normalization(metadata: dict) -> tuple[list[float], list[float]]:
    """Mean and deviation of pixels in [0, 1], from those of pixels times `rescale_factor`.

    EfficientNet's processor alone subtracts 1 before that with `rescale_offset`, and for a network with a head divides
    by the deviations once more: its files have the roots.
    """
    mean, std = list(metadata["image_mean"]), list(metadata["image_std"])
    its_own = metadata[_KIND] == "EfficientNet"
    again = std if its_own and metadata.get("include_top", True) else [1.0] * len(std)
    if metadata.get("do_normalize") is False:
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    std = [x * y for x, y in zip(std, again, strict=True)]
    factor = metadata.get("rescale_factor", 1 / 255) if metadata.get("do_rescale", True) else 1.0
    offset = 1.0 if its_own and metadata.get("rescale_offset") else 0.0
    scale = 255 * factor
    if math.isclose(scale, 1) and not offset:  # no rounding where nothing changes
        return mean, std
    return [(x + offset) / scale for x in mean], [x / scale for x in std]


def _filled(file: CheckpointFile, path: epath.Path) -> dict:
    """What preprocessor_config.json says; what it leaves out is as its processor has it, whose name, ViT, DeiT, …, is
    in `_KIND`.
    """
    metadata = pytorch.read_json(path)
    name = metadata.get(_KIND) or metadata.get("feature_extractor_type") or ""
    kind = re.sub("(ImageProcessor|FeatureExtractor).*", "", name)
    if not kind:
        model = file.config.get("model_type", "")
        kind = next((kind for start, kind in _OF_MODELS.items() if model.startswith(start)), "ViT")
    stated = metadata | {_KIND: kind}
    if own := _NORMALISING.get(file.config.get("model_type", "")):
        stated |= own | {"do_normalize": True}
    return _USUAL | _OF_PROCESSORS.get(kind, {}) | stated


def _cut_size(metadata: dict) -> dict[str, Size]:
    """The size of the images that a processor gives, if it says one: `image_size`."""
    size = metadata.get("crop_size" if metadata.get("do_center_crop") else "size")
    if isinstance(size, dict):
        size = size.get("shortest_edge") or [size["height"], size["width"]]
    return file_header.image_size_option(size)


def _processor(preprocessing: Preprocessing, path: epath.PathLike) -> dict:
    """preprocessor_config.json."""
    height, width = height_width(preprocessing.image_size)
    size = {"height": height, "width": width}
    common = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
        "resample": 3 if preprocessing.interpolation == "bicubic" else 2,
        "rescale_factor": 1 / 255,
    }
    if preprocessing.eval_crop == "resize":
        return common | {"image_processor_type": "ViTImageProcessor", "size": size}
    if height != width:
        raise CheckpointError(
            f"{path} is not written: transformers' processors cut only squares out of the middle of images; "
            "to have them resized there, set --config.data.eval_crop=resize"
        )
    if preprocessing.eval_crop == "squash":
        side = preprocessing.eval_resize
        return common | {
            "image_processor_type": "DeiTImageProcessor",
            "size": {"height": side, "width": side},
            "do_center_crop": True,
            "crop_size": size,
        }
    # ViT's processor cannot crop.
    return common | {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": preprocessing.eval_resize},
        "do_center_crop": True,
        "crop_size": size,
    }
