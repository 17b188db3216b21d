"""Settings of config fields as text, as on a command line: `optim.lr=3e-4`; and fields that list names."""

import ast
import dataclasses
import operator
import re
from collections.abc import Iterable, Mapping, Sequence

from absl import logging
from ml_collections import ConfigDict

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import converted, is_read, no_such_field, option_type, options, walk
from vit_jax.base.sections import NamedSection, current_name

# Options of earlier versions, and why they are no longer needed.
REMOVED = {"data.mixed_decoders": "all hosts decode images alike"}
_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def change(
    config: ConfigDict, cls: type, settings: Iterable[tuple[str, str]]
) -> dict[str, tuple[object, object]]:
    """Sets fields of a config in place; of two settings of one field the later wins. The names of models and
    objectives are set first, since they decide which options there are.

    Args:
      config: with the fields of `cls`.
      cls: the dataclass that declares them.
      settings: (dotted name, value as text).

    Returns:
      By name: the value before and the new one, where they differ.

    Raises:
      ConfigError: there is no such field, or the text is no value of its type.
    """
    fields = dict(walk(cls))
    initial = {}
    final = {}
    current = [(current_name(name), text) for name, text in settings]
    for name, text in sorted(current, key=lambda pair: not _decides(config, pair[0])):
        if name in REMOVED:
            logging.warning("config.%s=%s is ignored: %s", name, text, REMOVED[name])
            continue
        option = _named_option(config, name) or fields.get(name)
        if option is None:
            raise ConfigError(no_such_field(name, _known(config, fields)))
        value = parse_value(name, text, option)
        *path, field = name.split(".")
        section = config
        for key in path:
            section = section[key]
        initial.setdefault(name, section[field])
        section[field] = value
        final[name] = value
    changed = [name for name in final if initial[name] != final[name]]
    return {name: (initial[name], final[name]) for name in changed}


def _named_section(config: ConfigDict, name: str) -> NamedSection | None:
    section = config.get(name.partition(".")[0])
    return section if isinstance(section, NamedSection) else None


def _decides(config: ConfigDict, name: str) -> bool:
    return name.endswith(".name") and _named_section(config, name) is not None


def _named_option(config: ConfigDict, name: str) -> dataclasses.Field | None:
    section = _named_section(config, name)
    return section.option(name.partition(".")[2]) if section is not None else None


def _known(config: ConfigDict, fields: Iterable[str]) -> list[str]:
    """The names of all fields, including the options of all other models and objectives."""
    known = dict.fromkeys(fields)
    for name, section in config.items():
        if isinstance(section, NamedSection):
            known |= dict.fromkeys(f"{name}.{o.name}" for o in options(section.everything()))
    return list(known)


def without_effect(config: ConfigDict, cls: type, names: Iterable[str]) -> dict[str, str]:
    """The fields among `names` that have no effect with this config: the names of unread fields, each with the values
    of the fields of its section that are the reason.

    Args:
      config: with the fields of `cls`.
      names: dotted; options of models and objectives are checked where these are made.
    """
    fields = dict(walk(cls))
    idle = {}
    for name in names:
        *path, _ = name.split(".")
        section = config[path[0]] if path else config
        if path in (["model"], ["objective"]) or is_read(fields[name], section):
            continue
        others = fields[name].metadata["when"]
        idle[name] = ", ".join(
            f"config.{'.'.join([*path, other])} = {section[other]!r}" for other in others
        )
    return idle


def with_fields(config: ConfigDict, fields: Mapping[str, object]) -> ConfigDict:
    """A copy of a config with values by dotted name.

    Raises:
      ConfigError: a value is of another type than the field.
    """
    config = config.copy_and_resolve_references()
    for name, value in fields.items():
        try:
            config.update_from_flattened_dict({name: value})
        except TypeError as error:
            raise ConfigError(
                f"config.{name} = {value!r} must be of the type of {operator.attrgetter(name)(config)!r}"
            ) from error
    return config


def folder_name(fields: Mapping[str, object]) -> str:
    """The folder of a run with these fields: 'lr=0.1,duration=500_steps'."""
    settings = [f"{name}={value}" for name, value in fields.items()]
    return re.sub(r"[^\w.,=%+-]+", "_", ",".join(settings))


def named_entries(field: str, entries: Sequence) -> list[tuple[str, dict]]:
    """The entries of a field that lists names, such as `eval.evaluators`, each as (name, options).

    Raises:
      ConfigError: an entry is neither NAME nor (NAME, {'OPTION': VALUE}).
    """
    pairs = []
    for entry in entries:
        match (entry, {}) if isinstance(entry, str) else entry:
            case [str(name), Mapping() | ConfigDict() as given]:
                pairs.append((name, dict(given)))
            case _:
                raise ConfigError(
                    f"config.{field}: {entry!r} is neither NAME nor (NAME, {{'OPTION': VALUE}})"
                )
    return pairs


def parse_value(name: str, text: str, field: dataclasses.Field):
    """The value of a field, from text. Bounds and choices are checked later, by `schema.typed`.

    Raises:
      ConfigError: it is no value of the field's type.
    """
    if field.default is None and text == "None":
        return None
    kind = option_type(field.type)
    if kind is str:
        return text
    value = _BOOLS.get(text.lower(), text) if kind is bool else literal(text)
    if kind is tuple and not isinstance(value, tuple | list):
        if value is text and "," in text:
            quoted = tuple(part.strip() for part in text.split(","))
            raise ConfigError(
                f"config.{name} = {text!r} cannot be read; put quotes around each of several texts, as in {quoted}"
            )
        value = (value,) if text else ()
    return converted(f"config.{name}", value, field)


def literal(text: str):
    """The text as a Python literal (a number, a tuple, …), or else the text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError):
        return text
