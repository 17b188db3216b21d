"""Rotary positions against complex numbers in float64."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.compute import rope

GRID, SIZE, HEADS = (3, 5), 8, 2
THETA = 50.0


def by_definition(kind):
    """(N, C/2) float64, a pair of channels and a patch at a time."""
    rows, columns = GRID
    angles = np.zeros((rows * columns, SIZE // 2))
    for (y, x), (axis, k) in itertools.product(
        np.ndindex(*GRID), itertools.product(range(2), range(SIZE // 4))
    ):
        place, sides = (y, x)[axis], GRID[axis]
        frequency = THETA ** (-k / (SIZE // 4))
        if kind == "centred":
            angle = 2 * np.pi * ((place + 0.5) / sides * 2 - 1) * frequency
        elif kind == "spread":
            angle = (place + 1) / sides * (7, 4)[axis] * frequency
        else:
            angle = place * frequency
        angles[y * columns + x, axis * SIZE // 4 + k] = angle
    return angles


FORMULAS = {
    "axial": lambda: rope.axial_angles(GRID, SIZE, theta=THETA),
    "spread": lambda: rope.axial_angles(GRID, SIZE, theta=THETA, offset=1.0, trained_grid=(7, 4)),
    "centred": lambda: rope.centred_angles(GRID, SIZE, theta=THETA),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_angles_are_those_of_the_definition(kind):
    np.testing.assert_allclose(FORMULAS[kind](), by_definition(kind), atol=1e-6)


def test_mixed_angles_are_a_sum_over_rows_and_columns():
    frequencies = np.random.default_rng(0).normal(size=(2, 3, HEADS, SIZE // 2))
    found = rope.mixed_angles(GRID, jnp.asarray(frequencies, jnp.float32))
    assert found.shape == (3, 15, HEADS, SIZE // 2)
    for layer, (y, x) in itertools.product(range(3), np.ndindex(*GRID)):
        expected = x * frequencies[0, layer] + y * frequencies[1, layer]
        np.testing.assert_allclose(found[layer, y * 5 + x], expected, atol=1e-5)


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 0), ("bfloat16", 2**-8)])
def test_pairs_of_channels_are_turned_by_their_angles(dtype, rounding):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 15, HEADS, SIZE)), dtype)
    exact = np.asarray(x, np.float64)
    angles = by_definition("axial")
    pairs = (exact[..., : SIZE // 2] + 1j * exact[..., SIZE // 2 :]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    table = jnp.asarray(angles, jnp.float32)[:, None]
    turned = rope.turn(x, jnp.cos(table), jnp.sin(table))
    assert turned.dtype == dtype
    # Only the result is rounded to the type.
    np.testing.assert_allclose(np.asarray(turned, np.float64), expected, rtol=rounding, atol=1e-5)


def test_queries_and_keys_meet_by_their_distance():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, SIZE)).astype(np.float32)
    table = rope.axial_angles((6, 6), SIZE, theta=THETA).reshape(6, 6, 1, -1)

    def product(at, other):
        turned = (
            rope.turn(v, jnp.cos(table[a])[None], jnp.sin(table[a])[None])
            for v, a in ((q, at), (k, other))
        )
        return float(jnp.vdot(*turned))

    assert product((1, 2), (3, 5)) == pytest.approx(product((0, 1), (2, 4)), abs=1e-5)
    assert abs(product((1, 2), (3, 5)) - product((1, 2), (4, 5))) > 1e-2
