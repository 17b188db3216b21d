"""Bundles of hand-written kernels, counted in programs whose grids and turns are known."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from vit_jax.compute import flops
from vit_jax.devices import meshes
from vit_jax.planning import cycles, hlo, kernels, target

TOPOLOGY = "v5e:2x2"
TURNS, ROWS, WIDTH = 3, 64, 256


def cubed(x_ref, y_ref):
    y_ref[...] = x_ref[...] * x_ref[...] * x_ref[...]


def squared(x_ref, y_ref):
    y_ref[...] = jnp.dot(x_ref[...], x_ref[...].T) @ x_ref[...]


def call(kernel, x, rows):
    """`kernel` on blocks of so many rows of x (N, D)."""
    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // rows,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name=f"{kernel.__name__}_{rows}",
    )(x)


@pytest.fixture(scope="module")
def compiled():
    """A loop with two kernels, and one of them again behind it: traced, and its program."""
    mesh = meshes.make_mesh({"data": 4, "fsdp": 1, "tensor": 1}, target.find(TOPOLOGY).devices)

    def on_device(x):
        def turn(x, _):
            return call(squared, call(cubed, x, 32), 16), None

        return call(cubed, jax.lax.scan(turn, x, length=TURNS)[0], 32)

    step = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(meshes.BATCH), out_specs=P(meshes.BATCH), check_vma=False
    )
    x = jax.ShapeDtypeStruct((4 * ROWS, WIDTH), "float32", sharding=meshes.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        traced = jax.jit(step).trace(x)
        return traced, hlo.parse(traced.lower().compile().as_text())


def test_bundles_of_kernels_are_counted_by_grid_and_turns(compiled):
    traced, program = compiled
    grids = kernels.grids(traced.jaxpr)
    assert grids == {"cubed_32": ROWS // 32, "squared_16": ROWS // 16}
    bundles = kernels.count_bundles(kernels.find_kernels(program), TOPOLOGY)
    rows = kernels.rows(program, bundles, grids)
    assert sorted((row["name"].partition(".")[0], row["times"]) for row in rows) == [
        ("cubed_32", 1),
        ("cubed_32", TURNS),
        ("squared_16", TURNS),
    ]
    # 32 x 256 numbers are 8 registers of 8 x 128: a load and a store each, one of a kind a bundle.
    cubes = {row["bundles"] for row in rows if row["name"].startswith("cubed")}
    assert len(cubes) == 1 and 8 <= cubes.pop() < 200
    assert all(row["cycles"] == row["bundles"] * row["programs"] for row in rows)
    counted = dataclasses.replace(program, kernels={row["name"]: row["cycles"] for row in rows})
    more = sum(cycles.count(counted)["all"].values()) - sum(cycles.count(program)["all"].values())
    assert more == sum(row["times"] * row["cycles"] for row in rows)


def test_two_cores_divide_the_longest_parallel_axis_of_a_grid():
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def copy(*semantics):
        return pl.pallas_call(
            lambda x_ref, out_ref: None,
            grid=(5, 4),
            in_specs=[pl.BlockSpec((1, 128), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((1, 128), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((5, 512), "float32"),
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            name="_".join(semantics),
        )

    x = jax.ShapeDtypeStruct((3, 5, 512), "float32")
    programs = {
        ("parallel", "parallel"): 10,
        ("parallel", "arbitrary"): 12,
        ("arbitrary", "arbitrary"): 20,
    }
    for semantics, count in programs.items():
        jaxpr = jax.make_jaxpr(copy(*semantics))(jax.ShapeDtypeStruct((5, 512), "float32"))
        assert kernels.grids(jaxpr, cores=2) == {"_".join(semantics): count}
        assert kernels.grids(jaxpr) == {"_".join(semantics): 20}
    # An axis of vmap is parallel: 2 of 3 images, 20 programs each.
    jaxpr = jax.make_jaxpr(jax.vmap(copy("arbitrary", "arbitrary")))(x)
    assert kernels.grids(jaxpr, cores=2) == {"arbitrary_arbitrary": 40}


def test_products_of_kernels_are_counted_on_all_devices(compiled):
    traced, _ = compiled
    product = 2 * 16 * 16 * WIDTH
    assert flops.count(traced.jaxpr) == 4 * TURNS * (ROWS // 16) * 2 * product
