"""How options are declared, turned into an `ml_collections` config, listed and checked.

An option is a dataclass field made with `option`. A dataclass of options becomes a section of the
config; a dataclass that holds sections becomes the config. What the options are is said where they
belong: `vit_jax/config.py`, the model families, the objectives.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator

from ml_collections import ConfigDict, config_dict

from vit_jax.base.errors import ConfigError


def option(default, doc: str, *, choices: Iterable[str] = (), minimum: float | None = None):
    """A dataclass field that is a config option.

    Args:
      default: its value when nothing is said; `None` with an annotation `T | None` means "not
        said".
      doc: one line for the user.
      choices: the valid values, where they are few and named.
      minimum: the smallest valid number.
    """
    return dataclasses.field(
        default=default, metadata={"doc": doc, "choices": tuple(choices), "minimum": minimum}
    )


def section(cls):
    """A dataclass field that is a section of options, `cls` being the dataclass that declares them."""
    return dataclasses.field(default_factory=cls, metadata={"section": cls})


def union(name: str, base: type, *classes: type) -> type:
    """A dataclass with the options of `base`, and those of all `classes`, none of the latter said
    (`None`).

    So a section such as `config.model` takes the options of every family, and each family keeps its
    own defaults. Fields that are not options (made without `option`) are left out: the code fills
    them.
    """
    fields = {field.name: (field.name, field.type, field) for field in dataclasses.fields(base)}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in (f for f in dataclasses.fields(cls) if "doc" in f.metadata):
            kind = hints[field.name] | None
            if field.name in fields and fields[field.name][1] != kind:
                raise TypeError(f"option {field.name!r} of {cls} has another type elsewhere")
            metadata = field.metadata | {"usual": field.default}
            fields[field.name] = (
                field.name,
                kind,
                dataclasses.field(default=None, metadata=metadata),
            )
    return dataclasses.make_dataclass(name, fields.values())


def to_config(cls: type) -> ConfigDict:
    """The config with every default of `cls`, its sections as nested configs; locked, so that
    unknown names are errors.
    """
    config = ConfigDict()
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "section" in field.metadata:
            config[field.name] = to_config(field.metadata["section"])
        elif field.default is None:
            config[field.name] = config_dict.placeholder(_said_type(hints[field.name]))
        else:
            config[field.name] = field.default
    return config.lock()


def fill(config: ConfigDict, saved: dict) -> ConfigDict:
    """`config` with the values of a saved one, read back from JSON, which knows no tuples."""
    for name, value in saved.items():
        if isinstance(value, dict):
            fill(config[name], value)
        elif name in config:
            config[name] = _tuples(value)
    return config


def options_said(config: ConfigDict) -> dict:
    """The options of a `union` section that were said, as plain keyword arguments."""
    return {name: value for name, value in config.items() if value is not None}


def walk(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Every option of `cls` and its sections with its dotted name, in reading order."""
    for field in dataclasses.fields(cls):
        if "section" in field.metadata:
            yield from walk(field.metadata["section"], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def describe(cls: type) -> str:
    """Every option with its default and what it does, a line each."""
    lines = []
    for name, field in walk(cls):
        choices = f" ({', '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        usual = field.metadata.get("usual", field.default)
        lines.append(f"  --config.{name}={usual!r}\n      {field.metadata['doc']}{choices}")
    return "\n".join(lines)


def check(config: ConfigDict, cls: type, prefix: str = "") -> None:
    """Raises `ConfigError` unless `config` has just the fields of `cls`, each with a valid value."""
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name in config:
        if name not in known:
            raise ConfigError(f"config has no field {prefix}{name}{nearest(name, known)}")
    for name, field in known.items():
        if name not in config:
            raise ConfigError(
                f"config lacks the field {prefix}{name}: start from vit_jax.config.default_config()"
            )
        if "section" in field.metadata:
            check(config[name], field.metadata["section"], f"{prefix}{name}.")
        elif config[name] is not None:
            check_value(prefix + name, config[name], field)


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean …?' for a mistyped name, or the list of what there is."""
    known = [str(k) for k in known]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def check_value(name: str, value, field: dataclasses.Field) -> None:
    """Raises `ConfigError` unless `value` is one that the option `field` takes."""
    choices, minimum = field.metadata.get("choices"), field.metadata.get("minimum")
    if choices and value not in choices:
        raise ConfigError(
            f"config.{name} = {value!r} is not one of {', '.join(choices)}{nearest(str(value), choices)}"
        )
    if minimum is not None and value < minimum:
        raise ConfigError(f"config.{name} = {value!r} must be at least {minimum}")


def _said_type(kind) -> type:
    """`int` of `int | None`."""
    if isinstance(kind, types.UnionType):
        (kind,) = [k for k in typing.get_args(kind) if k is not types.NoneType]
    return kind


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
