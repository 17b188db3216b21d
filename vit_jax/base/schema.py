"""How options are declared, turned into an `ml_collections` config, listed, checked and typed.

An option is a dataclass field made with `option`. A dataclass of options becomes a section of the
config; a dataclass that holds sections becomes the config. Recipes and flags change a `ConfigDict`;
once it is checked, code gets the frozen dataclass. The options themselves are declared where they
belong: `vit_jax/config.py`, the model families, the objectives, the evaluators.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict, config_dict

from vit_jax.base.errors import ConfigError

C = TypeVar("C", bound=ConfigDict)
_ABSENT = object()
_COMPARISONS = {
    "minimum": ("must be at least", lambda value, bound: value >= bound),
    "maximum": ("must be at most", lambda value, bound: value <= bound),
    "above": ("must be above", lambda value, bound: value > bound),
    "below": ("must be below", lambda value, bound: value < bound),
}


def option(
    default: Any,
    doc: str,
    *,
    choices: Iterable[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    length: int | tuple[int, ...] | None = None,
    parse: Callable | None = None,
    role: str = "",
    fitted: bool = False,
    may_change: bool = False,
    published: bool = False,
    when: Mapping[str, Iterable[str] | Callable[[str], bool]] | None = None,
):
    """A dataclass field that is a config option.

    Args:
      default: its value where none is given; `None` with an annotation `T | None` means "not
        given".
      doc: one line for the user.
      choices: the valid values, where they are few and named; of a table its names, those too that are added later.
      minimum, maximum, above, below: bounds of a number, or of each number in a tuple.
      length: how many values a tuple has; several numbers where it may have any of them.
      parse: (value, name) -> the value that code gets; raises `ConfigError` for a wrong one.
      role: of a model's option, what it is for: 'size', of the body's parameters; 'structure', what
        the parameters are used for; 'convention', what they compute without a change of shape;
        'compute', how, with the same results up to rounding; '' for what belongs to training. Of an option beside the
        model: 'answers', the answers of a trained model depend on it, so that files of every format carry it.
      fitted: whether parameters of another value can be fitted to this one (interpolated, or
        re-initialised).
      may_change: whether a resumed run may have another value: it does not change what is learned.
      published: whether only published weights need other values, which their conversions set;
        `--help` lists it only where it has one.
      when: the values that other options of its section must have for it to be read, or a function
        that says whether one is such a value, by their names; `--help` lists it only then.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    # A table of names may get further ones.
    metadata["choices"] = choices if isinstance(choices, Mapping) else tuple(choices)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls, *, may_change: bool = False, kind: type[ConfigDict] | None = None):
    """A dataclass field that is a section of options, `cls` being the dataclass that declares them.

    Args:
      may_change: whether a resumed run may have other values: they do not change what is learned.
      kind: the class of the section in a config, if it has its own.
    """
    metadata = {"section": cls, "may_change": may_change, "kind": kind}
    return dataclasses.field(default_factory=cls, metadata=metadata)


def union(name: str, base: type, *classes: type) -> type:
    """A frozen dataclass with the options of `base`, and those of all `classes`, all of the latter
    unset (`None`).

    So a section such as `config.model` takes the options of every family, and each family keeps its
    own defaults. Options of the same name may differ in type, choices and bounds: a value is
    checked by the class that takes it. Fields that are not options (made without `option`) are left
    out: the code fills them.
    """
    fields = {field.name: (field.name, field.type, field) for field in dataclasses.fields(base)}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in options(cls):
            kind, metadata = hints[field.name] | None, field.metadata | {"usual": field.default}
            if field.name in fields:
                _, other, known = fields[field.name]
                if known.default is not None:
                    raise TypeError(f"{base} has the option {field.name!r} of {cls} already")
                kind = kind if kind == other else object
                metadata = _either(known.metadata, metadata)
            declared = dataclasses.field(default=None, metadata=metadata)
            fields[field.name] = (field.name, kind, declared)
    return dataclasses.make_dataclass(name, fields.values(), frozen=True)


def options(cls: type) -> list[dataclasses.Field]:
    """The fields of a dataclass that are options."""
    return [field for field in dataclasses.fields(cls) if "doc" in field.metadata]


def with_role(cls: type, *roles: str) -> list[str]:
    """The names of the options of a dataclass that have one of these roles."""
    return [field.name for field in options(cls) if field.metadata["role"] in roles]


def may_change(cls: type, prefix: str = "") -> Iterator[str]:
    """The dotted names of the options that a resumed run may change."""
    for field in dataclasses.fields(cls):
        name, part = prefix + field.name, field.metadata.get("section")
        if part and field.metadata["may_change"]:
            yield from (name for name, _ in walk(part, f"{name}."))
        elif part:
            yield from may_change(part, f"{name}.")
        elif field.metadata["may_change"] or field.metadata["role"] == "compute":
            yield name


