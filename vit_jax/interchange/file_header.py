"""What our files say of a model beside its tensors: options, classes, how images are prepared."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.base import schema, sizes
from vit_jax.base.sizes import Size
from vit_jax.interchange import answers
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.formats import LoadedCheckpoint, Preprocessing, ReadOptions
from vit_jax.models import classifier

_BESIDE_OPTIONS = ("classes", "preprocessing", "decoder", "probabilities", answers.KEY)


def requested_metadata(request: ReadOptions) -> dict[str, Any]:
    """What the user asked for, as `Conversion.recognise` takes it."""
    asked_size = image_size_option(request.overrides.get("image_size"))
    wanted = request.hints.get("image_size")
    return asked_size | ({} if wanted is None else {"wanted_size": sizes.parse(wanted)})


def image_size_option(size: Size | str | list[int] | None) -> dict[str, Any]:
    """`image_size` for `Conversion.recognise`, if one is given."""
    return {} if size is None else {"image_size": sizes.parse(size)}


def header(checkpoint: LoadedCheckpoint, options: Mapping[str, Any]) -> dict[str, Any]:
    """What our files say about the model beside the tensors; JSON."""
    content = dict(options)
    if checkpoint.classes:
        content["classes"] = list(checkpoint.classes)
    if checkpoint.preprocessing:
        content["preprocessing"] = vars(checkpoint.preprocessing)
    if checkpoint.probabilities:
        content["probabilities"] = checkpoint.probabilities
    if checkpoint.settings:
        content[answers.KEY] = checkpoint.settings
    return content


def in_header(file: CheckpointFile) -> dict[str, Any]:
    """The options of the model that `header` gave."""
    options = {n: _tuples(x) for n, x in file.header.items() if n not in _BESIDE_OPTIONS}
    return options | image_size_option(options.get("image_size"))


def with_header(checkpoint: LoadedCheckpoint, file: CheckpointFile) -> LoadedCheckpoint:
    """The model with what `header` gave beside its options."""
    classes, prepared, decoder, probabilities, settings = map(file.header.get, _BESIDE_OPTIONS)
    checkpoint = with_preprocessing(checkpoint, preprocessing_of(prepared) if prepared else None)
    return dataclasses.replace(
        checkpoint,
        layout=checkpoint.layout | ({"decoder": decoder} if decoder else {}),
        classes=tuple(classes) if classes else None,
        probabilities=probabilities or "",
        settings=answers.known_settings(settings or {}, file.path),
    )


def preprocessing_of(metadata: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing in a JSON object, which has lists for tuples."""
    fields = {name: _tuples(value) for name, value in metadata.items()}
    return Preprocessing(**fields | image_size_option(fields["image_size"]))


def preprocessing_in(data: Mapping[str, Any] | ConfigDict) -> Preprocessing | None:
    """The preprocessing that the section `config.data` states, if it has a mean and a deviation."""
    stated = {field.name: data[field.name] for field in dataclasses.fields(Preprocessing)}
    return preprocessing_of(stated) if stated["mean"] and stated["std"] else None


def options_of_model(config: classifier.ClassifierConfig) -> dict[str, Any]:
    """All options of what a model is, for a `header`."""
    names = schema.with_role(type(config), "size", "structure", "convention")
    return {name: getattr(config, name) for name in ("image_size", *names)}


def with_preprocessing(
    checkpoint: LoadedCheckpoint, stated: Preprocessing | None
) -> LoadedCheckpoint:
    """The checkpoint, its images prepared as its file or published name states, if it does."""
    if stated is None:
        return checkpoint
    assumed = tuple(name for name in checkpoint.assumed if name != "preprocessing")
    return dataclasses.replace(checkpoint, preprocessing=stated, assumed=assumed)


def _tuples(value):
    return tuple(value) if isinstance(value, list) else value
