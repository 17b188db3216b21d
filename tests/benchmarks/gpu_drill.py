"""What compiled programs cannot answer, answered in ten minutes on one GPU, where vit_jax is installed.

    python tests/benchmarks/gpu_drill.py --out=drill.json [--budget=595] [--stages=info,losses,…] [--rehearse]

Nine stages, each in a process of its own, the important ones first: one that fails, hangs or runs out of time costs
only itself, and OUT has what all others found, up to the last row that was measured.

    info        versions, driver; rates of a product and of a copy
    losses      ten steps of a tiny ViT, beside the CPU of the same machine: float32, the same with JAX's highest
                precision (otherwise GPUs round the factors of products to TF32), bfloat16
    attention   xla and cuDNN (also with key lengths of each image, and without the guard for odd counts) against
                float64, also where logits lie far below zero: results, gradients, time
    step        Ti to H, 384 and 512 px, attention, unrolling, remat: time, share of the peak, memory
    timm        the same weights in timm, eager and compiled; of B/16 also a plain JAX step (needs timm and torch)
    resume      the same steps twice, and a run that was stopped: are the bits the same, with and without
                config.deterministic, and what does that cost
    inference   one image and many
    flags       B/16 with the options of XLA that could matter
    input       images a second that the host can decode

The last line of the output is the JSON object. Exit code 1: a stage did not end as it should; "failed" lists them.
--rehearse runs every stage on a CPU, as small as can be.
"""

import argparse
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# Model and images of a step on one GPU of 80 GB.
MODELS = [
    ("ViT-B/16", 256), ("ViT-L/16", 128), ("ViT-S/16", 512), ("ViT-H/14", 64), ("ViT-Ti/16", 1024),
]  # fmt: skip
# Of B/16 beside the default: images, fields.
VARIANTS = [
    (256, {"model.unroll": 1}),
    (256, {"model.remat": "save_products"}),
    (256, {"model.unroll": 1, "model.remat": "save_products"}),
    (256, {"model.attention": "xla"}),
    (256, {"model.pool": "mean"}),  # 196 tokens
    (64, {"data.image_size": 384, "data.eval_crop": "resize"}),
    (32, {"data.image_size": 512, "data.eval_crop": "resize"}),
]  # fmt: skip
OPTIONS = "DRILL_COMPILER_OPTIONS"
FLAGS = {
    "default": {},
    "no latency hiding": {OPTIONS: '{"xla_gpu_enable_latency_hiding_scheduler": false}'},
    "Triton's products": {OPTIONS: '{"xla_gpu_enable_triton_gemm": true}'},
    "no command buffers": {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="},
    "JAX_OPTIMIZATION_LEVEL=O1": {"JAX_OPTIMIZATION_LEVEL": "O1"},
}
# Few, since cuDNN compiles each for three seconds.
ATTENTION = [
    ("xla", "usual"), ("cudnn", "usual"), ("cudnn", "far below zero"), ("cudnn, lengths", "usual"),
    ("cudnn, unguarded", "far below zero"), ("xla, lengths", "usual"),
]  # fmt: skip
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "timm", "jax-cuda12-plugin", "jax-cuda13-plugin",
            "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13")  # fmt: skip
MARK = "DRILL "  # begins the lines of a stage that are results


class Stage:
    """What a stage hands to its parent, row by row."""

    def __init__(self, flags: argparse.Namespace):
        self.rehearse, self.deterministic = flags.rehearse, flags.deterministic
        self.steps = 1 if flags.rehearse else 10

    def row(self, **values) -> None:
        print(MARK + json.dumps(values, default=str), flush=True)

    def attempt(self, function: Callable[[], dict], **what) -> None:
        """A row of what the function gives, or of why it did not."""
        try:
            self.row(**what, **function())
        except Exception as error:
            self.row(**what, error=f"{type(error).__name__}: {str(error)[:500]}")


