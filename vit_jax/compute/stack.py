"""Equal layers, stacked along a leading axis run by `jax.lax.scan`, and what the backward pass
recomputes of them.
"""

from collections.abc import Callable

import jax
from flax import nnx

from vit_jax.compute import choices, partitioning, recompute


def stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one, every parameter with a leading axis of that length. Call its
    attribute `layers`.
    """
    return nnx.split_rngs(splits=count)(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


def scan(
    step: Callable,
    layers: nnx.Module,
    x: jax.Array,
    arguments: tuple = (),
    *,
    remat: str,
    unroll: int,
):
    """Runs stacked layers one after the other.

    Args:
      step: `step(layer, x, *arguments_of_the_layer) -> x, captured`.
      layers: from `stack`.
      x: (B, ...), or several such.
      arguments: arrays with a leading axis of the stack's length, a slice for each layer; `None` is
        handed on.
      remat: one of `recompute.POLICIES`.
      unroll: layers compiled side by side; 0: all; -1: chosen for the device.

    Returns:
      x after the last layer, and what was captured with a leading axis of the stack's length.
    """
    definition, parameters = nnx.split(layers)
    count = len(jax.tree.leaves(parameters)[0])
    unroll = choices.unrolled(unroll, count, remat)

    def body(x, of_layer):
        layer_parameters, layer_arguments = of_layer
        x = jax.tree.map(lambda x: recompute.keep(x, recompute.INPUT), x)
        x, captured = step(nnx.merge(definition, layer_parameters), x, *layer_arguments)
        return jax.tree.map(partitioning.constrain_batch, x), captured

    # A loop keeps XLA from sharing what is recomputed with the forward pass; unrolling may leave
    # layers outside a loop.
    body = recompute.apply(body, remat, prevent_cse=unroll == count or count % unroll > 0)
    return jax.lax.scan(body, x, (parameters, arguments), unroll=unroll)


def call(layer: nnx.Module, x: jax.Array, *, remat: str) -> jax.Array:
    """`layer(x)` of a layer that is in no stack, recomputed as those of a stack are."""
    definition, parameters = nnx.split(layer)

    def body(parameters, x):
        return nnx.merge(definition, parameters)(recompute.keep(x, recompute.INPUT))

    run = recompute.apply(body, remat, prevent_cse=True)
    return partitioning.constrain_batch(run(parameters, x))
