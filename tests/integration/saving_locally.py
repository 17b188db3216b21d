"""One of four processes that save a small state to local disks at every step, until they are killed.

`python -m tests.integration.saving_locally PROCESS PORT DISKS WORKDIR` first prints the step that it
restored, and whether its bits are those of that step.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.checkpoints import tiers
from vit_jax.devices import meshes, processes


def main(process: str, port: str, disks: str, workdir: str) -> None:
    processes.initialize(f"127.0.0.1:{port}", 4, int(process))
    mesh = meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 1})
    place = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731

    def state(step):
        weights = jnp.arange(2**20, dtype=jnp.float32) * 3 + step
        return {"step": step, "weights": weights, "bias": jnp.ones(8) * step}

    make = jax.jit(
        state, out_shardings={"step": place(), "weights": place("fsdp"), "bias": place()}
    )
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(jnp.int32(0))
    )
    tier = tiers.LocalTier(f"{disks}/{process}", epath.Path(workdir), like)
    step, parts = tier.restore(0) or (0, make(jnp.int32(0)))
    pairs = zip(jax.tree.leaves(parts), jax.tree.leaves(make(jnp.int32(step))), strict=True)
    same = all(
        np.array_equal(a.data, b.data)
        for x, y in pairs
        for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)
    )
    print(step, same, flush=True)
    while True:
        step += 1
        tier.save(step, make(jnp.int32(step)), {"step": step, "config": {}})


if __name__ == "__main__":
    main(*sys.argv[1:])
