"""Values of config fields in one form, whatever their spelling: '40steps' and '40 steps' are the same duration, '224',
224 and (224, 224) the same size. For comparisons of configs; a run keeps the user's spelling.
"""

from collections.abc import Callable
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
    parsers = {name: field.metadata["parse"] for name, field in schema.walk(cls)}
    return {name: _OF_PARSER[parser] for name, parser in parsers.items() if parser in _OF_PARSER}


def normal_value(value: Any, form: Callable | None) -> Any:
    """A value in its normal form; `None` and a wrong value stay as they are."""
    if form is None or value is None:
        return value
    try:
        return form(value)
    except (ConfigError, TypeError):
        return value