def to_config(
    cls: type, kind: type[ConfigDict] = ConfigDict, section_kind: type[ConfigDict] = ConfigDict
) -> ConfigDict:
    """The config with every default of `cls`, its sections as nested configs; locked, so that
    unknown names are errors.

    Args:
      kind: what the outermost is.
      section_kind: what sections are, if they have no class of their own.
    """
    config = kind()
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        value_type = option_type(hints[field.name])
        if "section" in field.metadata:
            of_section = field.metadata["kind"] or section_kind
            config[field.name] = to_config(field.metadata["section"], of_section, section_kind)
        elif field.default is None:
            config[field.name] = config_dict.placeholder(value_type)
        elif value_type is object:
            config[field.name] = config_dict.FieldReference(field.default, field_type=object)
        else:
            config[field.name] = field.default
    return config.lock()


def fill(config: C, saved: dict) -> C:
    """`config` with the values of a saved one, read back from JSON, which knows no tuples; fields
    that the saved one lacks keep their default, and those that no longer exist are skipped. A name comes first:
    it decides which other options there are.
    """
    for name, value in sorted(saved.items(), key=lambda item: item[0] != "name"):
        if name not in config and (value is None or config.get(name, _ABSENT) is _ABSENT):
            continue
        if isinstance(value, dict):
            fill(config[name], value)
        else:
            config[name] = _tuples(value)
    return config


def given_options(config: object) -> dict:
    """The options of a `union` section that are set, as plain keyword arguments."""
    items = config.items() if isinstance(config, ConfigDict) else vars(config).items()
    return {name: value for name, value in items if value is not None}


