"""Plans for GPUs that are not here: the roofline by hand, what crosses NVLink, errors, and every recipe lowered
for CUDA. What needs the compiler for GPUs is in `test_gpu_golden.py`.
"""
# ruff: noqa: E501

import dataclasses
import json

import jax
import jaxlib
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from tests.planning import golden
from tests.planning.test_plan import plan_taking, small_config
from tests.repeats import slow_unless
from tests.test_configs import teacher  # noqa: F401, a fixture
from vit_jax.base.errors import ConfigError
from vit_jax.compute import platform
from vit_jax.devices import chips
from vit_jax.planning import (
    collectives,
    compiling,
    estimate,
    fit,
    hlo,
    plan,
    report,
    roofline,
    target,
)

H100 = chips.GPUS["h100"]

# As XLA prints them, shortened: a loop of 12 turns that reads a slice of a stack, multiplies, writes to another and
# attends; before it a fill and a transposition, after it products by cuBLAS and cuDNN, and a gather.
GPU = """HloModule jit_step, is_scheduled=true

%fused_slice (p: bf16[12,256,768]) -> bf16[256,768] {
  %stack = bf16[12,256,768]{2,1,0} parameter(0)
  %turn.1 = s32[] parameter(1)
  %slice = bf16[1,256,768]{2,1,0} dynamic-slice(%stack, %turn.1), dynamic_slice_sizes={1,256,768}
  ROOT %flat = bf16[256,768]{1,0} bitcast(%slice)
}

%gemm (a: bf16[256,768], b: bf16[768,3072]) -> bf16[256,3072] {
  %a.1 = bf16[256,768]{1,0} parameter(0)
  %b.1 = bf16[768,3072]{1,0} parameter(1)
  ROOT %dot = bf16[256,3072]{1,0} dot(%a.1, %b.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_update (s: bf16[12,256,3072], x: bf16[256,3072]) -> bf16[12,256,3072] {
  %whole = bf16[12,256,3072]{2,1,0} parameter(0)
  %turn.2 = s32[] parameter(2)
  %x.1 = bf16[256,3072]{1,0} parameter(1)
  %one = bf16[1,256,3072]{2,1,0} bitcast(%x.1)
  ROOT %updated = bf16[12,256,3072]{2,1,0} dynamic-update-slice(%whole, %one, %turn.2)
}

%fused_gelu (x: bf16[256,3072]) -> bf16[256,3072] {
  %x.2 = bf16[256,3072]{1,0} parameter(0)
  ROOT %tanh = bf16[256,3072]{1,0} tanh(%x.2)
}

%sliced (stack: bf16[3,64,32], left: bf16[128,64]) -> (bf16[128,32], s8[4194304]) {
  %left = bf16[128,64]{1,0} parameter(1)
  %stack = bf16[3,64,32]{2,1,0} parameter(0)
  %layer = bf16[1,64,32]{2,1,0} slice(%stack), slice={[1:2], [0:64], [0:32]}
  %right = bf16[64,32]{1,0} bitcast(%layer)
  ROOT %call = (bf16[128,32]{1,0}, s8[4194304]{0}) custom-call(%left, %right), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}

%fill () -> bf16[12,256,3072] {
  %zero.1 = bf16[] constant(0)
  ROOT %filled = bf16[12,256,3072]{2,1,0} broadcast(%zero.1), dimensions={}
}

%condition (p: (s32[])) -> pred[] {
  %p.1 = (s32[]) parameter(0)
  ROOT %less = pred[] custom-call(%p.1), custom_call_target="less"
}

%body (p: (s32[], bf16[12,256,768], bf16[12,256,3072])) -> (s32[], bf16[12,256,768], bf16[12,256,3072]) {
  %p.2 = (s32[], bf16[12,256,768]{2,1,0}, bf16[12,256,3072]{2,1,0}) parameter(0)
  %turn = s32[] get-tuple-element(%p.2), index=0
  %in = bf16[12,256,768]{2,1,0} get-tuple-element(%p.2), index=1
  %out = bf16[12,256,3072]{2,1,0} get-tuple-element(%p.2), index=2
  %kernel = bf16[768,3072]{1,0} constant({...})
  %read = bf16[256,768]{1,0} fusion(%in, %turn), kind=kLoop, calls=%fused_slice
  %product = bf16[256,3072]{1,0} fusion(%read, %kernel), kind=kCustom, calls=%gemm
  %gelu = bf16[256,3072]{1,0} fusion(%product), kind=kLoop, calls=%fused_gelu
  %write = bf16[12,256,3072]{2,1,0} fusion(%out, %gelu, %turn), kind=kLoop, calls=%fused_update
  %q = bf16[2,198,12,64]{3,2,1,0} constant({...})
  %forward = (bf16[2,12,198,64]{3,1,2,0}, f32[2,12,198]{2,1,0}, u8[4096]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %backward = (bf16[2,12,198,64]{3,1,2,0}, bf16[2,12,198,64]{3,1,2,0}, bf16[2,12,198,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %next = (s32[], bf16[12,256,768]{2,1,0}, bf16[12,256,3072]{2,1,0}) tuple(%turn, %in, %write)
}

ENTRY %main (a: bf16[12,256,768]) -> bf16[12,256,3072] {
  %a = bf16[12,256,768]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %fills = bf16[12,256,3072]{2,1,0} fusion(), kind=kLoop, calls=%fill
  %begin = (s32[], bf16[12,256,768]{2,1,0}, bf16[12,256,3072]{2,1,0}) tuple(%zero, %a, %fills)
  %loop = (s32[], bf16[12,256,768]{2,1,0}, bf16[12,256,3072]{2,1,0}) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %turned = bf16[12,256,768]{0,1,2} copy(%a)
  %images = f32[8,32,32,16]{3,2,1,0} constant({...})
  %filters = f32[3,3,16,32]{3,2,1,0} constant({...})
  %convolved = (f32[8,32,32,32]{3,2,1,0}, u8[1000]{0}) custom-call(%images, %filters), custom_call_target="__cudnn$convForward", dim_labels=b01f_01io->b01f
  %lhs = bf16[128,64]{1,0} constant({...})
  %rhs = bf16[64,32]{1,0} constant({...})
  %blas = (bf16[128,32]{1,0}, s8[4194304]{0}) custom-call(%lhs, %rhs), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %stacked = bf16[3,64,32]{2,1,0} constant({...})
  %blas_of_layer = (bf16[128,32]{1,0}, s8[4194304]{0}) fusion(%stacked, %lhs), kind=kCustom, calls=%sliced
  %gather-start = (bf16[100]{0}, bf16[1600]{0}) all-gather-start(%lhs), channel_id=1, replica_groups=[4,16]<=[16,4]T(1,0), dimensions={0}
  %gathered = bf16[1600]{0} all-gather-done(%gather-start)
  ROOT %end = bf16[12,256,3072]{2,1,0} get-tuple-element(%loop), index=2
}
"""


