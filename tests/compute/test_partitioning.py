"""Activations and kernels on a mesh."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.compute import convolution, partitioning
from vit_jax.devices.meshes import BATCH, make_mesh

XS, KERNELS = (16, 6, 6, 8), (3, 3, 1, 8)


def test_without_a_mesh_nothing_is_constrained():
    x, kernel = jnp.ones((4, 2)), jnp.ones(KERNELS)
    assert partitioning.constrain_batch(x) is x
    assert "sharding_constraint" not in str(jax.make_jaxpr(partitioning.constrain_batch)(x))
    assert partitioning.gather_kernel(kernel) is kernel


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("gathered", [True, False])
def test_a_cut_depthwise_kernel_moves_no_activations_of_the_whole_batch(stride, gathered):
    mesh = make_mesh({"data": 2, "fsdp": 4, "tensor": 1})
    batch, kernels = NamedSharding(mesh, P(BATCH)), NamedSharding(mesh, P(None, None, None, "fsdp"))
    gather = partitioning.gather_kernel if gathered else lambda kernel: kernel

    def loss(x, kernel):
        y = convolution.depthwise.plain(2 * x, gather(kernel), stride)
        return jnp.square(partitioning.constrain_batch(y)).sum()

    with jax.set_mesh(mesh):
        shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (XS, KERNELS))
        cut = {"in_shardings": (batch, kernels), "out_shardings": (batch, kernels)}
        text = jax.jit(jax.grad(loss, (0, 1)), **cut).lower(*shapes).compile().as_text()
    # Without gathering the test would say nothing if XLA learned it: this line tells.
    assert bool(re.search(rf"f32\[{XS[0]},\d+,\d+,8\]", text)) != gathered
