"""Writes what other programs know of the config and of options, from the schema that checks them when a program runs:
`vit_jax/annotations.pyi` for type checkers and editors, `vit_jax/commands/completion.json` for shells.

    python tools/generated.py

Tests compare. The options of families and objectives of users are not in it: they are set by `config.model["NAME"]`,
and passed as `**options` of the type `dict[str, Any]`.
"""

import dataclasses
import inspect
import json
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator

from vit_jax import objectives
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import Config, config_class
from vit_jax.export import precision, programs
from vit_jax.export import run as exporting
from vit_jax.interchange import formats, pushing
from vit_jax.models import preprocessing, registry
from vit_jax.prediction import overrides

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "vit_jax"
# Of parameters, by name.
CHOICES = {
    "format": ("", *pushing.FORMATS),
    "normalization": (programs.INSIDE, programs.BESIDE),
    "precision": precision.PRECISIONS,
}
HEAD = """# Made by tools/generated.py from the schema; see annotations.py.
from collections.abc import Sequence
from typing import Any, Literal, Never, TypedDict

from ml_collections import ConfigDict

class _Fields(ConfigDict):
    # No other names: ConfigDict itself takes any.
    def __getattr__(self, attribute: Never) -> Never: ...  # type: ignore
    def __setattr__(self, attribute: Never, value: Never) -> None: ...  # type: ignore

class _Tuple:
    # A list becomes a tuple.
    def __get__(self, section: Any, owner: Any = None) -> tuple[Any, ...]: ...
    def __set__(self, section: Any, value: tuple[Any, ...] | list[Any]) -> None: ...
"""


def main() -> None:
    for path, text in files().items():
        path.write_text(text)
        print(f"{path}: {len(text)} characters")


def files() -> dict[pathlib.Path, str]:
    """What each file has to be."""
    return {
        PACKAGE / "annotations.pyi": annotations(),
        PACKAGE / "commands" / "completion.json": completion(),
    }