def test_kernels_are_counted_by_what_they_move_and_multiply():
    program = hlo.parse(GPU)
    kernels = roofline.kernels_of(program, H100)
    counted = roofline.count_parts(roofline.weigh(program, kernels), kernels)
    tokens, hidden, stream = 2 * 256 * 768, 2 * 256 * 3072, 2 * 12 * 256 * 768
    assert counted["stack copies"]["kernels"] == 24
    # Of a stack, the slice that is read, and what is written to it, count. The turn is a number.
    assert counted["stack copies"]["bytes"] == 12 * (2 * tokens + 4 + 2 * hidden + 4)
    assert counted["elementwise and reductions"]["bytes"] == 12 * 2 * hidden
    assert counted["fills"]["bytes"] == 12 * hidden
    assert (counted["transposes"]["kernels"], counted["transposes"]["bytes"]) == (1, 2 * stream)
    q, logsumexp = 2 * 2 * 198 * 12 * 64, 4 * 2 * 12 * 198
    assert counted["attention"]["kernels"] == 24
    assert counted["attention"]["bytes"] == 12 * (4 * q + logsumexp + 6 * q)
    assert counted["attention"]["flops"] == 12 * 14 * 2 * 12 * 198**2 * 64
    convolution, blas = 2 * 8 * 32 * 32 * 32 * 3 * 3 * 16, 2 * 128 * 64 * 32
    products = 12 * 2 * 256 * 768 * 3072 + convolution + 2 * blas
    assert counted["matrix products"]["flops"] == products
    for name in ("blas", "blas_of_layer"):  # no workspace, and of the stack one layer
        assert kernels[name].bytes == 2 * (128 * 64 + 64 * 32 + 128 * 32)
    longest = roofline.largest_kernels(program, kernels, 1)[0]
    assert (longest["name"], longest["times"]) == ("backward", 12)


