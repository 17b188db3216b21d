"""Folders of Hugging Face `transformers`, as `save_pretrained` writes them.

`config.json` says what the model is, `model.safetensors` has the tensors,
`preprocessor_config.json` says how images are prepared. The families say which classes of theirs
are which models of ours.
"""

import json
import re

from etils import epath

from vit_jax.base.errors import CheckpointError
from vit_jax.base.sizes import Size, height_width
from vit_jax.interchange import named, pytorch
from vit_jax.interchange.formats import Foreign, Preprocessing, Wishes
from vit_jax.interchange.opened import CONFIG, Opened

NAME = "huggingface"
PROCESSOR = "preprocessor_config.json"
# For a network with a head, these divide by the deviations once more: their files have the roots.
_DIVIDING_TWICE = ("EfficientNetImageProcessor", "EfficientNetImageProcessorFast")


def recognises(opened: Opened) -> bool:
    """Whether this is a folder whose config.json names a model of a family."""
    return "model_type" in opened.config and named.is_found(opened, NAME, said=opened.config)


def read(opened: Opened, wishes: Wishes) -> Foreign:
    """See `formats`; `layout` keeps `config.json` too."""
    found = named.find(opened, NAME, opened.config | named.said(wishes))
    foreign = named.read(opened, found, NAME, wishes, {})
    config, processor = foreign.model_config, opened.path / PROCESSOR
    if processor.exists():
        foreign.preprocessing = _preprocessing(pytorch.read_json(processor), config.image_size)
    foreign.classes = _classes(opened.config, config.num_classes)
    foreign.layout["config"] = opened.config
    return foreign


def write(foreign: Foreign, path: epath.PathLike) -> None:
    """Writes a new folder for `from_pretrained`.

    Raises:
      CheckpointError: transformers has no such model.
    """
    path = epath.Path(path)
    conversion = named.conversion_of(foreign.model_config, NAME, path)
    foreign = named.expressed(foreign, conversion, NAME)
    config = foreign.model_config
    # What config.json says of the model; the rest of one that was read stays.
    described = foreign.layout.get("config", {}) | {"dtype": "float32"}
    described |= conversion.config_json(config)
    if config.num_classes:
        names = foreign.classes or [f"LABEL_{i}" for i in range(config.num_classes)]
        described["id2label"] = {str(i): name for i, name in enumerate(names)}
        described["label2id"] = {name: i for i, name in enumerate(names)}
    processor = foreign.preprocessing and _processor(foreign.preprocessing, path)
    with pytorch.NewFolder(path) as folder:
        named.write_safetensors(foreign, conversion, folder / pytorch.WEIGHTS, {})
        (folder / CONFIG).write_text(json.dumps(described, indent=2))
        if processor:
            (folder / PROCESSOR).write_text(json.dumps(processor, indent=2))


def _classes(said: dict, count: int) -> tuple[str, ...] | None:
    """The label names, unless they are mere placeholders."""
    names = {int(index): name for index, name in (said.get("id2label") or {}).items()}
    given = sorted(names) == list(range(count))
    if not count or not given or all(re.fullmatch(r"LABEL_\d+", n) for n in names.values()):
        return None
    return tuple(names[i] for i in range(count))


def _preprocessing(said: dict, image_size: Size) -> Preprocessing:
    """What preprocessor_config.json says, older and newer."""
    mean, std = said.get("image_mean", (0.5,) * 3), said.get("image_std", (0.5,) * 3)
    if said.get("do_normalize") is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    if said.get("image_processor_type") in _DIVIDING_TWICE and said.get("include_top", True):
        std = [x * x for x in std]
    if not said.get("do_center_crop"):
        return Preprocessing(image_size, tuple(mean), tuple(std), "resize")
    size = said.get("size", 256)
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size["height"]
    return Preprocessing(image_size, tuple(mean), tuple(std), "central", size)


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
        "resample": 2,
        "rescale_factor": 1 / 255,
    }
    if preprocessing.eval_crop == "resize":
        return common | {"image_processor_type": "ViTImageProcessor", "size": size}
    if height != width:
        raise CheckpointError(
            f"{path} is not written: transformers' processors cut only squares out of the middle of images; "
            "to have them resized there, say --config.data.eval_crop=resize"
        )
    # ViT's processor cannot crop.
    return common | {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": preprocessing.eval_resize},
        "do_center_crop": True,
        "crop_size": size,
    }
