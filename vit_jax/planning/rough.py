"""A rough estimate of what a run takes, without compiling it: bounds from below. What a step really needs,
`vit_jax plan` finds by compiling it.
"""

import functools
import math
import time

import jax
import numpy as np

from vit_jax.base import durations
from vit_jax.data import batches
from vit_jax.devices import chips, local
from vit_jax.training.assembly import Assembly

# Of the kinds in `chips`, those that users are most likely to have.
_SHOWN = ("TPU v5e", "NVIDIA H100 80GB HBM3")
_SIDE = 1024  # of the matrices whose product measures the CPU


def estimate(assembly: Assembly, on_cpu: bool) -> dict:
    """Plain data: `state_bytes` (parameters, optimizer state, averages), `gradient_bytes`, `batch_bytes`; `flops` of
    all steps; `seconds` at least, by device: one chip of each kind at its published bfloat16 peak, and `cpu`: this
    machine's at the rate of a float32 product, measured now; `None` unless it would train `on_cpu`.
    """
    config, state = assembly.config, jax.eval_shape(assembly.init, jax.random.key(0))
    batch = batches.spec(
        config,
        num_classes=assembly.num_classes,
        multi_label=assembly.multi_label,
        masks=assembly.masks,
    )
    flops = assembly.flops()
    seconds = {kind: flops / chips.PEAK_BFLOAT16[kind] for kind in _SHOWN}
    cpu = flops / _product_rate() if on_cpu else None
    return {
        "state_bytes": _bytes(state),
        "gradient_bytes": _bytes(state.params),
        "batch_bytes": _bytes(batch),
        "flops": flops,
        "seconds": seconds | {"cpu": cpu},
    }


def text(estimated: dict) -> str:
    """What `estimate` found, as a line."""
    memory = sum(estimated[f"{name}_bytes"] for name in ("state", "gradient", "batch"))
    seconds = estimated["seconds"]
    places = [f"one {kind} {_time(seconds[kind])}" for kind in _SHOWN]
    if seconds["cpu"] is not None:
        places.insert(0, f"this CPU ({local.cores()} cores) {_time(seconds['cpu'])}")
    return (
        f"estimate, at least: memory {_size(memory)} and the activations; training at full speed on "
        f"{', '.join(places)}, without compiling and reading images ('vit_jax plan' compiles the step and counts them)"
    )


def _time(seconds: float) -> str:
    return durations.duration_text(seconds) if seconds >= 1 else "less than 1 s"


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _bytes(tree) -> int:
    return sum(x.dtype.itemsize * math.prod(x.shape) for x in jax.tree.leaves(tree))


@functools.cache
def _product_rate() -> float:
    """Operations a second of a float32 product of large matrices on this CPU, the best of a few, measured once."""
    a = np.ones((_SIDE, _SIDE), np.float32)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
    return 2 * _SIDE**3 / min(times)