def info(stage: Stage) -> None:
    import jax
    import jax.numpy as jnp

    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    stage.row(
        devices=[device.device_kind for device in jax.devices()],
        packages={name: installed[name] for name in PACKAGES if name in installed},
    )
    if not stage.rehearse:
        query = "--query-gpu=name,driver_version,clocks.max.sm,power.limit,memory.total"
        stage.attempt(lambda: {"nvidia_smi": _output(["nvidia-smi", query, "--format=csv"])})
    size, count = (512, 2**20) if stage.rehearse else (8192, 2**30)
    a, x = jnp.ones((size, size), jnp.bfloat16), jnp.ones(count, jnp.bfloat16)
    product, copy = jax.jit(lambda a: a @ a), jax.jit(lambda x: x + 1)
    stage.row(
        product_tflops=2 * size**3 / _seconds(lambda: product(a)) / 1e12,
        copy_tb_per_second=2 * x.nbytes / _seconds(lambda: copy(x)) / 1e12,
    )


def losses(stage: Stage) -> None:
    import jax

    here, cpu = jax.devices()[0], jax.devices("cpu")[0]
    exact = _losses(cpu, "float32", stage)
    cases = (
        ("float32", "highest", 2e-5),
        ("float32", "default", 2e-3),
        ("bfloat16", "default", 2e-3),
    )
    for dtype, precision, tolerance in cases:
        with jax.default_matmul_precision(precision):
            found = _losses(here, dtype, stage)
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, exact, strict=True))
        what = dict(dtype=dtype, precision=precision, worst=worst, passes=worst <= tolerance)
        stage.row(**what, here=found, cpu=exact)


def _losses(device, dtype: str, stage: Stage) -> list[float]:
    """Of the first steps on one device."""
    import jax

    from vit_jax.benchmarks.step import assembled, made_up_batch
    from vit_jax.devices import meshes
    from vit_jax.training import state as states
    from vit_jax.training.step_programs import compile_train_step

    config = _config("ViT-Ti/16", 2 if stage.rehearse else 16, stage)
    config.model.dtype, config.model.dtype_on_cpu = dtype, "same"
    assembly, _ = assembled(config)
    mesh = meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, [device])
    with jax.set_mesh(mesh):
        like = assembly.abstract_state(mesh)
        state, batch = states.create(assembly.init, 0, like), made_up_batch(assembly, mesh)
        step = compile_train_step(assembly.train_step, states.shardings_of(like), mesh)
        values = []
        for _ in range(2 if stage.rehearse else 10):
            state, metrics = step(state, batch)
            values.append(float(metrics["loss"]))
    return values


def attention(stage: Stage) -> None:
    shapes = [(197, 12, 64), (257, 16, 80), (577, 12, 64), (1024, 12, 64), (197, 4, 256)]
    shapes = [(9, 2, 8)] if stage.rehearse else shapes
    for shape in shapes:
        kinds = _kinds(stage.rehearse)
        for kind, logits in ATTENTION:
            if kind in kinds:
                size = shape[0] // 2 if kind.endswith("lengths") else shape[0]
                judged = functools.partial(
                    _judged, kinds[kind], shape, logits, (shape[0], size), stage
                )
                stage.attempt(judged, kind=kind, shape=shape, logits=logits)


def _kinds(rehearse: bool) -> dict[str, Callable]:
    """Implementations of attention."""
    from vit_jax.compute import attend, cudnn

    def of_lengths(*qkv, implementation: str):
        return attend.attend(*qkv, lengths=_lengths(qkv[0]), implementation=implementation)

    def plain(*qkv):
        return attend.attend(*qkv, implementation="xla")

    if rehearse:
        return {"xla": plain, "xla, lengths": functools.partial(of_lengths, implementation="xla")}

    def unguarded(*qkv):
        tile, cudnn.TILE = cudnn.TILE, 1
        try:
            return cudnn.fused_attention(*qkv)
        finally:
            cudnn.TILE = tile

    return {
        "xla": plain,
        "cudnn": cudnn.fused_attention,
        "cudnn, lengths": functools.partial(of_lengths, implementation="cudnn"),
        "cudnn, unguarded": unguarded,
    }


