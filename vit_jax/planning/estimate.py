"""How long a step takes: a floor from what the chip can do at best, a figure from the compiler's
cycles or a GPU's kernels, a ceiling where nothing overlaps.
"""

from collections.abc import Mapping

from vit_jax.devices.chips import Gpu
from vit_jax.planning import roofline
from vit_jax.planning.collectives import Collective
from vit_jax.planning.target import Target

BLIND_GPU = {
    "floor": "every kernel at the published peak of products or memory, one after another; or the network, if that is "
    "longer",
    "expected": f"products reach {roofline.USUAL_PRODUCTS:.0%} of the peak, attention {roofline.USUAL_ATTENTION:.0%}, "
    f"memory {roofline.USUAL_MEMORY:.0%} of its rate, and a kernel takes {1e6 * roofline.LAUNCH_SECONDS:.0f} µs more: "
    "shares measured with ViT-B/16 on an H100, not with this program; blind to caches, autotuning and the input "
    "pipeline",
    "ceiling": "expected, then all of the network's time with nothing beside it",
}
BLIND = {
    "floor": "each operation at the matrix units' published peak or the memory's, kernels by their bundles, the "
    "network hidden behind them; blind to tiles that are not filled and to vector units",
    "cycles": "the compiler's count of each operation, one after the other, and of kernels their scheduled bundles: "
    "it was 10 to 40 % too high for two published runs; blind to overlap, waiting and the input pipeline",
    "ceiling": "cycles, then all of the network's time with nothing beside it, on one axis of the torus",
}


def step_seconds(
    target: Target,
    *,
    operations: float,
    flops: float,
    arguments: int,
    temporaries: int,
    cycles: int,
    collectives: list[Collective],
) -> dict | None:
    """Seconds of a step by each basis; `None` for devices whose rates are not known.

    Args:
      target: where it runs.
      operations: seconds of all of them at the least, see `tpu_roofline`.
      flops: of products of a device.
      arguments, temporaries: bytes of a device, each read and written at least once.
      cycles: the compiler's, of a device.
      collectives: of a step.

    Returns:
      {"operations", "products", "memory", "network", "slices", "cycles"}, their parts, and {"floor", "expected",
      "ceiling"}. `slices` is `None` where the network between slices has no published rate.
    """
    tpu = target.tpu
    if tpu is None:
        return None
    inside = sum(c.times * c.sent for c in collectives if not c.crosses_slices)
    between = sum(c.times * c.sent for c in collectives if c.crosses_slices)
    ici, dcn = tpu.ici_rate / tpu.devices_per_chip, tpu.dcn_rate
    parts = {
        "operations": operations,
        "products": flops / (tpu.peak / tpu.devices_per_chip),
        "memory": 2 * (arguments + temporaries) / (tpu.hbm_rate / tpu.devices_per_chip),
        "network": inside / ici,
        "slices": between / (dcn / tpu.devices_per_chip) if dcn else (None if between else 0.0),
        "cycles": cycles / tpu.clock,
    }
    slices = parts["slices"] or 0.0
    one_axis = parts["network"] * tpu.dimensions
    expected = max(parts["cycles"], one_axis, slices)
    return parts | {
        "floor": max(
            *(parts[name] for name in ("operations", "products", "memory", "network")), slices
        ),
        "expected": expected,
        "ceiling": parts["cycles"] + one_axis + slices,
    }


def gpu_seconds(gpu: Gpu, parts: Mapping[str, Mapping], collectives: list[Collective]) -> dict:
    """Seconds of a step on GPUs, named as those of `step_seconds`.

    Args:
      gpu: what one can do.
      parts: see `roofline.count_parts`.
      collectives: of a step.

    Returns:
      {"products", "memory", "network", "slices", "kernels"}, their parts: products and all bytes at
      their peaks, collectives over NVLink and beyond it, kernels as is usual; and {"floor",
      "expected", "ceiling"}.
    """
    inside = outside = 0.0
    for collective in collectives:
        sent = collective.times * collective.sent
        if collective.crosses_slices:
            # A ring leaves an island once, over the adapters of all its GPUs that take part.
            adapters = collective.group / collective.islands
            outside += sent / min(gpu.nvlink_rate, adapters * gpu.network_rate)
        else:
            inside += sent / gpu.nvlink_rate
    kernels = roofline.sum_of(parts, "usual")
    network = inside + outside
    return {
        "products": roofline.sum_of(parts, "flops") / gpu.peak,
        "memory": roofline.sum_of(parts, "bytes") / gpu.hbm_rate,
        "network": inside,
        "slices": outside,
        "kernels": kernels,
        "floor": max(roofline.sum_of(parts, "floor"), network),
        "expected": max(kernels, network),
        "ceiling": kernels + network,
    }
