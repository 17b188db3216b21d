"""The formats of checkpoints, and what a checkpoint is whatever its format.

A format is a module, or an object of one, with

- `recognises(file) -> bool`: whether it can read what is there; looks at little and never runs
  code;
- `read(file, request) -> LoadedCheckpoint`: the file's own model;
- `write(checkpoint, path) -> None`: whole or not at all.

`file` is a `checkpoint_file.CheckpointFile`, `request` is a `ReadOptions`. The families say which tensors of a format
are which parameters.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax.base import outputs, places, schema, sizes
from vit_jax.base.errors import CheckpointError, ConfigError, UserError, reason
from vit_jax.base.schema import nearest
from vit_jax.checkpoints import reading, storage
from vit_jax.data.augmentation import augment
from vit_jax.interchange import checkpoint_file, remote, script_folders
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.interchange.regular import check_regular
from vit_jax.models import classifier, naming, registry
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.objectives.contract import SavedObjective

# Asked in this order.
FORMATS = {
    "orbax": "vit_jax.interchange.orbax",
    "peft": "vit_jax.interchange.peft",
    "official": "vit_jax.interchange.flax_models:OFFICIAL",
    "big_vision": "vit_jax.interchange.flax_models:BIG_VISION",
    "huggingface": "vit_jax.interchange.huggingface",
    "authors": "vit_jax.interchange.authors",
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
class ReadOptions:
    """What the caller says about a checkpoint's model.

    Attributes:
      overrides: options of its config, where what is recognised is to be another.
      hints: options of the model that the weights are for, taken where the file leaves them open.
      allow_nonfinite: whether its tensors may have NaNs and infinities.
    """

    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hints: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    allow_nonfinite: bool = False


@dataclasses.dataclass(frozen=True)
class Unmerged:
    """The adapters that were added to the parameters of a `LoadedCheckpoint`.

    Attributes:
      adapters: nested dict, see `models.lora`.
      also: names of the parameters that were trained beside them.
      base: where the model without them is.
    """

    adapters: dict
    also: tuple[str, ...]
    base: str


class SavedRun(NamedTuple):
    """Which checkpoint of a run it is, and what that says of itself."""

    folder: epath.Path
    description: dict


@dataclasses.dataclass
class LoadedCheckpoint:
    """A checkpoint of any format.

    Attributes:
      model_config: the family's config, with the activation, epsilon and other conventions of the
        code the weights come from.
      params: nested dict like `registry.abstract(model_config)[1]`; leaves are arrays or
        `LazyArray` ones, so use `np.asarray`.
      classes: label names in the order of the logits, where the source says them.
      preprocessing: of images, where the source says it or its code has only one.
      variables: what is not trained, such as running statistics; like `params`.
      extras: tensors of the file that are no part of the model, by their names. What an objective owns among them
        is handed on, see `interchange.saved_objectives`.
      layout: `format`, and what else is needed to write the same names and bytes again; plain JSON.
      called: what a run calls its model.
      assumed: what no file contains, so that usual values were taken: options of the model, and
        'preprocessing' where it is that of the format's code.
      adapters: of a run that trained adapters these, which `params` contain already.
      objective: of a run, what its objective owns, if it owns something.
      run: the run's checkpoint, of ours.
      source: what it was read from.
      probabilities: the function from logits to them, 'softmax' or 'sigmoid'; '' where the source does not say it.
      settings: what else answers depend on, as options of a run's config by dotted name, see `answers`.
    """

    model_config: classifier.ClassifierConfig
    params: dict
    classes: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    layout: dict = dataclasses.field(default_factory=dict)
    variables: dict = dataclasses.field(default_factory=dict)
    extras: dict = dataclasses.field(default_factory=dict)
    called: str = ""
    assumed: tuple[str, ...] = ()
    adapters: Unmerged | None = None
    objective: SavedObjective | None = None
    run: SavedRun | None = None
    source: str = ""
    probabilities: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def probabilities_of(checkpoint: LoadedCheckpoint) -> str:
    """The function from a checkpoint's logits to probabilities: 'softmax' or 'sigmoid'. Where the source says neither,
    one logit alone is a sigmoid's: its softmax would be 1, whatever the image.
    """
    if checkpoint.probabilities:
        return checkpoint.probabilities
    return "sigmoid" if checkpoint.model_config.num_classes == 1 else "softmax"


# What comes of a description whose values have other types than any code wrote.
_SENSELESS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def module(name: str) -> Any:
    """What has the `recognises`, `read` and `write` of a format, by its name."""
    if name not in FORMATS:
        raise ConfigError(f"unknown checkpoint format {name!r}{nearest(name, FORMATS)}")
    place, _, part = FORMATS[name].partition(":")
    imported = importlib.import_module(place)
    return getattr(imported, part) if part else imported


def detect(path: epath.PathLike) -> str:
    """The name of the format of what is at `path`.

    Raises:
      CheckpointError: nothing is there, it is damaged, or no format recognises it.
    """
    return _detect(_open(path))


def read_checkpoint(
    path: epath.PathLike,
    *,
    hints: Mapping[str, Any] | None = None,
    allow_nonfinite: bool = False,
    **overrides,
) -> LoadedCheckpoint:
    """What is at `path`, in whatever format.

    Args:
      path: file or directory, local, `gs://`, `hf://` or `https://`, see `remote`.
      hints: options of the model that the weights are for: taken where the file leaves them open.
      allow_nonfinite: whether the tensors may have NaNs and infinities.
      **overrides: options of the model's config, where what is recognised is to be another.

    Raises:
      CheckpointError: see `detect`; or the tensors are not those of a model of the family. Bad
        numbers are reported when they are read.
      ConfigError: an override is no option of the family.
    """
    file = _open(path)
    request = ReadOptions(overrides, {} if hints is None else hints, allow_nonfinite)
    try:
        checkpoint = module(_detect(file)).read(file, request)
        checkpoint.source = str(path)
        return checkpoint
    except UserError:
        checkpoint_file.forget()  # what was refused may be mended in place
        raise
    except _SENSELESS as error:
        checkpoint_file.forget()
        raise CheckpointError(
            f"{path} is damaged: what it says about its model makes no sense "
            f"({type(error).__name__}: {reason(error)})"
        ) from error


def _open(path: epath.PathLike) -> checkpoint_file.CheckpointFile:
    name = remote.parse_name(path)
    path = reading.resolve_name(remote.locate(name))
    if not path.exists():
        hint = places.nearest_existing(path) or remote.nearest_published(name.place)
        raise CheckpointError(f"{path} does not exist{hint}")
    check_regular(path)
    if path.is_file() and path.stat().length == 0:
        raise CheckpointError(f"{path} is empty (an interrupted download?)")
    path = script_folders.newest_checkpoint(path)
    return checkpoint_file.open_once(path, name.selection)


def _detect(file: checkpoint_file.CheckpointFile) -> str:
    for name in FORMATS:
        if module(name).recognises(file):
            return name
    if file.container == "folder" and reading.has_begun(file.path):
        raise CheckpointError(reading.no_checkpoint_yet(file.path))
    raise CheckpointError(
        f"{file.path} is no checkpoint of a known format ({', '.join(FORMATS)}): {_looks_like(file)}"
    )


def write_checkpoint(checkpoint: LoadedCheckpoint, path: epath.PathLike, to: str) -> None:
    """Writes a checkpoint in the format `to`.

    Raises:
      CheckpointError: the format cannot express the model, or the file cannot be written; then
        nothing is left behind.
      ConfigError: see `to_write`.
    """
    module(to).write(checkpoint, to_write(path, to))


def to_write(path: epath.PathLike, to: str) -> epath.Path:
    """The file or folder that a checkpoint is written to in the format `to`.

    Raises:
      ConfigError: it is neither local nor in a bucket, or nothing can be written there, or not in this format.
    """
    if remote.is_remote(path):
        raise ConfigError(f"{path} cannot be written to: name a file or folder, and upload that")
    target = storage.locate_to_save(path) if to == "orbax" else places.locate(path)
    if not places.in_bucket(target):
        outputs.check_replaceable(target, str(path))
    return target


def preprocessing_with(
    checkpoint: LoadedCheckpoint, values: Mapping[str, Any], source: epath.PathLike
) -> Preprocessing:
    """The preprocessing of a checkpoint, with the given fields in place of its own.

    Raises:
      ConfigError: a field is none of `Preprocessing`, or neither `source` nor `values` has one without
        which images cannot be normalised.
    """
    own = vars(checkpoint.preprocessing) if checkpoint.preprocessing else {"mean": (), "std": ()}
    known = {"mean", "std", "eval_crop", "eval_resize", "interpolation"}
    for name in values:
        if name not in known:
            raise ConfigError(f"preprocessing has no field {name!r}{nearest(name, known)}")
    preprocessing = Preprocessing(
        **{"image_size": checkpoint.model_config.image_size} | own | dict(values)
    )
    augment.check_normalization(preprocessing, source)
    return preprocessing


def configure(
    config_class: type, recognised: Mapping[str, Any], overrides: Mapping[str, Any]
) -> classifier.ClassifierConfig:
    """The config of a checkpoint's model: what was recognised, unless the user says otherwise.

    Raises:
      ConfigError: an override is no option of the family, or sizes do not fit together.
    """
    overrides = dict(overrides)
    data = {name: overrides.pop(name) for name in ("image_size", "channels") if name in overrides}
    if "image_size" in data:
        data["image_size"] = sizes.parse(data["image_size"])
    recognised = {**recognised, **data}
    family = registry.family_name(next(f for f in registry.families() if f.Config is config_class))
    return config_class(
        **recognised | schema.checked_options(config_class, overrides, f"a {family} model", "")
    )


def how_to_accept(option: str, value: object) -> str:
    """Advice for a model that a format's code would compute with another value of an option."""
    return (
        f"To accept the other numbers, set --model={option}={value} on the command line, or "
        f"convert(…, {option}={value!r}) in Python"
    )