def walk(cls: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Every option of `cls` and its sections with its dotted name, in the order of declaration."""
    for field in dataclasses.fields(cls):
        if "section" in field.metadata:
            yield from walk(field.metadata["section"], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def flat(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by dotted name; `prefix`, with its dot, stands before each name."""
    leaves = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


def is_read(field: dataclasses.Field, section: object) -> bool:
    """Whether code reads an option, where the section has these values; see `when` of `option`."""
    when = field.metadata.get("when") or {}
    return all(
        values(getattr(section, name)) if callable(values) else getattr(section, name) in values
        for name, values in when.items()
    )


def check_fields(cls: type, config: ConfigDict, prefix: str = "") -> None:
    """Raises `ConfigError` unless the config has the fields of `cls`, whatever their values; those that need
    not be given may be missing.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name in config:
        if name not in known:
            raise ConfigError(f"config has no field {prefix}{name}{nearest(name, known)}")
    for name, field in known.items():
        is_section = "section" in field.metadata
        if name not in config and field.default is None:
            continue
        if name not in config or is_section and not isinstance(config[name], ConfigDict):
            what = "section" if is_section else "field"
            raise ConfigError(f"config lacks the {what} {prefix}{name}")
        if is_section:
            check_fields(field.metadata["section"], config[name], f"{prefix}{name}.")


def typed(cls: type, config: ConfigDict):
    """The config as an instance of the dataclass that declares it.

    Raises:
      ConfigError: a field is missing, unknown, of another type, or has an invalid value.
    """
    check_fields(cls, config)
    return _typed(cls, config, "")


def _typed(cls: type, config: ConfigDict, prefix: str):
    values = {}
    for field in dataclasses.fields(cls):
        name, value = prefix + field.name, config.get(field.name)
        if "section" in field.metadata:
            value = _typed(field.metadata["section"], value, f"{name}.")
        elif value is not None or field.default is not None:
            value = checked(f"config.{name}", value, field)
        values[field.name] = value
    return cls(**values)


def checked_options(cls: type, values: dict, where: str, prefix: str) -> dict:
    """The values given for options of a dataclass, checked.

    Args:
      values: by name.
      where: what has the options, for messages: 'objective supervised'.
      prefix: before the name of an option, for messages: 'config.objective.'.

    Options of earlier versions that `cls.removed` lists are skipped if they have the value that it gives.

    Raises:
      ConfigError: one of them is not an option of the class, or has an invalid value.
    """
    known, removed = {field.name: field for field in options(cls)}, getattr(cls, "removed", {})
    values = {n: v for n, v in values.items() if n not in removed or v != removed[n]}
    for name in values:
        if name in removed:
            raise ConfigError(
                f"{where} has {name} = {values[name]!r}, but only {removed[name]!r} is still supported"
            )
        if name not in known:
            raise ConfigError(f"{where} has no option {name!r}{nearest(name, known)}")
    return {name: checked(prefix + name, value, known[name]) for name, value in values.items()}


_NAMED = 30  # of what is known
# What PyTorch's libraries call it.
_ELSEWHERE = {
    "in_chans": "channels", "img_size": "image_size", "embed_dim": "width", "num_heads": "heads",
    "patch_size": "patch", "drop_path_rate": "drop_path", "drop_rate": "dropout", "global_pool": "pool",
    "learning_rate": "lr",
    "pretrained": "init_from", "resnet50": "BiT-R50x1", "resnet101": "BiT-R101x1", "resnet152": "BiT-R152x2",
}  # fmt: skip


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean …?' for a mistyped name, see `likeliest`, or what there is, of a long list the beginning."""
    known = [str(k) for k in known]
    if close := likeliest(name, known):
        return f"; did you mean {close!r}?"
    return f"; known: {', '.join(known[:_NAMED])}{' …' if len(known) > _NAMED else ''}"


def likeliest(name: str, known: Iterable[str], alike: float = 0.5) -> str:
    """The name that is most likely meant by a mistyped one; '' if none is so much `alike`, of 1. Neither case nor
    punctuation has to be right, and some names of other libraries are understood.
    """
    known = list(known)
    if elsewhere := _ELSEWHERE.get(name.rpartition(".")[2]):
        fields = (k for k in known if k.rpartition(".")[2] == elsewhere)
        return next(fields, elsewhere)
    same = [k for k in known if _plain(k) == _plain(name)]
    # Short words are alike by chance: muon, lion.
    cutoff = 0.6 if len(name) < 5 and name.isalpha() else alike
    close = same or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return close[0] if close else ""


def no_such_field(name: str, known: Iterable[str], where: str = "config") -> str:
    """The message for a field that `where` does not have: `known` are the dotted names of those that it has."""
    known = list(known)
    inside = [field for field in known if field.startswith(f"{name}.")]
    if inside:
        return f"config.{name} is a section: set one of its fields, such as config.{inside[0]}"
    namesakes = [field for field in known if field.endswith("." + name.split(".")[-1])]
    hint = f"; did you mean {namesakes[0]!r}?" if namesakes else nearest(name, known)
    return f"{where} has no field {name}{hint}"


def _plain(name: str) -> str:
    """Letters and digits alone: 'vitb16' for 'ViT-B/16'."""
    return "".join(filter(str.isalnum, name.lower())) or name


def checked(name: str, value: Any, field: dataclasses.Field):
    """The value in the type of its option.

    Raises:
      ConfigError: the value is not valid for the option `field`, called `name`.
    """
    metadata = field.metadata
    if metadata.get("parse"):
        return metadata["parse"](value, name)
    value = converted(name, value, field)
    choices, length = metadata.get("choices"), metadata.get("length")
    if choices and value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{name} = {value!r} is not one of {', '.join(choices)}{hint}")
    lengths = (length,) if isinstance(length, int) else length
    if lengths is not None and len(value) not in lengths and value != field.default:
        how_many = " or ".join(f"{n} values" if n else "none" for n in lengths)
        raise ConfigError(f"{name} = {value!r} must be {how_many}, separated by commas")
    bounds = [(b, *_COMPARISONS[b]) for b in _COMPARISONS if metadata.get(b) is not None]
    if bounds and isinstance(value, tuple) and any(isinstance(part, str) for part in value):
        raise ConfigError(f"{name} = {value!r} must be numbers")
    for number in _numbers(value):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{name} = {value!r} is not finite")
        if isinstance(number, int) and abs(number) >= 2**63:
            raise ConfigError(f"{name} = {value!r} has more than 64 bits")
        for bound, words, holds in bounds:
            if not holds(number, metadata[bound]):
                raise ConfigError(f"{name} = {value!r} {words} {metadata[bound]}")
    return value


def converted(name: str, value: Any, field: dataclasses.Field):
    """The value in the type of its option; bounds and choices are not checked.

    Raises:
      ConfigError: it is of another type.
    """
    kind = option_type(field.type)
    if kind is object:
        return _tuples(value)
    if kind is tuple and isinstance(value, list | tuple):
        return _tuples(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and is_number:
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = {
            tuple: "several values, such as (0.5, 1.0)", str: "text", bool: "True or False",
            int: "a whole number",
        }  # fmt: skip
        raise ConfigError(f"{name} = {value!r} must be {wanted.get(kind, 'a number')}")
    return value


def _numbers(value) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, Mapping):
        yield from _numbers(list(value.values()))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def option_type(kind: type | types.UnionType) -> type:
    """`int` of the annotation `int | None`; `object` where there are several types."""
    if isinstance(kind, types.UnionType):
        kinds = [k for k in typing.get_args(kind) if k is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else object
    return kind


def _either(first: Mapping, other: Mapping) -> dict:
    """What two options of the same name have in common, with the choices and documentation of both."""
    both = {key: value for key, value in first.items() if other.get(key) == value}
    clauses = dict.fromkeys((*first["doc"].split("; "), *other["doc"].split("; ")))
    choices = dict.fromkeys((*first["choices"], *other["choices"]))
    if not (first["choices"] and other["choices"]):
        choices = ()
    return dict.fromkeys(first) | both | {"doc": "; ".join(clauses), "choices": tuple(choices)}


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
