"""Which activations are stored for the backward pass, and which it recomputes: those worth storing
have a name, and a policy is the names that it stores.
"""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from vit_jax.compute.platform import by_platform

# A layer's input; means and deviations of norms; attention's result and the logarithms of the
# softmax's denominators; an MLP's first product; on GPUs alone, each product of `dense`.
INPUT, STATISTICS, ATTENTION, HIDDEN = "input", "statistics", "attention", "hidden"
PRODUCT = "product"

# From what stores most to what stores least. QKV is in none of them on TPUs and CPUs, where storing and
# fetching it costs more than its products.
POLICIES = {
    "none": None,
    "save_products": (INPUT, STATISTICS, ATTENTION, HIDDEN, PRODUCT),
    "save_attention": (INPUT, STATISTICS, ATTENTION),
    "full": (INPUT,),
}


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def keep(x: jax.Array, name: str) -> jax.Array:
    """x, which policies know by this name."""
    return named(x, name)


@keep.defjvp
def _keep_jvp(name, primals, tangents):
    # Not with `keep`: policies do not look into functions with a derivative of their own.
    return named(*primals, name), *tangents


@by_platform
def named(x: jax.Array, name: str) -> jax.Array:
    """`keep` for use inside functions with a derivative of their own; it has none itself."""
    return checkpoint_name(x, name)


@by_platform
def unshared(arrays):
    """What the backward pass stored, where it computes something of it again, apart from the forward pass."""
    return arrays


def apply(function: Callable, remat: str, *, prevent_cse: bool) -> Callable:
    """The function whose backward pass stores what the policy `remat` says."""
    if remat == "none":
        return function
    policy = jax.checkpoint_policies.save_only_these_names(*POLICIES[remat])
    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)
