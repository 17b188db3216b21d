"""Reading compiled programs, against programs whose collectives and turns are known by hand."""
# ruff: noqa: E501

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.compute import conditionals, flops
from vit_jax.devices import meshes
from vit_jax.planning import collectives, cycles, hlo

# As libtpu 0.0.42.1 prints them, shortened: a loop of 32 turns that gathers a kernel in two pieces
# beside fusions, scatters what it reduces, and speaks to the other slice through the hosts.
TPU = """HloModule jit_step, is_scheduled=true

%condition (p: (s32[], bf16[8,128])) -> pred[] {
  %p = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %turn = s32[]{:T(128)} get-tuple-element(%p), index=0
  %turns = s32[]{:T(128)} constant(32)
  ROOT %less = pred[]{:T(512)} compare(%turn, %turns), direction=LT
}

%piece.1 (k: bf16[80,128]) -> bf16[1280,128] {
  %k = bf16[80,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gather.1 = bf16[1280,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%k), channel_id=7, replica_groups=mesh['axis_0'=16,'axis_1'=1,'axis_2'=16], device_ids=([16,16]T(1,0)) {'axis_0'}, dimensions={0}, frontend_attributes={chain_id="5"}
}

%piece.2 (k: bf16[80,128]) -> bf16[1280,128] {
  %k.2 = bf16[80,128]{1,0:T(8,128)(2,1)} parameter(0)
  %gather.2 = bf16[1280,128]{1,0:T(8,128)(2,1)S(1)} all-gather(%k.2), channel_id=7, replica_groups=mesh['axis_0'=16,'axis_1'=1,'axis_2'=16], device_ids=([16,16]T(1,0)) {'axis_0'}, dimensions={0}, frontend_attributes={chain_id="5"}
  ROOT %product = bf16[8,128]{1,0:T(8,128)(2,1)} convolution(%gather.2, %gather.2), dim_labels=bf_io->bf
}

%all-reduce-scatter.3 (g: f32[1280,128]) -> f32[80,128] {
  %g = f32[1280,128]{1,0:T(8,128)} parameter(0)
  %reduced = f32[1280,128]{1,0:T(8,128)} all-reduce(%g), channel_id=9, replica_groups=[16,16]<=[256], to_apply=%add
  ROOT %part = f32[80,128]{1,0:T(8,128)} dynamic-slice(%reduced), dynamic_slice_sizes={80,128}
}

%body (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %p.1 = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %start = bf16[1280,128]{1,0:T(8,128)(2,1)} fusion(%p.1), kind=kCustom, calls=%piece.1
  %work = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%p.1), kind=kOutput, calls=%piece.2, metadata={op_name="jit(step)/while/body/dot_general"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %scattered = f32[80,128]{1,0:T(8,128)} fusion(%work), kind=kCustom, calls=%all-reduce-scatter.3
  %out = (bf16[5,100]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, token[]) send(%work), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %next = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%p.1, %work)
}

ENTRY %main (a: bf16[8,128]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %moved = bf16[8,128]{0,1:T(8,128)(2,1)} copy(%a), backend_config={"window_config":{"estimated_cycles":"70"}}
  %begin = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%moved)
  %loop = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) while(%begin), condition=%condition, body=%body
  ROOT %end = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""


def test_collectives_of_a_tpu_program_are_counted_once_a_turn_as_what_they_do():
    found = collectives.find(hlo.parse(TPU), slices=2)
    assert [(c.kind, c.group, c.times, c.bytes, c.crosses_slices) for c in found] == [
        ("all-gather", 16, 32, 1280 * 128 * 2, False),
        ("reduce-scatter", 16, 32, 1280 * 128 * 4, False),
        ("all-reduce", 2, 32, 5 * 100 * 2, True),
    ]
    assert found[0].sent == 1280 * 128 * 2 * 15 / 16
    assert found[2].sent == 5 * 100 * 2  # Twice, and half of it each time.


def test_cycles_are_multiplied_by_turns_and_told_apart():
    counted = cycles.count(hlo.parse(TPU))
    assert counted["all"]["matrix products"] == counted["loops"]["matrix products"] == 32_000
    assert counted["all"]["data movement"] == 70 and counted["loops"]["data movement"] == 0
    assert cycles.largest(hlo.parse(TPU), 1)[0]["name"] == "work"


# Four turns of a loop over a switch with three branches, one of which has a switch of its own, and a
# kernel, of which the compiler estimates nothing.
BRANCHES = """HloModule jit_step, is_scheduled=true

%cheap (p: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %cheap.1 = f32[8]{0} negate(%p.1), backend_config={"window_config":{"estimated_cycles":"10"}}
}

%dear (p: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %dear.1 = f32[8]{0} cosine(%p.2), backend_config={"window_config":{"estimated_cycles":"1000"}}
}

%either (p: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  %yes = pred[] constant(true)
  ROOT %inner = f32[8]{0} conditional(%yes, %p.3, %p.3), true_computation=%cheap, false_computation=%dear, metadata={op_name="jit(step)/while/body/SCOPE/branch_2_fun/cond"}
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p.4 = (s32[], f32[8]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%p.4), index=0
  %turns = s32[] constant(4)
  ROOT %less = pred[] compare(%turn, %turns), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.5 = (s32[], f32[8]{0}) parameter(0)
  %index = s32[] get-tuple-element(%p.5), index=0
  %x = f32[8]{0} get-tuple-element(%p.5), index=1
  %y = f32[8]{0} conditional(%index, %x, %x, %x), branch_computations={%cheap, %dear, %either}, metadata={op_name="jit(step)/while/body/SCOPE/cond"}
  %z = f32[8]{0} custom-call(%y), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/while/body/attention/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv"}}
  ROOT %next = (s32[], f32[8]{0}) tuple(%index, %z)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[8]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[8]{0}) while(%begin), condition=%condition, body=%body
  ROOT %end = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_branches_are_counted_by_their_probability_or_the_most_expensive_alone():
    dearest = hlo.parse(BRANCHES.replace("SCOPE", "switch"))
    assert sum(cycles.count(dearest)["all"].values()) == 4 * 1000
    uniform = hlo.parse(BRANCHES.replace("/SCOPE/cond", "/equally_likely/cond"))
    # The switch within has no such name of its own.
    assert sum(cycles.count(uniform)["all"].values()) == round(4 * (10 + 1000 + 1000) / 3)
    rows = cycles.conditionals(uniform)
    assert [(r["branches"], r["counted"], r["cycles"]) for r in rows] == [
        (3, "equally likely", 2680),
        (2, "the most expensive", 1333),
    ]


