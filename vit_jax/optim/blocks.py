"""Matrices in blocks, and second moments of each block's rows and columns: what preconditioners from
both sides share.

State has an entry for each block of each matrix, in stacks that are sharded as `stacks.py` does. What
is derived from the moments, by a decomposition, is computed every n steps in one branch of the step
(`jax.lax.cond`), not in a program of its own: which step it is only the optimizer's count knows, which
does not advance with skipped updates, and the host would have to wait for it in every step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base.errors import ConfigError
from vit_jax.compute import conditionals, platform
from vit_jax.optim import stacks
from vit_jax.optim.matrices import SHORTEST, Matrices
from vit_jax.optim.stacks import Stack

_SIDES = ("left", "right")


def init(
    matrices: Matrices, longest: int, of_block: Callable[[int, int], Stack]
) -> dict[str, Stack]:
    """The state of all blocks before the first step.

    Args:
      matrices: to be split.
      longest: a block has no longer side (`config.optim.matrix_block`).
      of_block: sides (m, n) of a block -> its arrays by name.

    Returns:
      Arrays (matrices, blocks, …) by stack and name.

    Raises:
      ConfigError: a side has no equal parts.
    """
    state = {}
    for shape, names in matrices.stacks().items():
        (p, m), (q, n) = (_parts(side, longest) for side in shape)
        count = sum(map(matrices.count, names))
        state[stacks.stack_name(shape)] = {
            name: jnp.broadcast_to(x, (count, p * q, *x.shape))
            for name, x in of_block(m, n).items()
        }
    return state


def apply(
    function: Callable[[Stack], Stack],
    tree: Any,
    state: dict[str, Stack],
    matrices: Matrices,
    longest: int,
) -> tuple[Any, dict[str, Stack]]:
    """`stacks.apply_with_state`, whose `function` gets blocks (N, blocks, m, n) as `x`."""

    def of_stack(arrays: Stack) -> Stack:
        shape = arrays["x"].shape
        new = function(arrays | {"x": _split(arrays["x"], longest)})
        return new | {"x": _join(new["x"], shape)}

    return stacks.apply_with_state(of_stack, tree, state, matrices)


def moments(m: int, n: int) -> Stack:
    """Of the rows (`left`) and columns (`right`) of a block, before the first step."""
    return {"left": jnp.zeros((m, m)), "right": jnp.zeros((n, n))}


def update_moments(arrays: Stack, decay: float) -> Stack:
    """Running means of x xᵀ and xᵀ x."""
    x = arrays["x"]
    squares = {"left": product(x, x.mT), "right": product(x.mT, x)}
    return {side: decay * arrays[side] + (1 - decay) * squares[side] for side in _SIDES}


def refresh(
    count: jax.Array,
    every: int,
    derive: Callable[[jax.Array, jax.Array], jax.Array],
    arrays: Stack,
    name: str,
) -> Stack:
    """What is derived from each side's moments, `left_NAME` and `right_NAME`.

    Args:
      count: gradients in the moments.
      every: it is derived this many steps apart; otherwise it stays as it is, and nothing is computed.
      derive: (moment, derived before) -> derived.
      arrays: with the moments, and what was derived before.
      name: of what is derived.
    """
    due, new = (count > 0) & (count % every == 0), one_by_one(derive)

    def of_side(side: str) -> jax.Array:
        before = arrays[f"{side}_{name}"]
        with jax.named_scope(conditionals.one_step_in(every)):
            return jax.lax.cond(due, new, lambda _, before: before, arrays[side], before)

    return {f"{side}_{name}": of_side(side) for side in _SIDES}


def one_by_one(derive: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of stacks (…, m, m) that decomposes matrices, on CPUs computed for one matrix after the other: a stack
    is decomposed there by the threads that also wait for it (JAX 0.10), so that a few stacks at the same time wait for
    each other forever.
    """
    if platform.current() != "cpu":
        return derive

    def new(*stacks: jax.Array) -> jax.Array:
        matrices = [x.reshape(-1, *x.shape[-2:]) for x in stacks]
        return jax.lax.map(lambda some: derive(*some), matrices).reshape(stacks[0].shape)

    return new


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b in float32: eigenvalues are too far apart for less."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _parts(side: int, longest: int) -> tuple[int, int]:
    """(number, side) of the fewest equal parts of a side that are not above `longest`."""
    number = next(n for n in range(-(-side // longest), side + 1) if side % n == 0)
    if side // number < SHORTEST:
        raise ConfigError(
            f"config.optim.matrix_block = {longest}: a side of {side} has no divisor from {SHORTEST} to that; "
            "set another"
        )
    return number, side // number


def _split(x: jax.Array, longest: int) -> jax.Array:
    """(N, p m, q n) to (N, p q, m, n)."""
    (p, m), (q, n) = (_parts(side, longest) for side in x.shape[1:])
    return x.reshape(-1, p, m, q, n).swapaxes(2, 3).reshape(-1, p * q, m, n)


def _join(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_split`."""
    m, n = blocks.shape[2:]
    blocks = blocks.reshape(-1, shape[1] // m, shape[2] // n, m, n)
    return blocks.swapaxes(2, 3).reshape(shape)