def test_a_kernel_takes_as_long_as_its_products_or_its_bytes():
    kernels = roofline.kernels_of(hlo.parse(GPU), H100)
    hidden = 2 * 256 * 3072
    assert kernels["gelu"].floor == pytest.approx(2 * hidden / 3.35232e12)
    assert kernels["gelu"].usual == pytest.approx(
        2 * hidden / 3.35232e12 / roofline.USUAL_MEMORY + 2e-6
    )
    fast_memory = dataclasses.replace(H100, hbm_rate=1e18)
    kernels = roofline.kernels_of(hlo.parse(GPU), fast_memory)
    product = 2 * 256 * 768 * 3072
    assert kernels["product"].floor == pytest.approx(product / 989.4e12)
    assert kernels["product"].usual == pytest.approx(
        product / 989.4e12 / roofline.USUAL_PRODUCTS + 2e-6
    )
    assert kernels["forward"].usual == pytest.approx(
        kernels["forward"].flops / 989.4e12 / roofline.USUAL_ATTENTION + 2e-6
    )
    # float32 is multiplied as TF32, at half the rate.
    assert kernels["convolved"].floor == pytest.approx(kernels["convolved"].flops / 494.7e12)


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("{{0,2},{1,3}}", [0, 2]),
        ("[2,4]<=[8]", [0, 1, 2, 3]),
        ("[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("mesh['a'=2,'b'=4] {'a'}", [0, 4]),
        ("mesh['a'=2,'b'=4] {'b'}", [0, 1, 2, 3]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [0, 1]),
        ("mesh['a'=8] {'a':(2)2}", [0, 2]),
        ("mesh['a'=4,'b'=2] {'a':(1)2,'b'}", [0, 1, 4, 5]),
    ],
)
def test_the_devices_of_a_collective_are_read_in_every_form_that_xla_prints(groups, first):
    text = f"ENTRY %main (a: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} parameter(0)\n  ROOT %sum = f32[8]{{0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add\n}}\n"
    (instruction,) = (i for i, _ in hlo.parse(text).steps() if i.opcode == "all-reduce")
    assert collectives._first_group(instruction) == first