def completion() -> str:
    """The fields of the config, each with the values that it may have, where they are few."""
    values: dict[str, list[str]] = {}
    for name, option in schema.walk(config_class()):
        values[name] = [choice for choice in option.metadata["choices"] if choice]
        if schema.option_type(option.type) is bool:
            values[name] = ["True", "False"]
    values["model.name"] = registry.variants()
    values["objective.name"] = list(objectives.OBJECTIVES)
    lines = (f"{json.dumps(name)}: {json.dumps(known)}" for name, known in values.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def annotations() -> str:
    """The stub of `vit_jax.annotations`."""
    every = config_class()
    parts = [HEAD]
    for field in dataclasses.fields(every):
        if "section" in field.metadata:
            parts.append(_section(field))
    parts.append(_class("RunConfig", "_Fields", "A run's config, of recipes.", _run_fields(every)))
    (model,) = (f.metadata["section"] for f in dataclasses.fields(every) if f.name == "model")
    of_model = [option for option in schema.options(model) if option.name != "name"]
    computing = [o for o in of_model if o.name == "dtype" or o.metadata["role"] == "compute"]
    channels = ("channels", "int", "of the images")
    size = ("image_size", "int | str | tuple[int, int]", "pixels of a side, or (height, width)")
    parts += [
        _typed_dict(
            "ModelOptions", "Options of models.", [channels, *_given(of_model)], "TypedDict"
        ),
        _typed_dict("LoadOptions", "Options of models of checkpoints.", [size], "ModelOptions"),
        _typed_dict("ComputeOptions", "How a model is computed.", _given(computing), "TypedDict"),
        _typed_dict(
            "EvaluateFields",
            "Fields of the config that an evaluation reads, their dots as two underscores.",
            _evaluate_fields(every, [o.name for o in computing]),
            "TypedDict",
        ),
        _typed_dict(
            "PreprocessingOptions", "How images are prepared.", _prepared(every), "TypedDict"
        ),
        _typed_dict(
            "ExportOptions", "Options of an export.", _keywords(exporting.export_run), "TypedDict"
        ),
        _typed_dict("PushOptions", "Options of an upload.", _keywords(pushing.push), "TypedDict"),
        f"ModelName = {_literal(registry.variants())}",
        f"CheckpointFormat = {_literal(formats.FORMATS)}",
    ]
    return "\n".join(parts) + "\n"


def _section(field: dataclasses.Field) -> str:
    name = field.name
    title = f"`config.{name}`."
    fields = _options(schema.options(field.metadata["section"]))
    return _class(f"{name.capitalize()}Section", "_Fields", title, fields)


def _run_fields(every: type[Config]) -> Iterator[tuple[str, str, str]]:
    for field in dataclasses.fields(every):
        if "section" in field.metadata:
            yield field.name, f"{field.name.capitalize()}Section", ""
        else:
            yield from _options([field])


def _evaluate_fields(
    every: type[Config], computing: Iterable[str]
) -> Iterator[tuple[str, str, str]]:
    for name, option in schema.walk(every):
        try:
            overrides.check_changes([(name, "")], tuple(computing))
        except ConfigError:
            continue
        (_, kind, doc), *_ = _options([option])
        yield name.replace(".", "__"), kind, doc


def _prepared(every: type[Config]) -> Iterator[tuple[str, str, str]]:
    """The fields of `config.data` that a stored model keeps."""
    kept = {field.name for field in dataclasses.fields(preprocessing.Preprocessing)} - {
        "image_size"
    }
    options = (option for name, option in schema.walk(every) if name.startswith("data."))
    return _options(option for option in options if option.name in kept)


def _keywords(function: Callable) -> Iterator[tuple[str, str, str]]:
    """(name, type, '') of the parameters that have defaults."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            kind = getattr(parameter.annotation, "__name__", "Any")
            yield name, _literal(CHOICES[name]) if name in CHOICES else kind, ""


def _given(fields: Iterable[dataclasses.Field]) -> Iterator[tuple[str, str, str]]:
    """`_options` of a union, whose `None` means "not given"."""
    for name, kind, doc in _options(fields):
        yield name, kind.removesuffix(" | None"), doc


def _options(fields: Iterable[dataclasses.Field]) -> Iterator[tuple[str, str, str]]:
    """(name, type, what it does) of options."""
    for field in fields:
        metadata = field.metadata
        default = metadata.get("usual") if field.default is None else field.default
        doc = metadata["doc"] + ("" if default is None else f" (default: {default!r})")
        yield field.name, _kind(field), doc


def _kind(field: dataclasses.Field) -> str:
    kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else [field.type]
    names = {types.NoneType: "None", tuple: "tuple[Any, ...]", object: "Any"}
    texts = [names.get(kind, getattr(kind, "__name__", "")) for kind in kinds]
    if field.metadata["choices"]:
        texts[texts.index("str")] = _literal(field.metadata["choices"])
    return " | ".join(texts)


def _literal(values: Iterable[str]) -> str:
    return f"Literal[{', '.join(map(repr, values))}]"


def _class(name: str, base: str, doc: str, fields: Iterable[tuple[str, str, str]]) -> str:
    lines = [f"class {name}({base}):", f"    {doc!r}"]
    for field, kind, text in fields:
        is_tuple = kind.startswith("tuple[") and base == "_Fields"
        lines.append(f"    {field}: {'_Tuple' if is_tuple else kind}")
        lines += [f"    {text!r}"] if text else []
    return "\n".join([*lines, ""])


def _typed_dict(name: str, doc: str, fields: Iterable[tuple[str, str, str]], base: str) -> str:
    with_lists = {"tuple[Any, ...]": "tuple[Any, ...] | list[Any]"}
    without_docs = ((field, with_lists.get(kind, kind), "") for field, kind, _ in fields)
    return _class(name, f"{base}, total=False", doc, without_docs)


if __name__ == "__main__":
    main()
