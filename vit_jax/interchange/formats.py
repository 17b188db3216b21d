"""The formats of checkpoints, and what a checkpoint is whatever its format.

A format is a module with

- `recognises(path) -> bool`: whether it can read what is there; looks at little and never runs
  code;
- `read(path, **overrides) -> Foreign`: the file's own model; `overrides` are options of its config
  that the user states;
- `write(foreign, path) -> None`: whole or not at all;
- `CANNOT_TELL`: names of options that its files leave open, which are taken from the model they are
  loaded into.
"""

import dataclasses
import importlib
from types import ModuleType
from typing import Any

from etils import epath

from vit_jax.base import paths, schema, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.checkpoints.reading import CheckpointError
from vit_jax.models import registry

# Asked in this order.
FORMATS = {
    "orbax": "vit_jax.interchange.orbax",
    "official": "vit_jax.interchange.official",
    "big_vision": "vit_jax.interchange.big_vision",
    "huggingface": "vit_jax.interchange.huggingface",
    "timm": "vit_jax.interchange.timm",
}
_MAGIC = {
    b"\x89HDF": "an HDF5 file (Keras?)",
    b"\x80": "a Python pickle, which could run code (an old PyTorch file?)",
    b"PK\3\4": "a zip archive whose names no format here uses (other arrays?)",
    b"\x93NUMPY": "a single NumPy array",
    b"<": "a web page (was the download refused?)",
    b"version https://git-lfs": "a Git LFS pointer: fetch the file itself",
    b"\x1f\x8b": "a gzip archive: unpack it first",
}


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images are prepared for the model; names and meanings as in `config.data`."""

    image_size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    eval_crop: str = "resize"
    eval_resize: int = 256


@dataclasses.dataclass
class Foreign:
    """A checkpoint of any format.

    Attributes:
      model_config: the family's config, with the activation, epsilon and other conventions of the
        code the weights come from.
      params: nested dict like `registry.abstract(model_config)[1]`; leaves are arrays or
        `rules.Lazy` ones, so use `np.asarray`.
      classes: label names in the order of the logits, where the source says them.
      preprocessing: of images, where the source says it or its code has only one.
      variables: what is not trained, such as running statistics; like `params`.
      layout: `format`, and what else is needed to write the same names and bytes again; plain JSON.
    """

    model_config: Any
    params: dict
    classes: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    layout: dict = dataclasses.field(default_factory=dict)
    variables: dict = dataclasses.field(default_factory=dict)


def module(name: str) -> ModuleType:
    """The module of a format by its name."""
    if name not in FORMATS:
        raise ConfigError(f"unknown checkpoint format {name!r}{nearest(name, FORMATS)}")
    return importlib.import_module(FORMATS[name])


def detect(path) -> str:
    """The name of the format of what is at `path`.

    Raises:
      CheckpointError: nothing is there, it is damaged, or no format recognises it.
    """
    path = paths.locate(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file() and path.stat().length == 0:
        raise CheckpointError(f"{path} is empty (an interrupted download?)")
    for name in FORMATS:
        if module(name).recognises(path):
            return name
    raise CheckpointError(
        f"{path} is no checkpoint of a known format ({', '.join(FORMATS)}): {_looks_like(path)}"
    )


def read(path, *, like=None, **overrides) -> Foreign:
    """What is at `path`, in whatever format.

    Args:
      path: file or directory, local or `gs://`.
      like: a family's config that says what the file cannot.
      **overrides: options of the model's config, where what is recognised is to be another.

    Raises:
      CheckpointError: see `detect`; or the tensors are not those of a model of the family.
      ConfigError: an override is no option of the family.
    """
    path = paths.locate(path)
    format = module(detect(path))
    open_options = {name: getattr(like, name) for name in format.CANNOT_TELL if hasattr(like, name)}
    return format.read(path, **open_options | overrides)


def write(foreign: Foreign, path, to: str) -> None:
    """Writes a checkpoint in the format `to`.

    Raises:
      CheckpointError: the format cannot express the model, or the file cannot be written; then
        nothing is left behind.
    """
    module(to).write(foreign, paths.locate(path))


def configure(config_class: type, recognised: dict, overrides: dict):
    """The config of a checkpoint's model: what was recognised, unless the user says otherwise.

    Raises:
      ConfigError: an override is no option of the family, or sizes do not fit together.
    """
    if "image_size" in overrides:
        recognised = recognised | {"image_size": sizes.parse(overrides.pop("image_size"))}
    family = config_class.__module__.split(".")[-1]
    return config_class(
        **recognised | schema.said(config_class, overrides, f"a {family} model", "")
    )


def how_to_accept(option: str, value) -> str:
    """What to do where a format's code would compute a model with another value of an option."""
    return (
        f"To accept the other numbers, say --model={option}={value} on the command line, or "
        f"convert(…, {option}={value!r}) in Python"
    )


def model_name(config) -> str:
    """The listed name that says most of a model; its options say the rest."""
    family = next(family for family in registry.FAMILIES if family.Config is type(config))

    def agreement(name: str) -> tuple[int, int]:
        options = family.options_from_name(name)
        agrees = [getattr(config, option) == value for option, value in options.items()]
        return sum(agrees) - len(agrees), sum(agrees)

    return max(family.VARIANTS, key=agreement)


def describe(config) -> str:
    """A model in words: 'ViT-B/16, 86,567,656 parameters, images of 224 pixels, 1,000 classes'."""
    classes = f", {config.num_classes:,} classes" if config.num_classes else ", no head"
    return (
        f"{model_name(config)}, {registry.count_parameters(config):,} parameters, images of "
        f"{sizes.text(config.image_size)} pixels{classes}"
    )


def _looks_like(path: epath.Path) -> str:
    if path.is_dir():
        held = sorted(entry.name for entry in path.iterdir())[:5]
        return f"a directory of {', '.join(held) or 'nothing'}"
    with path.open("rb") as file:
        head = file.read(32)
    for magic, description in _MAGIC.items():
        if head.startswith(magic):
            return f"it is {description}"
    return f"it begins with {head[:8]!r}"