def test_what_leaves_nvlink_takes_the_network_of_all_gpus_that_take_part():
    program = hlo.parse(GPU)
    near = collectives.find(program, islands=[0] * 64)
    far = collectives.find(program, islands=[i // 8 for i in range(64)])
    assert [(c.group, c.crosses_slices, c.islands) for c in near + far] == [
        (16, False, 1),
        (16, True, 8),
    ]
    parts = {"matrix products": dict(kernels=1, bytes=0, flops=0, floor=1e-9, usual=2e-9)}
    sent = 2 * 1600 * 15 / 16
    assert estimate.gpu_seconds(H100, parts, near)["network"] == pytest.approx(sent / 450e9)
    seconds = estimate.gpu_seconds(H100, parts, far)
    assert seconds["slices"] == pytest.approx(sent / (2 * 50e9))  # two GPUs of each host
    assert seconds["ceiling"] == pytest.approx(2e-9 + seconds["slices"])
    assert seconds["expected"] == seconds["floor"] == seconds["slices"]


@pytest.fixture(scope="module")
def plans():
    """Plans of a small model for H100s, of what XLA compiles for CPUs: only the program differs. The second is for GPUs
    whose memory is a byte too small.
    """
    assembly = plan.make_assembly(small_config())
    where = target.Target("h100:8", 1, None, target.find("cpu:8").devices, H100)
    step = compiling.prepare(assembly, where)
    compiled = compiling.compile(step)
    small = dataclasses.replace(H100, memory=round(compiled.memory.peak / 0.9) - 1)
    with pytest.MonkeyPatch.context() as patched:  # compiled once for both
        patched.setattr(compiling, "prepare", lambda *_: step)
        patched.setattr(compiling, "compile", lambda _: compiled)
        return [
            plan.make_plan(assembly, dataclasses.replace(where, gpu=gpu), price_per_chip_hour=3)
            for gpu in (H100, small)
        ]


def test_a_plan_for_gpus_is_plain_data_and_readable(plans):
    made = plans[0]
    assert json.loads(json.dumps(made)) == made
    assert made["memory"]["capacity"] == round(0.9 * 84942979072)
    products = made["roofline"]["matrix products"]["flops"]
    assert products == pytest.approx(made["flops_per_device"], rel=0.05)
    seconds, run = made["seconds"], made["run"]
    assert 0 < seconds["floor"] <= seconds["expected"] <= seconds["ceiling"]
    assert run["cost"] == pytest.approx([3 * hours for hours in run["chip_hours"]])
    text = report.text(made)
    assert "h100:8: 8 chips" in text and "beyond NVLink" in text and "% of 71.20 GiB" in text
    assert all(part in text for part, row in made["roofline"].items() if row["kernels"])


def test_what_exceeds_nine_tenths_of_a_gpus_memory_does_not_fit(plans):
    refused = plans[1]
    assert not refused["fits"] and 0 < refused["missing_bytes"] <= 2
    assert "Out of memory" in report.text(refused)


def test_fit_tries_to_unroll_the_layers():
    def attempt(choice):
        return plan_taking(20 + (choice.remat != "none") + 5 * (choice.unroll == 1))

    tried = fit.search(attempt, [1], accumulate=1, unrolls=(1, 0))
    best = fit.best_of(tried)
    assert best == fit.Choice(1, "none", 1, unroll=0)
    assert best.options(small_config())[-1] == "--config.model.unroll=0"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100:3x5x7", "h100:GPUS or h100:HOSTSxGPUS, e.g. h100:8 or h100:8x8"),
        ("h100", "must be h100:GPUS"),
        ("h100:0", "must be h100:GPUS"),
        ("h100:64", "at most 8 h100 GPUs: set h100:8x8"),
        ("gb200:2x8", "at most 4 gb200 GPUs: set gb200:4x4"),
        ("h10:8", "unknown kind 'h10'; did you mean 'h100'"),
    ],
)
def test_gpus_that_are_not_there_are_errors_that_say_what_is(name, words):
    with pytest.raises(ConfigError, match=words):
        target.find(name)


def test_slices_are_of_tpus():
    with pytest.raises(ConfigError, match="--topology=h100:HOSTSxGPUS, e.g. h100:2x8"):
        target.find("h100:8", slices=2)


