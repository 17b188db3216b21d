"""Parameters of a term of a sum that begins late: their updates and their decay begin with it, and so do the counts and
moments of their optimizer. Otherwise Adam would take a count of thousands for moments of one step, and its first
updates would be several times the learning rate.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import patterns


class LateTermsState(NamedTuple):
    """`count` updates were made; the state of what directs all other parameters, and of each late term's own."""

    count: jax.Array
    others: Any
    late: dict[str, Any]


class RestState(NamedTuple):
    """`count` updates were made."""

    count: jax.Array


def with_own_states(
    make_direction: Callable[[list[str]], optax.GradientTransformation],
    names: list[str],
    starts: Mapping[str, int],
) -> optax.GradientTransformation:
    """A direction with a state of its own for the parameters of each late term, which changes from its start on.

    Args:
      make_direction: gives the direction of the parameters of these names.
      names: of all parameters.
      starts: for the beginning of the names of a term's parameters the updates that are made before it begins.
    """
    others = _masked(make_direction, [name for name in names if not name.startswith(tuple(starts))])
    late = {
        prefix: _masked(make_direction, [name for name in names if name.startswith(prefix)])
        for prefix in starts
    }

    def init(params):
        of_late = {_key(prefix): direction.init(params) for prefix, direction in late.items()}
        return LateTermsState(jnp.int32(0), others.init(params), of_late)

    def update(grads, state, params):
        directions, of_others = others.update(grads, state.others, params)
        of_late = {}
        for prefix, direction in late.items():
            old = state.late[_key(prefix)]
            has_begun = state.count >= starts[prefix]
            directions, new = direction.update(directions, old, params)
            of_late[_key(prefix)] = _where(has_begun, new, old)
        return directions, LateTermsState(state.count + 1, of_others, of_late)

    return optax.GradientTransformation(init, update)


def rest_until(starts: Mapping[str, int]) -> optax.GradientTransformation:
    """Updates of exactly 0 for the parameters of late terms, until they begin.

    Args:
      starts: see `with_own_states`.
    """

    def update(updates, state, params=None):
        def rest(name: str, update: jax.Array) -> jax.Array:
            start = next((starts[prefix] for prefix in starts if name.startswith(prefix)), 0)
            return jnp.where(state.count >= start, update, 0) if start else update

        return patterns.map_named(rest, updates), RestState(state.count + 1)

    return optax.GradientTransformation(lambda params: RestState(jnp.int32(0)), update)


def _masked(make_direction: Callable, names: list[str]) -> optax.GradientTransformation:
    """The direction of the parameters of these names; gradients of all others stay as they are."""
    chosen = frozenset(names)

    def mask(tree):
        return patterns.map_named(lambda name, _: name in chosen, tree)

    return optax.masked(make_direction(names), mask)


def _key(prefix: str) -> str:
    """The name of a term's state in a checkpoint."""
    return prefix.strip("/").replace("/", "_")


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
