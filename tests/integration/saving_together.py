"""One of several processes that save a small state together, once for each line of standard input: the step.

`python -m tests.integration.saving_together PROCESS PROCESSES PORT WORKDIR WAIT_MINUTES` prints a line of JSON
after each save: what it raised, how long this process was in it, and the steps that are saved whole. An empty
line restores the newest state instead, and prints its step and a sum of its bits.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.checkpoints import saving
from vit_jax.config import Checkpoint
from vit_jax.devices import meshes, processes

DESCRIPTION = {"config": {}, "model": {"name": "ViT-mu/8"}, "classes": []}


def main(process: str, count: str, port: str, workdir: str, minutes: str) -> None:
    processes.initialize(f"127.0.0.1:{port}", int(count), int(process))
    mesh = meshes.make_mesh({"data": 1, "fsdp": int(count), "tensor": 1})
    place = NamedSharding(mesh, P("fsdp"))
    make = jax.jit(lambda step: {"a": jnp.arange(4096.0) * 3 + step}, out_shardings={"a": place})
    like = {"a": jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=place)}
    config = Checkpoint(max_failures=1, keep=100, commit_minutes=float(minutes))
    checkpoints = saving.Checkpoints(epath.Path(workdir), config, float(minutes))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        said, began = {"error": ""}, time.monotonic()
        if line.strip():
            step = int(line)
            try:
                checkpoints.save_now(step, {"params": make(step)}, DESCRIPTION)
            except saving.CheckpointError as error:
                said["error"] = str(error)
            except Exception as error:  # noqa: BLE001  judged by the test
                said["error"] = f"{type(error).__name__}: {error}"
            said["seconds"] = round(time.monotonic() - began, 1)
            said["steps"] = checkpoints.steps()
        else:
            said["step"], parts = checkpoints.restore_latest({"params": like})
            shards = [shard.data for shard in parts["params"]["a"].addressable_shards]
            said["sum"] = float(np.sum(shards))
        print(json.dumps(said), flush=True)
    checkpoints.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