def test_a_compiler_that_is_absent_or_of_another_version_is_an_error(monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        patched.setattr(target, "_CUDA_PLUGINS", ("no-such-plugin",))
        with pytest.raises(ConfigError, match=r"pip install .*\[plan-gpu\].* 4.4 GB of"):
            target.find("h100:8")
        full = target.shutil.disk_usage("/")._replace(free=10**9)
        patched.setattr(target.shutil, "disk_usage", lambda path: full)
        with pytest.raises(ConfigError, match="only 1.0 GB are free there"):
            target.find("h100:8")
    folder = tmp_path / "jax_cuda13_plugin-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: jax-cuda13-plugin\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"plugin 0.1.0 does not fit jaxlib {jaxlib.__version__}"):
        target.find("h100:8")


def test_every_gpu_has_a_peak_and_tells_xla_its_numbers():
    for gpu in chips.GPUS.values():
        text = gpu.target_config()
        assert gpu.peak > 100 * gpu.hbm_rate
        assert text.count("{") == text.count("}") and f"device_memory_size: {gpu.memory}" in text
    assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in H100.target_config()


# With -m slow: recipes whose layers and objective another one has.
SLOW = {
    "digits-2-slices", "vit_s16_i1k-2-slices", "vit_i1k-B16", "vit_i21k-L16", "scaling_vit-G14", "deit3_i21k",
    "dino_continue", "bit_hyperrule", "finetune", "noisy_student", "folder", "algoperf", "gsam", "vit_s16_i1k",
    "scaling_vit-B16", "linear_probe", "positions", "deit-S", "deit3", "rope_vit", "masked_patches-B16", "dynamic_vit",
    "digits_finetune", "distill", "best", "image_text", "dino_txt", "sum-dino",
    "vit_jft-H14",
    # Families without attention of their own for GPUs, beside LocalViT, the Mixer and EfficientNets.
    "deepvit", "axial", "feed_forward", "cross_vit",
}  # fmt: skip
FROZEN = (
    ("init_from", ""), ("model.name", "ViT-S/16"), ("model.pool", "token"), ("model.depth", 1), ("objective.text_depth", 1),
    ("data.mean", (0.5,) * 3), ("data.std", (0.5,) * 3), ("data.interpolation", "bilinear"),
)  # fmt: skip
# Without a reviewed program for TPUs: they begin with other runs, or are other recipes.
CASES = golden.CASES | {
    "digits_finetune": golden.Case("digits_finetune.py", "", changes=(("init_from", ""),)),
    "distill": golden.Case("distill.py:DeiT-S/16", ""),
    "best": golden.Case("best.py:B/16", ""),
    # By the tokenizer of bytes.
    "image_text": golden.Case(
        "image_text.py:B/16", "", changes=(("model.depth", 1),), examples=10**6
    ),
    "sum": golden.Case("sum.py:B/16", "", changes=(("model.depth", 1),), examples=10**6),
    "sum-dino": golden.Case("sum.py:B/16,dino", "", changes=(("model.depth", 1),), examples=10**6),
    "dino_txt": golden.Case("dino_txt.py", "", changes=FROZEN, examples=10**6),
}
# Of a recipe on other chips or at other sizes, the steps are those of the first.
SLOW |= {
    name
    for name in CASES
    if name.endswith(("-v6e", "-tpu7x")) or name.startswith(("finetune-H", "finetune-G"))
}
# Fewer of layers that are all alike.
SHORTER = {
    "efficientnet": ("model.units", (1, 1, 1)),
    "bit-R50x1": ("model.units", (1, 1, 1, 1)),
    "cross_vit": ("model.depths", ((1, 1),)),
    "mae": ("model.depth", 1),
    "segmentation": ("model.depth", 2),
    "dino": ("model.depth", 1),
    **{
        name: ("model.depth", 2)
        for name in ("finetune-L16-768", "naflex", "vit5", "speedrun", "mixer-S32", "localvit")
    },
}


def test_every_recipe_has_a_case():
    recipes = {path.stem for path in (golden.ROOT / "configs").glob("*.py")}
    # Two begin with files of teachers; of the others tests/objectives has the program.
    assert {case.config.partition(".")[0] for case in CASES.values()} == recipes - {
        "features",
        "flexivit",
    }


@pytest.mark.parametrize("name", slow_unless([n for n in CASES if n not in SLOW], CASES))
def test_every_recipe_is_lowered_for_cuda(name, monkeypatch, teacher):  # noqa: F811
    # What a program is traced for, and which cuDNN there is, is asked of devices that are not here.
    monkeypatch.setattr(platform, "current", lambda: "gpu")
    monkeypatch.setattr(platform, "is_amd", lambda: False)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    case = CASES[name]
    changes = [*case.changes, *([SHORTER[name]] if name in SHORTER else [])]
    if name == "distill":
        changes.append(("objective.teacher", teacher(1000)))
    assembly = golden.assembly_of(dataclasses.replace(case, changes=tuple(changes)))
    mesh, _, traced = compiling.trace(assembly, target.find("cpu:1").devices)
    with jax.set_mesh(mesh):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    model = assembly.model_config
    fused = getattr(model, "attention", "") == "auto" and model.tokens >= 128
    # cuDNN attends in 16 bits.
    assert ("__cudnn$fmhaSoftmax" in text) == (fused and model.dtype == "bfloat16")