def _lengths(q):
    """All keys of the first image, half of the others'."""
    import jax.numpy as jnp

    tokens = q.shape[1]
    return jnp.full(len(q), tokens // 2, jnp.int32).at[0].set(tokens)


def _judged(
    function: Callable, shape: tuple, logits: str, lengths: tuple[int, int], stage: Stage
) -> dict:
    """Errors against float64, relative to the largest value, and times."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tests.compute.attention_reference import draw, reference

    given = list(draw((2, *shape)))
    counts = np.arange(shape[0]) < np.array(lengths)[:, None]
    given[-1] *= counts[..., None, None]  # rows of queries beyond have no meaning
    if (
        logits == "far below zero"
    ):  # as heads with outliers have them; below -88 exponentials overflow
        given[0][..., 0], given[1][..., 0] = 1, -120 * math.sqrt(shape[-1])
    *qkv, dout = (jnp.asarray(x, jnp.bfloat16) for x in given)

    @jax.jit
    def both(dout, *qkv):
        out, back = jax.vjp(function, *qkv)
        return out, *back(dout)

    bias = np.where(counts, 0.0, -np.inf)[:, None, None]
    exact = reference(*(np.asarray(x, np.float64) for x in (*qkv, dout)), bias)
    found = [np.asarray(x, np.float64) * counts[..., None, None] for x in both(dout, *qkv)]
    errors = [
        float(np.abs(a - b * counts[..., None, None]).max() / np.abs(b).max())
        for a, b in zip(found, exact[:4], strict=True)
    ]
    many = [jnp.tile(x, (1 if stage.rehearse else 64, 1, 1, 1)) for x in (dout, *qkv)]
    forward = jax.jit(function)
    return {
        "errors": errors,
        # Where k is large, the rounding of dq is too: what matters there is that nothing overflows.
        "passes": all(error <= (2e-2 if logits == "usual" else 2) for error in errors),
        "forward_ms": 1e3 * _seconds(lambda: forward(*many[1:])),
        "both_ms": 1e3 * _seconds(lambda: both(*many)),
    }


def step(stage: Stage) -> None:
    rows = [(model, batch, {}) for model, batch in MODELS]
    rows[1:1] = [("ViT-B/16", batch, fields) for batch, fields in VARIANTS]
    rows = [("ViT-Ti/16", 2, {})] if stage.rehearse else rows
    for model, batch, fields in rows:
        stage.attempt(
            lambda m=model, b=batch, f=fields: _step(m, b, stage, f),
            model=model,
            batch=batch,
            **fields,
        )


def _step(model: str, batch: int, stage: Stage, fields: dict) -> dict:
    from vit_jax.benchmarks.step import step as timed

    wanted = ("choices", "images_per_second", "step_seconds", "step_seconds_max", "compile_seconds", "mfu",
              "peak_memory_bytes", "loss")  # fmt: skip
    result = timed(_config(model, batch, stage, fields), steps=stage.steps)
    return {name: result[name] for name in wanted}


def timm(stage: Stage) -> None:
    rows = [(*MODELS[0], "plain,")]  # compiled for as long as the others' together
    rows += [("ViT-B/16", 256, "", "--inference"), ("ViT-B/16", 1, "", "--inference")]
    rows += [(*row, "") for row in MODELS[1:3]]
    more = ["--device=cuda", "--dtype=bfloat16", "--attention=cudnn", "--rounds=2"]
    if stage.rehearse:
        rows = [("ViT-Ti/16", 1, "plain,")]
        more = ["--image_size=32", "--dtype=float32", "--rounds=1"]
    for model, batch, plain, *flags in rows:
        peers = f"ours,{plain}timm" + ("" if stage.rehearse else ",timm_compiled")
        command = [sys.executable, "tests/benchmarks/step_peers.py", f"--model={model}", f"--batch_size={batch}",
                   f"--peers={peers}", *more, *flags]  # fmt: skip
        stage.attempt(
            lambda c=command: json.loads(_output(c).splitlines()[-1])["results"][0],
            model=model,
            batch=batch,
        )


def resume(stage: Stage) -> None:
    for deterministic in (False, True):
        command = _command("repeat", stage.rehearse) + ["--deterministic"] * deterministic
        stage.attempt(lambda c=command: _rows(_output(c))[0], deterministic=deterministic)
    with tempfile.TemporaryDirectory() as folder:
        stage.attempt(lambda: _stopped_run(pathlib.Path(folder), stage), run="stopped and resumed")


def repeat(stage: Stage) -> None:
    """Part of `resume`: the same steps of B/16 twice, from the same state."""
    import jax
    import numpy as np

    from vit_jax.benchmarks.step import Timed
    from vit_jax.training import state as states

    model = ("ViT-Ti/16", 2) if stage.rehearse else ("ViT-B/16", 128)
    timed = Timed(_config(*model, stage, {"deterministic": stage.deterministic}))
    start, shardings = jax.device_get(timed.state), states.shardings_of(timed.state)
    results, times = [], []
    for _ in range(2):
        timed.state = jax.device_put(start, shardings)
        for _ in range(stage.steps):
            began = time.perf_counter()
            jax.block_until_ready(timed.run())
            times.append(time.perf_counter() - began)
        results.append(jax.tree.leaves(jax.device_get(timed.state.params)))
    same = all(map(np.array_equal, *results))
    stage.row(same_bits=same, step_seconds=statistics.median(times))


def _stopped_run(folder: pathlib.Path, stage: Stage) -> dict:
    """A run of digits that SIGTERM stops and one that nothing does: whether their parameters are the same."""
    import numpy as np

    from vit_jax.base.patterns import named
    from vit_jax.checkpoints import reading

    length, every = (6, 2) if stage.rehearse else (60, 20)
    attention = "xla" if stage.rehearse else "cudnn"

    def command(name: str) -> list[str]:
        fields = {
            "duration": f"{length} steps", "checkpoint.every": f"{every} steps", "eval.every": "1000 steps",
            "deterministic": True, "model.dtype": "bfloat16", "model.attention": attention,
        }  # fmt: skip
        flags = [f"--config.{field}={value}" for field, value in fields.items()]
        return [
            sys.executable,
            "-m",
            "vit_jax",
            "train",
            "--config=digits",
            f"--workdir={folder / name}",
            *flags,
        ]

    _output(command("whole"))
    with subprocess.Popen(command("stopped"), cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(folder.glob("stopped/checkpoints/*[0-9]")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    _output(command("stopped"))
    whole, stopped = (
        named(reading.read_weights(folder / name).params) for name in ("whole", "stopped")
    )
    same = all(np.array_equal(whole[name], stopped[name]) for name in whole)
    return {"same_bits": same, "stopped_with": code}


def inference(stage: Stage) -> None:
    model = "ViT-Ti/16" if stage.rehearse else "ViT-B/16"
    for batch in (1,) if stage.rehearse else (1, 256):
        stage.attempt(lambda b=batch: _inference(_config(model, b, stage), stage), batch=batch)


def _inference(config, stage: Stage) -> dict:
    from vit_jax.benchmarks.step import inference as timed

    result = timed(config, steps=2 * stage.steps)
    return {
        name: result[name]
        for name in ("choices", "images_per_second", "step_seconds", "batch_bytes")
    }


def flags(stage: Stage) -> None:
    command = _command("step_of_b16", stage.rehearse)
    for name, variables in list(FLAGS.items())[: 1 if stage.rehearse else None]:
        stage.attempt(lambda v=variables: _rows(_output(command, **v))[0], flags=name)


def step_of_b16(stage: Stage) -> None:
    """Part of `flags`; the variable OPTIONS has compiler options to change."""
    from vit_jax.compute import gpu

    gpu.COMPILER_OPTIONS.update(json.loads(os.environ.get(OPTIONS, "{}")))
    model = ("ViT-Ti/16", 2) if stage.rehearse else MODELS[0]
    stage.attempt(lambda: _step(*model, stage, {}))


def input(stage: Stage) -> None:
    import numpy as np
    from PIL import Image

    random, count = np.random.default_rng(0), 16 if stage.rehearse else 512
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            path = pathlib.Path(folder, "train", f"class{number % 4}", f"{number}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(random.integers(0, 256, (24, 32, 3), np.uint8))
            small.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
        command = [sys.executable, "-m", "vit_jax", "benchmark", "input", "--config=folder", "--json",
                   f"--config.data.path={folder}", f"--config.batch_size={count // 2}",
                   f"--steps={stage.steps}"]  # fmt: skip
        stage.attempt(lambda: json.loads(_output(command).splitlines()[-1]))


STAGES = {  # and the seconds that each may take: together ten minutes, so that none takes another one's
    info: 10, losses: 30, attention: 75, step: 150, timm: 140, resume: 60, inference: 25, flags: 85, input: 20,
}  # fmt: skip
PARTS = (repeat, step_of_b16)


def _config(model: str, batch: int, stage: Stage, fields: dict | None = None):
    from vit_jax.config import default_config

    config = default_config()
    config.update_from_flattened_dict({
        "model.name": model, "model.dtype": "bfloat16", "augment.flip": False, "batch_size": batch,
        "data.image_size": 224, "duration": "1000 steps", "optim.weight_decay": 0.1,
    } | (fields or {}))  # fmt: skip
    if stage.rehearse:
        config.data.image_size, config.model.depth = 32, 1
    return config


def _seconds(run: Callable) -> float:
    """Median time of a call, of ten after three to warm up."""
    import jax

    times = []
    for _ in range(13):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def _command(name: str, rehearse: bool) -> list[str]:
    return [sys.executable, __file__, f"--run={name}", *(["--rehearse"] if rehearse else [])]


def _output(command: list[str], **variables: str) -> str:
    """What a command prints; an error has the end of what it says."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return done.stdout


def _rows(text: str) -> list[dict]:
    lines = [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]
    return [json.loads(line) for line in lines]


def run_stage(name: str, seconds: float, rehearse: bool) -> dict:
    """Runs a stage in a process of its own; its rows, and how it ended."""
    began, code = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own, so that the processes that it starts end with it.
        how = dict(stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        process = subprocess.Popen(_command(name, rehearse), **how)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"stopped after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read()
    rows = _rows(text)
    result = {"rows": rows, "seconds": round(time.monotonic() - began, 1), "exit_code": code}
    passes = code == 0 and not any("error" in row or row.get("passes") is False for row in rows)
    return result if passes else result | {"failed": True, "end_of_output": text[-1500:]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    seconds_of = {stage.__name__: seconds for stage, seconds in STAGES.items()}
    names = list(seconds_of)
    parser.add_argument("--out", default="drill.json")
    parser.add_argument(
        "--budget", type=float, default=sum(STAGES.values()), help="seconds for all stages"
    )
    parser.add_argument("--stages", default=",".join(names))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--deterministic", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")  # as `vit_jax train` has it
    if given.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if given.run:
        functions = {function.__name__: function for function in (*STAGES, *PARTS)}
        functions[given.run](Stage(given))
        return 0
    unknown = sorted(set(given.stages.split(",")) - set(names))
    if unknown:
        parser.error(f"--stages: unknown {', '.join(unknown)}; stages are {', '.join(names)}")
    began, results = time.monotonic(), {}
    limits = [(name, seconds_of[name]) for name in given.stages.split(",")]
    for number, (name, limit) in enumerate(limits):
        left = given.budget - (time.monotonic() - began)
        later = sum(seconds for _, seconds in limits[number + 1 :])
        if left > 0:
            # Also what earlier stages left, but nothing that a later one may take.
            seconds = left if given.rehearse else max(min(left, limit), left - later)
            results[name] = run_stage(name, seconds, given.rehearse)
        else:
            results[name] = {"rows": [], "failed": True, "exit_code": "no time left"}
        pathlib.Path(given.out).write_text(json.dumps(results, indent=1) + "\n")
        state = "FAILED" if "failed" in results[name] else "done"
        print(f"{name}: {state}, {len(results[name]['rows'])} rows", flush=True)
    failed = [name for name, result in results.items() if "failed" in result]
    print(json.dumps(results | {"failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
