"""Values of config fields in one form, whatever their spelling: '40steps' and '40 steps' are the same duration, '224',
224 and (224, 224) the same size. For comparisons of configs; a run keeps the user's spelling.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.base import durations, schema, sizes
from vit_jax.base.errors import ConfigError

# The normal form of values, by the parser of their option.
_OF_PARSER: dict[Callable, Callable] = {
    durations.parse: durations.normal,
    durations.parse_all: durations.normal_all,
    sizes.parse: sizes.parse,
}


def forms(cls: type) -> dict[str, Callable]:
    """The normal forms of the fields of a config that have several spellings, by dotted name."""
    by_name = {}
    for name, field in schema.walk(cls):
        parser = field.metadata["parse"]
        if parser in _OF_PARSER:
            by_name[name] = _OF_PARSER[parser]
    return by_name


def normal_value(value: Any, form: Callable | None) -> Any:
    """A value in its normal form; `None` and a wrong value stay as they are.

    Args:
      value: of a field.
      form: of the field, see `forms`; `None` if it has none. Then durations inside the value, such as in the options
        of a term, get their normal form.
    """
    if value is None:
        return value
    if form is None:
        return _with_normal_durations(value)
    try:
        return form(value)
    except (ConfigError, TypeError):
        return value


def _with_normal_durations(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _normal_item(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normal_item(item) for item in value]
    return value


def _normal_item(item: Any) -> Any:
    if isinstance(item, str) and durations.has_unit(item):
        return durations.normal(item)
    return _with_normal_durations(item)
