"""Bundles and bytes of operations, in a program whose counts are known by hand."""
# ruff: noqa: E501

import pathlib

from tests.planning import schedule
from vit_jax.planning import hlo, tpu_roofline

# As libtpu 0.0.42.1 prints them, shortened: a slice of stacked tokens is taken, another replaced, from the
# large memory and to it, and both are added in the fast one, S(1).
PROGRAM = """HloModule jit_step, is_scheduled=true

%take (t: bf16[12,64,256], i: s32[]) -> bf16[64,256] {
  %t = bf16[12,64,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %slice = bf16[1,64,256]{2,1,0:T(8,128)(2,1)} dynamic-slice(%t, %i), dynamic_slice_sizes={1,64,256}
  ROOT %flat = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} bitcast(%slice)
}

%put (t.1: bf16[12,64,256], x: bf16[64,256], i.1: s32[]) -> bf16[12,64,256] {
  %t.1 = bf16[12,64,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %i.1 = s32[]{:T(128)S(6)} parameter(2)
  %row = bf16[1,64,256]{2,1,0:T(8,128)(2,1)} bitcast(%x)
  ROOT %put.1 = bf16[12,64,256]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%t.1, %row, %i.1)
}

ENTRY %main (tokens: bf16[12,64,256], index: s32[]) -> bf16[12,64,256] {
  %tokens = bf16[12,64,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %index = s32[]{:T(128)S(6)} parameter(1)
  %taken = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} fusion(%tokens, %index), kind=kLoop, calls=%take, backend_config={"window_config":{"estimated_cycles":"900","iteration_bounds":["4","1"]}}
  %again = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} fusion(%tokens, %index), kind=kLoop, calls=%take, backend_config={"window_config":{"estimated_cycles":"900","iteration_bounds":["4","1"]}}
  %sum = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} add(%taken, %again), backend_config={"window_config":{"estimated_cycles":"800","iteration_bounds":["2"]}}
  %kernel.3 = bf16[64,256]{1,0:T(8,128)(2,1)S(1)} custom-call(%sum), custom_call_target="tpu_custom_call"
  ROOT %stored = bf16[12,64,256]{2,1,0:T(8,128)(2,1)} fusion(%tokens, %kernel.3, %index), kind=kLoop, calls=%put, backend_config={"window_config":{"estimated_cycles":"700","iteration_bounds":["2"]}}
}
"""
SLICE = 64 * 256 * 2  # bytes


def test_operations_take_their_bundles_or_as_long_as_their_bytes():
    bundles = {"taken": 25, "sum": 60, "kernel.3": 7}
    rows = schedule.count(hlo.parse(PROGRAM), bundles, {"kernel": 64}, rate=SLICE / 200, peak=1.0)
    assert {row.instruction.name: (row.estimated, row.scheduled, row.cycles) for row in rows} == {
        "taken": (900, 100, 200),
        "again": (900, 100, 200),  # The schedule of `taken`, which is equal.
        "sum": (800, 120, 120),
        "kernel.3": (448, 448, 448),
        "stored": (700, None, 700),
    }
    assert {row.instruction.name: row.waiting for row in rows} == {
        "taken": 200, "again": 200, "sum": 0, "kernel.3": 0, "stored": 200,
    }  # fmt: skip


def test_bundles_are_read_from_what_the_compiler_writes(tmp_path: pathlib.Path):
    name = "1795-{}-00-schedule-analysis_final_bundles.txt"
    text = (
        "Schedule analysis:\n\ttotal scheduled bundles:    955\n\tempty scheduled bundles:    9\n"
    )
    (tmp_path / name.format("copy-start.3")).write_text(text)
    (tmp_path / name.format("custom-call.4")).write_text("Schedule analysis:\n")
    assert schedule.read_bundles(tmp_path) == {"copy-start.3": 955}


CONVOLUTIONS = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[8,14,14,3], k: bf16[3,3,3,16]) -> bf16[8,7,7,16] {
  %x = bf16[8,14,14,3]{3,2,1,0} parameter(0)
  %k = bf16[3,3,3,16]{3,2,1,0} parameter(1)
  %a = bf16[8,64,32]{2,1,0} parameter(2)
  %b = bf16[32,8,16]{2,1,0} parameter(3)
  %same = bf16[8,14,14,16]{3,2,1,0} convolution(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, backend_config={"estimated_cycles":"9"}
  %heads = bf16[8,64,16]{2,1,0} convolution(%a, %b), window={size=8 stride=7 pad=0_7 lhs_dilate=8}, dim_labels=0bf_i0o->0bf, backend_config={"estimated_cycles":"9"}
  ROOT %half = bf16[8,7,7,16]{3,2,1,0} convolution(%x, %k), window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_01io->b01f, backend_config={"estimated_cycles":"9"}
}
"""


def test_of_a_convolution_only_what_meets_the_image_counts():
    program = hlo.parse(CONVOLUTIONS)
    shapes = {i.name: i.shapes for i in program.computations["main"]}
    flops = {
        i.name: tpu_roofline.product_flops(program, i, shapes) for i in program.computations["main"]
    }
    assert flops == {
        "x": 0, "k": 0, "a": 0, "b": 0,
        # 14 x 14 windows of 3 x 3, less one row of the first and the last of each side.
        "same": 2 * 8 * 3 * 16 * (3 * 14 - 2) ** 2,
        # Eight products, (64, 32) by (32, 16) each, as XLA writes an axis that both have.
        "heads": 2 * 8 * 64 * 32 * 16,
        "half": 2 * 8 * 3 * 16 * (3 * 7 - 1) ** 2,
    }  # fmt: skip


def test_an_array_that_is_given_three_times_is_read_once():
    program = hlo.parse(
        PROGRAM.replace("custom-call(%sum)", "custom-call(%tokens, %tokens, %tokens)")
    )
    shapes = {i.name: i.shapes for lines in program.computations.values() for i in lines}
    kernel = next(i for i in program.computations["main"] if i.name == "kernel.3")
    assert tpu_roofline.large_bytes(program, kernel, shapes) == 12 * SLICE
