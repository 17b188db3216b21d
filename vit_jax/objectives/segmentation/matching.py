"""The assignment problem inside a compiled step: which query learns which segment (DETR, arXiv 2005.12872 §3.1).

Nothing leaves the devices: shortest augmenting paths (Jonker and Volgenant 1987), one row after the other.
"""

import jax
import jax.numpy as jnp

_WORST = 1e9  # what a cost that is no number counts as


def assign(costs: jax.Array, count: jax.Array) -> jax.Array:
    """The columns of the first `count` rows, all different, with the least sum of costs.

    Args:
      costs: (M, Q) float32, M <= Q.
      count: int32 scalar, of rows that count.

    Returns:
      (M,) int32; Q for the rows that do not count.
    """
    rows, columns = costs.shape
    costs = jnp.clip(jnp.nan_to_num(costs, nan=_WORST), -_WORST, _WORST)

    def add_row(row, state):
        by_row, by_column, row_of = state
        row_of = row_of.at[columns].set(row)  # column number Q is where the path begins
        path = _shortest_path(costs, by_row, by_column, row_of)
        by_row, by_column, came_from, end = path
        return by_row, by_column, _along_path(row_of, came_from, end)

    state = (
        jnp.zeros(rows + 1),
        jnp.zeros(columns + 1),
        jnp.full(columns + 1, rows, jnp.int32),  # of each column; `rows`: it is free
    )
    row_of = jax.lax.fori_loop(0, count, add_row, state)[2][:columns]
    columns_of_rows = jnp.full(rows, columns, jnp.int32)
    return columns_of_rows.at[row_of].set(jnp.arange(columns, dtype=jnp.int32), mode="drop")


def _shortest_path(costs, by_row, by_column, row_of):
    """From the start to the nearest free column, by reduced costs: the new potentials, where each column was
    reached from, and the free column.
    """
    rows, columns = costs.shape

    def extend(state):
        by_row, by_column, distance, came_from, used, column = state
        used = used.at[column].set(True)
        row = row_of[column]
        reduced = costs[row] - by_row[row] - by_column[:columns]
        free = ~used[:columns]
        nearer = free & (reduced < distance)
        distance = jnp.where(nearer, reduced, distance)
        came_from = jnp.where(nearer, column, came_from)
        reachable = jnp.where(free, distance, jnp.inf)
        nearest = jnp.argmin(reachable).astype(jnp.int32)
        step = reachable[nearest]
        by_row = by_row.at[jnp.where(used, row_of, rows)].add(jnp.where(used, step, 0))
        by_column = jnp.where(used, by_column - step, by_column)
        return (
            by_row,
            by_column,
            jnp.where(free, distance - step, distance),
            came_from,
            used,
            nearest,
        )

    state = (
        by_row,
        by_column,
        jnp.full(columns, jnp.inf),
        jnp.full(columns, columns, jnp.int32),
        jnp.zeros(columns + 1, bool),
        jnp.int32(columns),
    )
    by_row, by_column, _, came_from, _, end = jax.lax.while_loop(
        lambda state: row_of[state[-1]] < rows, extend, state
    )
    return by_row, by_column, came_from, end


def _along_path(row_of, came_from, end):
    """Moves the row of every column on the path one column on, which frees the start."""
    start = len(row_of) - 1

    def move(state):
        row_of, column = state
        before = came_from[column]
        return row_of.at[column].set(row_of[before]), before

    row_of, _ = jax.lax.while_loop(lambda state: state[1] != start, move, (row_of, end))
    return row_of