def describe_model(
    config: classifier.ClassifierConfig, called: str = "", *, of_pixels: int = 0
) -> str:
    """A model in words: 'ViT-B/16, 86,567,656 parameters, images of 224 pixels, 1,000 classes'; see `naming`. One that
    segments has as many classes `of_pixels`.
    """
    classes = f", {config.num_classes:,} classes" if config.num_classes else ", no head"
    classes = f", {of_pixels} classes of pixels" if of_pixels else classes
    return (
        f"{naming.full_name(config, called)}, {registry.count_parameters(config):,} parameters, images of "
        f"{sizes.size_text(config.image_size)} pixels{classes}"
    )


def _looks_like(file: checkpoint_file.CheckpointFile) -> str:
    if file.container == "folder" and "model_type" in file.config:
        config, known = file.config, []
        classes = ", ".join(config.get("architectures") or ())
        for family in registry.families():
            conversion = conversions_of(family).get("huggingface")
            known += conversion.model_types if conversion else ()
        return (
            f"its config.json says that it is a {config['model_type']} ({classes}) of transformers; "
            f"supported are {', '.join(known)}"
        )
    if file.container == "folder":
        held = sorted(entry.name for entry in file.path.iterdir())[:5]
        return f"a folder with {', '.join(held)}" if held else "an empty folder"
    if file.path.suffix == ".onnx":
        return (
            "it is ONNX. If 'vit_jax export' wrote it, 'vit_jax predict' takes it; other commands take the checkpoint "
            "that it was made of"
        )
    for magic, description in _MAGIC.items():
        if file.head.startswith(magic):
            return f"it is {description}"
    return f"it begins with {file.head[:8]!r}"
