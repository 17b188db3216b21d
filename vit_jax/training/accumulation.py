"""The gradient of a batch in parts, one after the other (`config.accumulate`): each needs less memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning


def accumulated(gradient_of: Callable, parts: int) -> Callable:
    """`gradient_of` over `parts` equal parts of the batch, one after the other; the result is the mean over the whole
    batch. State that is not trained goes from each part to the next; observations of the parts are stacked,
    (parts, …).
    """

    def in_one_part(*arguments):
        grads, (metrics, variables, observed) = gradient_of(*arguments)
        observed = jax.tree.map(lambda x: x[None], observed)
        return grads, (metrics, variables, observed)

    if parts == 1:
        return in_one_part

    def gradient_in_parts(params, variables, batch, key):
        batches = jax.tree.map(lambda x: _split(x, parts), batch)

        def add(carry, part):
            total, variables = carry
            batch, key = part
            batch = _with_spread_images(batch)
            grads, (metrics, variables, observed) = gradient_of(params, variables, batch, key)
            total = jax.tree.map(jnp.add, total, (grads, metrics))
            return (total, variables), observed

        first = jax.tree.map(lambda x: x[0], batches)
        grads, (metrics, *_) = jax.eval_shape(gradient_of, params, variables, first, key)
        zero = jax.tree.map(_zeros, (grads, metrics))
        keys = jax.random.split(key, parts)
        carry = (zero, variables)
        (total, variables), observed = jax.lax.scan(add, carry, (batches, keys))
        grads, metrics = jax.tree.map(lambda x: x / parts, total)
        return grads, (metrics, variables, observed)

    return gradient_in_parts


def _split(x: jax.Array, parts: int) -> jax.Array:
    """An array (B, …) of examples in parts, (parts, B / parts, …). Part i takes every parts-th example, so that each
    part is spread over all devices and nothing moves between them.
    """
    groups = x.reshape(-1, parts, *x.shape[1:])
    return groups.swapaxes(0, 1)


def _with_spread_images(batch: dict) -> dict:
    """The batch, with its images sharded over all devices."""
    images = {
        name: jax.tree.map(partitioning.constrain_batch, x)
        for name, x in batch.items()
        if name.startswith("image")
    }
    return batch | images


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)