def test_a_branch_that_is_named_to_run_in_one_of_many_steps_is_counted_as_often():
    text = BRANCHES.replace("/SCOPE/branch_2_fun", "/one_step_in_10")
    program = hlo.parse(text.replace("/SCOPE/cond", "/equally_likely/cond"))
    row = cycles.conditionals(program)[1]
    assert (row["counted"], row["cycles"]) == ("one step in 10", round(4 / 3 * (100 + 9)))
    assert sum(cycles.count(program)["all"].values()) == round(4 / 3 * (10 + 1000 + 109))


def test_products_of_a_branch_that_runs_in_one_of_many_steps_are_counted_as_often():
    def step(due, x):
        with jax.named_scope(conditionals.one_step_in(10)):
            x = jax.lax.cond(due, lambda x: x @ x, lambda x: x, x)
        return jax.lax.cond(due, lambda x: x @ x, lambda x: x, x)

    jaxpr = jax.make_jaxpr(step)(True, jnp.ones((10, 10)))
    assert flops.count(jaxpr) == 200 + 2000


def test_cycles_of_kernels_are_those_that_were_counted_elsewhere():
    program = hlo.parse(BRANCHES)
    assert cycles.count(program)["all"]["attention"] == 0
    counted = dataclasses.replace(program, kernels={"z": 70})
    assert cycles.count(counted)["loops"]["attention"] == 4 * 70


def test_an_instruction_goes_on_where_an_attribute_of_a_kernel_breaks_the_line():
    attribute = 'custom_call_target="tpu_custom_call"'
    broken = f'{attribute}, frontend_attributes={{kernel_metadata={{\n"block":"{{384}}"\n}}}}'
    whole, split = (hlo.parse(text) for text in (BRANCHES, BRANCHES.replace(attribute, broken)))
    assert [i.name for i, _ in split.steps()] == [i.name for i, _ in whole.steps()]
    kernel = next(i for i, _ in split.steps() if i.name == "z")
    assert kernel.source.endswith("attention/pallas_call")


def test_arrays_are_as_large_as_their_tiles_and_only_where_they_lie():
    padded, small, plain = hlo.shapes_in(
        "bf16[32,257,1280]{2,1,0:T(8,128)(2,1)} f32[4]{0:T(128)S(1)} f32[3,5]{1,0}"
    )
    assert (padded.bytes, padded.device_bytes) == (32 * 257 * 1280 * 2, 32 * 264 * 1280 * 2)
    assert (small.bytes, small.device_bytes) == (16, 0)
    assert plain.device_bytes == 60


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh({"data": 2, "fsdp": 4, "tensor": 1})


def test_collectives_and_turns_of_a_program_compiled_here(mesh):
    def step(kernels, x):
        def layer(x, kernel):
            whole = jax.lax.with_sharding_constraint(kernel, P())
            return jnp.tanh(x @ whole), None

        return jax.lax.scan(layer, x, kernels)[0].sum()

    kernels = jax.ShapeDtypeStruct(
        (6, 64, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp"))
    )
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=meshes.batch_sharding(mesh))
    with jax.set_mesh(mesh):
        program = hlo.parse(jax.jit(step).lower(kernels, x).compile().as_text())
    assert {(c.kind, c.group, c.times, c.bytes) for c in collectives.find(program)} == {
        ("all-gather", 4, 6, 64 * 64 * 4),
        ("all-reduce", 8, 1, 4),
    }
    assert collectives.summary(collectives.find(program))[0]["bytes"] == 6 * 64 * 64 * 4


def test_operations_are_counted_through_loops_recomputation_and_convolutions():
    kernels = jnp.zeros((5, 8, 8))

    def loss(kernels, x):
        layer = jax.checkpoint(lambda x, kernel: (jnp.sin(x @ kernel), None))
        return jax.lax.scan(layer, x, kernels)[0].sum()

    x = jnp.zeros((3, 8))
    product = 2 * 3 * 8 * 8
    assert flops.count(jax.make_jaxpr(loss)(kernels, x)) == 5 * product
    # Forward, again, and two gradients.
    assert flops.count(jax.make_jaxpr(jax.grad(loss, (0, 1)))(kernels, x)) == 5 * 4 * product

    def convolve(image, kernel, stride):
        return jax.lax.conv_general_dilated(
            image, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).sum()

    image, kernel = jnp.zeros((2, 8, 8, 3)), jnp.zeros((2, 2, 3, 4))
    forward = 2 * (2 * 4 * 4 * 4) * (2 * 2 * 3)
    assert flops.count(jax.make_jaxpr(lambda i, k: convolve(i, k, 2))(image, kernel)) == forward
    both = jax.make_jaxpr(jax.grad(lambda i, k: convolve(i, k, 2), (0, 1)))(image, kernel)
    assert flops.count(both) == 3 * forward


def test_what_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("module @jit_step {}")
