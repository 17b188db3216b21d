"""The gradient of a batch in parts, one after the other (`config.accumulate`): each needs less memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning


def accumulated(gradient_of: Callable, parts: int) -> Callable:
    """`gradient_of` over `parts` equal parts of the batch, one after the other; the mean is that of
    the whole batch. State that is not trained goes from each part to the next; observations of the parts are
    stacked, (parts, …).
    """

    def in_one_part(*arguments):
        grads, (metrics, variables, observed) = gradient_of(*arguments)
        return grads, (metrics, variables, jax.tree.map(lambda x: x[None], observed))

    if parts == 1:
        return in_one_part

    def gradient_in_parts(params, variables, batch, key):
        # Part i takes every parts-th example, so that each part is spread over all devices and
        # nothing moves between them.
        cut = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(carry, part):
            total, variables = carry
            batch, key = part
            batch = batch | {
                name: jax.tree.map(partitioning.constrain_batch, x)
                for name, x in batch.items()
                if name.startswith("image")
            }
            grads, (metrics, variables, observed) = gradient_of(params, variables, batch, key)
            return (jax.tree.map(jnp.add, total, (grads, metrics)), variables), observed

        first = jax.tree.map(lambda x: x[0], cut)
        grads, (metrics, *_) = jax.eval_shape(gradient_of, params, variables, first, key)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, metrics))
        keys = jax.random.split(key, parts)
        (total, variables), observed = jax.lax.scan(add, (zero, variables), (cut, keys))
        grads, metrics = jax.tree.map(lambda x: x / parts, total)
        return grads, (metrics, variables, observed)

    return gradient_in_parts
