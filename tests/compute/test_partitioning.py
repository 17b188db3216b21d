"""Activations on a mesh, and without one."""

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning


def test_without_a_mesh_nothing_is_constrained():
    x = jnp.ones((3, 2))
    assert partitioning.constrain_batch(x) is x
    assert "sharding_constraint" not in str(jax.make_jaxpr(partitioning.constrain_batch)(x))
