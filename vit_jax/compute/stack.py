"""Equal layers, stacked along a leading axis and run by `jax.lax.scan`, and what the backward pass
recomputes of them.

Layers may hold state that is not trained, such as running means: variables that are no `nnx.Param`.
The values that layers give them are in the module when all layers have run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.compute import choices, partitioning, recompute


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one, every parameter with a leading axis of that length. Call its
    attribute `layers`.
    """
    return nnx.split_rngs(splits=count)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


@dataclasses.dataclass(frozen=True)
class Joining:
    """Tokens that join the others before the last layers of a stack (EoMT, arXiv 2503.19108 §3.2).

    Attributes:
      layers: how many they go through.
      join: x (B, N, D) -> (B, Q + N, D), the new ones first; called before the first of these layers.
      bias: (number of the layer among these, x) -> what is added to its attention's logits, see
        `attend.attend`, or `None`.
      training: whether there is a backward pass. Without, the layers before are read where they are: of a large
        model a slice of the stack is a copy of a gigabyte.
    """

    layers: int
    join: Callable[[jax.Array], jax.Array]
    bias: Callable[[int, jax.Array], Any]
    training: bool = True


def scan(
    step: Callable,
    layers: nnx.Module,
    x: jax.Array,
    arguments: tuple = (),
    *,
    remat: str,
    unroll: int,
    joining: Joining | None = None,
):
    """Runs stacked layers one after the other.

    Args:
      step: `step(layer, x, *arguments_of_the_layer) -> x, captured`.
      layers: from `stack`; its state that is not trained is updated.
      x: (B, ...), or several such.
      arguments: arrays with a leading axis of the stack's length, a slice for each layer; `None` is
        handed on.
      remat: one of `recompute.POLICIES`.
      unroll: layers compiled side by side; 0: all; -1: chosen for the device.
      joining: tokens that join before the last layers; then `step` has the keyword `bias` in those, layers have
        no other state, and nothing is captured.

    Returns:
      x after the last layer, and what was captured with a leading axis of the stack's length.
    """
    if joining is not None:
        return _scan_joined(step, layers, x, arguments, joining, remat=remat, unroll=unroll), {}
    definition, parameters, state = _split(layers)
    count = len(jax.tree.leaves(parameters)[0])
    unroll = choices.unrolled(unroll, count, remat)

    def body(x, slices):
        layer_parameters, layer_state, layer_arguments = slices
        before = jax.tree.leaves(layer_state)
        layer = nnx.merge(definition, layer_parameters, layer_state)
        x, captured = step(layer, _keep(x), *layer_arguments)
        x = jax.tree.map(partitioning.constrain_batch, x)
        return x, (captured, _changed(layer, before))

    # A loop keeps XLA from sharing what is recomputed with the forward pass; unrolling may leave
    # layers outside a loop.
    body = recompute.apply(body, remat, prevent_cse=unroll == count or count % unroll > 0)
    x, (captured, changed) = jax.lax.scan(body, x, (parameters, state, arguments), unroll=unroll)
    _update(layers, changed)
    return x, captured


def _scan_joined(
    step: Callable,
    layers: nnx.Module,
    x: jax.Array,
    arguments: tuple,
    joining: Joining,
    *,
    remat: str,
    unroll: int,
) -> jax.Array:
    """`scan` with tokens that join, before layers that run one by one: x (B, Q + N, D)."""
    definition, parameters, state = _split(layers)
    first = len(jax.tree.leaves(parameters)[0]) - joining.layers

    def part(index) -> tuple[nnx.Module, tuple]:
        chosen = jax.tree.map(lambda p: jnp.asarray(p)[index], (parameters, arguments))
        return nnx.merge(definition, chosen[0], state), chosen[1]

    def read_in_place(x, number):
        layer, given = part(number)
        return partitioning.constrain_batch(step(layer, x, *given)[0]), None

    if first and not joining.training:
        side_by_side = choices.unrolled(unroll, first, remat)
        x, _ = jax.lax.scan(read_in_place, x, jnp.arange(first), unroll=side_by_side)
    elif first:
        before, given = part(slice(first))
        x, _ = scan(step, before, x, given, remat=remat, unroll=unroll)
    x = joining.join(x)

    def body(number, x, bias):
        layer, given = part(first + number)
        return step(layer, _keep(x), *given, bias=bias)[0]

    for number in range(joining.layers):
        run = recompute.apply(functools.partial(body, number), remat, prevent_cse=True)
        x = partitioning.constrain_batch(run(x, joining.bias(number, x)))
    return x


def call(layer: nnx.Module, x, *arguments, remat: str, **settings) -> jax.Array:
    """`layer(x, *arguments, **settings)` of a layer outside any stack, recomputed and updated as those of
    a stack are; x is (B, ...), or several such; settings are no arrays.
    """
    definition, parameters, state = _split(layer)

    def body(parameters, state, x, arguments):
        before = jax.tree.leaves(state)
        inner = nnx.merge(definition, parameters, state)
        return inner(_keep(x), *arguments, **settings), _changed(inner, before)

    x, changed = recompute.apply(body, remat, prevent_cse=True)(parameters, state, x, arguments)
    _update(layer, changed)
    return partitioning.constrain_batch(x)


def _split(layer: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Definition, parameters, and the state that is not trained."""
    return nnx.split(layer, nnx.Param, ...)


def _changed(layer: nnx.Module, before: list[jax.Array]) -> nnx.State | None:
    """The state that is not trained, as the layer leaves it, or `None` if its arrays are those of
    `before`; no gradient goes through it.
    """
    after = _split(layer)[2]
    pairs = zip(before, jax.tree.leaves(after), strict=True)
    return jax.lax.stop_gradient(after) if any(a is not b for a, b in pairs) else None


def _update(layer: nnx.Module, changed: nnx.State | None) -> None:
    # Not by what is the same: a compiled function may use a model without being its owner.
    if changed is not None:
        nnx.update(layer, changed)


def _keep(x):
    return jax.tree.map(lambda x: recompute.keep(x, recompute.INPUT), x)
