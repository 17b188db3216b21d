"""What the compiled step of every family says between eight simulated devices: what was meant and no
more.
"""

import math

import jax
import pytest

from vit_jax.base import patterns
from vit_jax.config import default_config
from vit_jax.devices import meshes
from vit_jax.planning import collectives, compiling, hlo, plan, target

# A number that no parameter has as an axis, so that whatever has it is of the batch.
BATCH = 1000
SMALL = 1024
FAMILIES = {
    "vit": ("ViT-mu/8", dict(depth=3, width=64, mlp_dim=256, heads=4, pool="map", qk_norm=True)),
    "mixer": ("Mixer-S/16", dict(patch=8, depth=3, width=64, mlp_dim=256, token_mlp_dim=64)),
    "hybrid": (
        "R26+ViT-S/32",
        dict(units=(2, 2), width_factor=0.5, patch=2, depth=3, width=64, mlp_dim=256, heads=4),
    ),
    "resnet": ("BiT-R26x1", dict(units=(3, 3), width_factor=0.5)),
}
MESHES = {"data": (8, 1, 1), "fsdp": (1, 8, 1), "tensor": (4, 1, 2), "mixed": (2, 2, 2)}
# Four seconds each. Tensor parallelism cuts heads and MLPs, of which a ResNet has none.
QUICK = [("vit", "mixed")]
SLOW = [
    ("mixer", "mixed"),
    ("vit", "data"),
    ("vit", "fsdp"),
    ("vit", "tensor"),
    ("hybrid", "fsdp"),
    ("mixer", "data"),
    ("mixer", "fsdp"),
    ("mixer", "tensor"),
    ("hybrid", "data"),
    ("hybrid", "mixed"),
    ("resnet", "data"),
    ("resnet", "fsdp"),
]
CASES = QUICK + [pytest.param(case, marks=pytest.mark.slow) for case in SLOW]
# The program is looked at, never run.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def step_of(family: str, mesh: str) -> compiling.Step:
    name, options = FAMILIES[family]
    config = default_config()
    config.data.image_size, config.batch_size, config.duration = 32, BATCH, "10 steps"
    config.model.name = name
    for option, value in options.items():
        config.model[option] = value
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = MESHES[mesh]
    config.mesh.fsdp_min_size = SMALL
    assembly = plan.make_assembly(config, num_classes=10, examples=1000)
    return compiling.prepare(assembly, target.find("cpu:8"))


def size(leaf) -> int:
    return leaf.size * leaf.dtype.itemsize


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case), scope="module")
def compiled(request):
    family, mesh = request.param
    step = step_of(family, mesh)
    executable = step.lowered.compile(compiler_options=FAST)
    return mesh, step, executable, collectives.find(hlo.parse(executable.as_text()))


def test_only_what_was_meant_moves_between_devices(compiled):
    mesh, step, executable, found = compiled
    params = jax.tree.leaves(step.state.params)
    stack = {3}  # Depth and units of all families here.
    whole = sum(map(size, params))

    # The batch stays where it is.
    assert not [c for c in found for s in c.shapes if BATCH in s.dims]
    assert {c.kind for c in found} <= {"all-reduce", "all-gather", "reduce-scatter", "collective-permute"}  # fmt: skip

    # Without FSDP parameters are gathered once, when they are updated; standardised kernels, whose
    # backward pass is sharded, in the forward and the backward pass too. Under FSDP a layer of one
    # of them at a time, at most in the forward pass and again in the backward pass.
    gathers = [c for c in found if c.kind == "all-gather"]
    if mesh in ("data", "tensor"):
        standardised = any("conv" in name for name in patterns.names(step.state.params))
        most = 2.5 if standardised else 1.02
        assert 0.5 * whole < sum(c.times * c.bytes for c in gathers) < most * whole
    else:
        one_layer = max(size(p) // (p.shape[0] if p.shape[0] in stack else 1) for p in params)
        assert gathers and max(c.bytes for c in gathers) <= one_layer
        assert sum(c.times * c.bytes for c in gathers) <= 2.05 * whole

    # Gradients are summed once: what crosses all replicas is as large as the parameters.
    if mesh != "mixed":
        replicas = meshes.batch_shards(step.mesh)
        cut = whole / step.mesh.shape["tensor"]
        reduced = sum(
            c.times * c.bytes
            for c in found
            if c.kind in ("all-reduce", "reduce-scatter") and c.group == replicas
        )
        most = whole if mesh != "tensor" else 1.35 * cut  # What tensor leaves whole.
        assert 0.5 * cut < reduced < 1.05 * most


def test_every_large_array_of_the_state_is_cut_over_all_devices_but_replicas(compiled):
    mesh, step, executable, _ = compiled
    fsdp = step.mesh.shape["fsdp"]
    for leaf in jax.tree.leaves((step.state.params, step.state.opt_state)):
        if fsdp > 1 and leaf.size >= SMALL:
            part = math.prod(leaf.sharding.shard_shape(leaf.shape))
            assert part <= leaf.size / fsdp, (leaf.shape, leaf.sharding)
    # And so are the arguments that the program takes: nothing was copied whole on the way in.
    batch = BATCH // (step.mesh.shape["data"] * fsdp) * (32 * 32 * 3 + 4)
    taken = executable.memory_analysis().argument_size_in_bytes
    assert taken == pytest.approx(step.state_bytes() + batch, rel=0.02)
