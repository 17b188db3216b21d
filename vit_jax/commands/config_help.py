"""What `--help` prints of the config: the fields that a recipe reads, with the recipe's values."""

import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator

from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base import schema
from vit_jax.config import Config, config_class
from vit_jax.models import registry

WIDTH = 160  # of the longest line
_COLUMN = 44  # where documentation begins
# A family's options fill more than a screen, and most recipes set none of the second part.
_STRUCTURE = ("structure", "convention")


@dataclasses.dataclass(frozen=True)
class Entry:
    """An option as it is printed.

    Attributes:
      name: dotted, 'optim.lr'.
      value: the one that applies.
      doc: what it does, with its choices.
    """

    name: str
    value: object
    doc: str


def config_help(config: ConfigDict, *, everything: bool = False, width: int = WIDTH) -> str:
    """The fields of a config by section, each with its value and what it does.

    Args:
      config: of a recipe, or the default one.
      everything: also the fields that this config does not read: those of other model families,
        objectives, optimizers and schedules.
      width: of the longest line, in characters.
    """
    parts = [
        f"{title}\n{_lines(entries, width)}" for title, entries in _sections(config, everything)
    ]
    if not everything:
        parts.append(
            "More fields belong to other models, objectives and optimizers, to published weights, or to what is "
            "switched off here: --help all"
        )
    return "\n\n".join(parts)


def _sections(config: ConfigDict, everything: bool) -> Iterator[tuple[str, list[Entry]]]:
    """(title, entries) of each part that fits on a screen."""
    cls = config_class() if everything else config_class(config)
    top = [field for field in dataclasses.fields(cls) if "section" not in field.metadata]
    top = [field for field in top if everything or schema.is_read(field, config)]
    yield "The run", [_entry("", field, config[field.name]) for field in top]
    for field in dataclasses.fields(cls):
        section = field.metadata.get("section")
        if section is None:
            continue
        name, values = field.name, config[field.name]
        if name == "model" and not everything:
            yield from _model(values)
        elif name == "objective" and not everything:
            yield _objective(values)
        else:
            options = [
                o for o in schema.options(section) if everything or schema.is_read(o, values)
            ]
            entries = [_entry(f"{name}.", option, values[option.name]) for option in options]
            yield f"config.{name}: {_purpose(Config, name)}", entries


def _model(values: ConfigDict) -> Iterator[tuple[str, list[Entry]]]:
    """The options of the family that the config names, with what the name says of them; if the checkpoint
    to start from decides which family that is, those that are set.
    """
    if not values.name:
        options = dict(schema.walk(config_class({"model": values})))
        given = [
            _entry("model.", options[f"model.{n}"], v) for n, v in values.items() if v is not None
        ]
        yield "config.model: that of the checkpoint to start from", given
        return
    family = registry.family_named(values.name)
    by_name = family.options_from_name(values.name)
    applies = {"num_classes": ""} | by_name | schema.given_options(values)
    name, options = schema.options(registry.Name)[0], schema.options(family.Config)
    options = [o for o in options if not _is_hidden(o, applies)]
    entries = [_entry("model.", o, applies.get(o.name, o.default)) for o in options]
    in_structure = [o.metadata["role"] in _STRUCTURE for o in options]
    title = f"config.model: {values.name}, of the family {registry.family_name(family)!r}: "
    rest = [entry for entry, other in zip(entries, in_structure, strict=True) if not other]
    yield title + "size, training and computation", [_entry("model.", name, values.name), *rest]
    if any(in_structure):
        structure = list(itertools.compress(entries, in_structure))
        yield title + "structure and conventions", structure


def _is_hidden(option: dataclasses.Field, applies: dict) -> bool:
    """Whether an option is for published weights alone, and has its default."""
    value = applies.get(option.name, option.default)
    return option.metadata["published"] and value == option.default


def _objective(values: ConfigDict) -> tuple[str, list[Entry]]:
    """The options of the objective that the config names."""
    _, options = objectives.find_objective(values)
    entries = [_entry("objective.", schema.options(objectives.Name)[0], values.name)]
    for option in schema.options(type(options)):
        entries.append(_entry("objective.", option, getattr(options, option.name)))
    return f"config.objective: {values.name}", entries


def _entry(prefix: str, field: dataclasses.Field, value: object) -> Entry:
    value = field.metadata.get("usual") if value is None else value
    doc, choices = field.metadata["doc"], field.metadata["choices"]
    if not set(choices) <= set(re.findall(r"\w+", doc)):
        doc += f" ({', '.join(filter(None, choices))})"
    return Entry(prefix + field.name, value, doc)


def _purpose(cls: type, name: str) -> str:
    """The first sentence of a section's documentation."""
    declared = {field.name: field.metadata.get("section") for field in dataclasses.fields(cls)}
    return " ".join(inspect.getdoc(declared[name]).split()).partition(". ")[0].rstrip(".")


def _quoted(value: object) -> str:
    """A value as a shell takes it; '' for none."""
    text = "" if value is None else str(value)
    if re.fullmatch(r"[\w./:=,+%-]*", text):
        return text
    return f'"{text}"' if "'" in text else f"'{text}'"


def _lines(entries: list[Entry], width: int) -> str:
    """A table of two columns; a value that is too long for the first one has its own line."""
    lines = []
    for entry in entries:
        setting = f"  --config.{entry.name}={_quoted(entry.value)}"
        doc = textwrap.wrap(entry.doc, width - _COLUMN - 2)
        if len(setting) <= _COLUMN:
            lines.append(f"{setting:<{_COLUMN}}  {doc.pop(0)}")
        else:
            lines += textwrap.wrap(setting, width, subsequent_indent="      ")
        lines += [" " * (_COLUMN + 2) + line for line in doc]
    return "\n".join(lines)
