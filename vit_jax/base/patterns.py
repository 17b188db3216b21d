"""Parameter names and the patterns that select them: one idea for weight decay, rates, freezing,
loading and sharding.

The name of a parameter is its path joined by '/': `encoder/layers/mlp/up/kernel`. A pattern is a
regular expression that must match a whole name. Rules are (pattern, value) pairs; the first rule that
matches wins. The caller decides about the meaning of the values.

Where `select` is used, a pattern may name some of the stacked layers, as Python slices a list:
`encoder/layers[10:]/.*`, `layers[-1]`, `layers[:2]`.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from vit_jax.base.errors import ConfigError

Value = TypeVar("Value")
STACK = "layers"  # the name below which parameters hold all layers along their leading axis
_SLICE = re.compile(r"\blayers\[(?:(?P<index>-?\d+)|(?P<first>-?\d+)?:(?P<stop>-?\d+)?)\]")


def names(tree: Any) -> list[str]:
    """The names of all leaves of `tree`, in the order of `jax.tree.leaves`."""
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def named(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by their names.

    >>> named({"head": {"bias": 7}})
    {'head/bias': 7}
    """
    return dict(zip(names(tree), jax.tree.leaves(tree), strict=True))


def map_named(fn: Callable, tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` whose function also gets the name: `fn(name, leaf,
    *leaves_or_subtrees_of_rest)`.

    >>> map_named(lambda name, x: f"{name} {x}", {"head": {"bias": 7}})
    {'head': {'bias': 'head/bias 7'}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fn(_name(path), *leaves), tree, *rest
    )


def is_stacked(name: str) -> bool:
    """Whether the parameter holds all layers along its leading axis: a component of its path is
    `layers`.
    """
    return STACK in name.split("/")


def first_match(rules: Iterable[tuple[str, Value]], name: str, default: Value) -> Value:
    """The value of the first rule whose pattern matches the whole of `name`, else `default`."""
    for pattern, value in rules:
        if _compile(pattern).fullmatch(name):
            return value
    return default


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that at least one pattern matches, in their order. A pattern that selects some layers of a stack is
    skipped: it selects no parameter as a whole.
    """
    compiled = [_compile(pattern) for pattern in patterns if not _of_layers(pattern)]
    return [name for name in names if any(pattern.fullmatch(name) for pattern in compiled)]


def matching_layers(patterns: Sequence[str], name: str, count: int) -> np.ndarray | None:
    """Which of the `count` layers of a stacked parameter patterns of some layers select, (count,) bool; `None` if no
    pattern does.

    >>> matching_layers(["encoder/layers[-1:]/.*"], "encoder/layers/mlp/bias", 3)
    array([False, False,  True])
    """
    if not patterns:  # there may be any number of layers
        return None
    selected = np.zeros(count, bool)
    for pattern in patterns:
        match = _SLICE.search(pattern)
        if match and matching([_SLICE.sub(STACK, pattern)], [name]):
            selected[_layers(match)] = True
    return selected if selected.any() else None


def _layers(match: re.Match) -> slice:
    index, first, stop = (
        int(match[part]) if match[part] else None for part in ("index", "first", "stop")
    )
    if index is None:
        return slice(first, stop)
    return slice(index, index + 1 or None)


def select(
    patterns: Sequence[str], shapes: Mapping[str, tuple[int, ...]], where: str
) -> tuple[set[str], dict[str, np.ndarray]]:
    """The names of the parameters that patterns select as a whole, and masks of the selected layers, (layers,) bool,
    by the name of a stacked parameter.

    Raises:
      ConfigError: a pattern is no regular expression, or selects nothing.
    """
    of_layers = [p for p in patterns if isinstance(p, str) and _of_layers(p)]
    of_all_layers = [p for p in patterns if p not in of_layers]
    check_patterns(of_all_layers, list(shapes), where)
    stacked = [name for name, shape in shapes.items() if is_stacked(name) and shape]
    depths = {name: shapes[name][0] for name in stacked}
    for pattern in of_layers:
        check_patterns([_SLICE.sub(STACK, pattern)], stacked, where)
        if all(matching_layers([pattern], *item) is None for item in depths.items()):
            different = ", ".join(map(str, sorted(set(depths.values()))))
            raise ConfigError(f"{where}: the pattern {pattern!r} selects no layer of {different}")
    whole = set(matching(patterns, shapes))
    masks = {}
    for name, depth in depths.items():
        mask = matching_layers(of_layers, name, depth)
        if mask is not None and mask.all():
            whole.add(name)
        elif mask is not None and name not in whole:
            masks[name] = mask
    return whole, masks


def selected(patterns: Sequence[str], name: str, shape: Sequence[int]) -> bool | np.ndarray:
    """Whether patterns select a parameter, or which of its layers, (layers,) bool; see `select`, which checks them."""
    if matching(patterns, [name]):
        return True
    layers = matching_layers(patterns, name, shape[0]) if shape else None
    return False if layers is None else layers


def along(mask: np.ndarray, array: jax.Array) -> np.ndarray:
    """A mask of layers (L,) in the shape that broadcasts against an array (L, …) of all of them."""
    return mask.reshape(-1, *[1] * (array.ndim - 1))


def check_patterns(patterns: Iterable[str], names: Sequence[str], where: str) -> None:
    """Raises `ConfigError` for a pattern that is no regular expression or matches none of `names`.

    Args:
      patterns: regular expressions.
      names: of all parameters.
      where: the origin of the patterns, for the message, e.g. 'config.optim.freeze'.
    """
    for pattern in patterns:
        try:
            matches = matching([pattern], names)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not matches:
            raise ConfigError(
                f"{where}: the pattern {pattern!r} matches no parameter (it must match a whole name); "
                f"nearest: {', '.join(_nearest(pattern, names)) or 'there are no parameters'}"
            )


def check_rules(rules: Iterable[tuple[str, Any]], names: Sequence[str], where: str) -> None:
    """As `check_patterns`, for (pattern, value) rules; also raises `ConfigError` for a rule that is
    no such pair.
    """
    rules = tuple(rules)
    for rule in rules:
        if not isinstance(rule, (tuple, list)) or len(rule) != 2:
            raise ConfigError(
                f"{where}: {rule!r} is not a (pattern, value) pair; one rule alone is (('.*kernel', 1),)"
            )
        value = rule[1]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{where}: {rule!r}: the value must be a number from 0 on")
    check_patterns([pattern for pattern, _ in rules], names, where)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _of_layers(pattern: str) -> re.Match | None:
    """Where a pattern says which layers it selects of a stacked parameter."""
    if not isinstance(pattern, str):
        raise ConfigError(f"the pattern {pattern!r} is not text")
    return _SLICE.search(pattern)


def _compile(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"the pattern {pattern!r} is not a regular expression: {error}"
        ) from error


def _nearest(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """The names that are most like the words of the pattern, as a whole, at their beginning or at their end."""
    words = re.sub(r"[^\w/]+", "", pattern).strip("/")

    def likeness(name: str) -> float:
        path = name.split("/")
        texts = [name]
        for i in range(1, len(path)):
            texts.append("/".join(path[:i]))
            texts.append("/".join(path[i:]))
        return max(difflib.SequenceMatcher(None, words, text).ratio() for text in texts)

    return sorted(names, key=likeness, reverse=True)[:count]


def union(first: dict, other: dict) -> dict:
    """Two nested dicts with different leaves as one."""
    joined = dict(first)
    for name, tree in other.items():
        if name in joined:
            tree = union(joined[name], tree)
        joined[name] = tree
    return joined
