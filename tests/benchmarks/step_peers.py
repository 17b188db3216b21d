"""Our train step beside its peers, in turn in one process: a plain JAX step (`plain_step.py`), timm
under PyTorch (eager and compiled) and Hugging Face's ViT; the same weights, batch, optimizer, loss.

    python tests/benchmarks/step_peers.py [--model=ViT-Ti/16] [--image_size=224] [--batch_size=8]
    [--dtype=float32] [--peers=ours,plain,timm,timm_compiled,huggingface] [--rounds=4]
    [--attention=auto] [--inference] [--device=cuda]

Further peers are `ours_none`, `ours_full`, `ours_save_attention` and `ours_save_products`, ours with that `remat`.

With --device=cuda, which needs JAX and PyTorch for CUDA: all rows for a GPU, and its bfloat16 rate on
8192 x 8192 matrices. Peers: `pip install timm transformers torch`. Prints a table, and one JSON
object on the last line. Losses are of the first steps; they must agree, else it is other work. Memory
is on a CPU what the process grows by in a step, and the weights and moments that stay in between.
"""

import argparse
import ctypes
import functools
import gc
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_step
import torch

from tests import without_torchvision
from vit_jax.benchmarks.context import context
from vit_jax.compute import choices
from vit_jax.config import default_config
from vit_jax.devices import meshes
from vit_jax.evaluation.forward import make_forward
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.training import state as states
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.step_programs import compile_train_step

LEARNING_RATE, DECAY, CLIP = 1e-3, 0.1, 1.0
# What a GPU is measured on: model, image size, batch, inference.
GPU_ROWS = [
    ("ViT-B/16", 224, 256, False), ("ViT-L/16", 224, 128, False), ("ViT-H/14", 224, 64, False),
    ("ViT-B/16", 384, 64, False), ("ViT-B/16", 512, 32, False), ("Mixer-B/16", 224, 256, False),
    ("R50+ViT-B/16", 224, 128, False), ("ViT-B/16", 224, 1, True), ("ViT-B/16", 224, 256, True),
]  # fmt: skip
# What a CPU is measured on when nothing is said.
CPU_ROWS = [("ViT-Ti/16", 224, 8, False)]


def our_parts(flags, remat: str = "auto"):
    """(assembly, mesh, state, batch) of our run."""
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": flags.model, "model.dtype": flags.dtype, "model.remat": remat,
        "augment.flip": False, "data.image_size": flags.image_size, "batch_size": flags.batch_size,
        "duration": "1000 steps", "optim.lr": LEARNING_RATE, "optim.weight_decay": DECAY,
        "optim.schedule": "constant", "optim.weight_decay_rules": ((".*", 1.0),),
    })  # fmt: skip
    wanted = {"activation": "gelu", "attention": flags.attention}  # timm's and Hugging Face's GELU
    known = registry.family_named(flags.model).Config.__dataclass_fields__
    config.model.update({name: value for name, value in wanted.items() if name in known})
    assembly = assemble(resolve(config), num_classes=1000, examples_per_epoch=1000)
    mesh = meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
    random = np.random.default_rng(0)
    size = (flags.batch_size, flags.image_size, flags.image_size, 3)
    batch = {
        "image": random.integers(0, 256, size, np.uint8),
        "label": random.integers(0, 1000, size[0], np.int32),
    }
    with jax.set_mesh(mesh):
        state = states.create(assembly.init, 0, assembly.abstract_state(mesh))
    return assembly, mesh, state, batch


def ours(flags, parts, remat: str = ""):
    """A function that runs our step and returns its loss, and the bytes it holds at most."""
    assembly, mesh, state, batch = our_parts(flags, remat) if remat else parts
    with jax.set_mesh(mesh):
        state = jax.tree.map(jnp.copy, state)  # each peer starts from the same weights
        batch = jax.device_put(batch, meshes.batch_sharding(mesh))
        if flags.inference:
            forward = make_forward(assembly.definition, assembly.model_config, assembly.config.data)
            compiled = (
                jax.jit(lambda w, x: forward(w, x).logits)
                .lower(state.weights(), batch["image"])
                .compile()
            )
            return lambda: compiled(state.weights(), batch["image"]).mean(), memory(compiled)
        step = compile_train_step(assembly.train_step, states.shardings_of(state), mesh)
        compiled = step.lower(state, batch).compile()
    return repeated(compiled, state, batch), memory(compiled)


def plain(flags, parts):
    """The plain JAX step; its weights are its own."""
    config = parts[0].model_config
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, weight_decay=DECAY)
    )
    state, step = plain_step.plain_step(config, optimizer, jnp.dtype(flags.dtype))
    count = sum(x.size for x in jax.tree.leaves(state[0]))
    assert count == registry.count_parameters(config), "not the same model"
    batch = jax.device_put(parts[3])
    if flags.inference:
        images = batch["image"].astype(jnp.float32) / 127.5 - 1
        forward = jax.jit(
            lambda p, x: plain_step.plain_forward(p, x, config, jnp.dtype(flags.dtype))
        )
        compiled = forward.lower(state[0], images).compile()
        return lambda: compiled(state[0], images).mean(), memory(compiled)
    compiled = step.lower(state, batch).compile()
    return repeated(compiled, state, batch), memory(compiled)


def repeated(compiled, state, batch):
    """A function that makes the next step and returns its loss."""

    def run():
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics["loss"]

    return run


def memory(compiled) -> int:
    """Bytes of arguments and temporaries; donated results take no more."""
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes


def memory_of_step(run, held: int) -> int:
    """Bytes of this process that making a step adds at most, and `held`, which stays in between."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    wait(run())
    return resident("VmHWM") - before + held


def resident(kind: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{kind}:\s*(\d+) kB", status)[1])


def written(parts, form: str, folder: str) -> str:
    """Our weights in another library's format."""
    assembly, _, state, _ = parts
    path = os.path.join(folder, form)
    checkpoint = formats.LoadedCheckpoint(
        assembly.model_config,
        jax.device_get(state.params),
        variables=jax.device_get(state.variables),
    )
    formats.write_checkpoint(checkpoint, path, form)
    return path


def timm(flags, parts, compiled: bool = False):
    """timm's model under PyTorch with its fused attention."""
    models = without_torchvision.timm_models()
    with tempfile.TemporaryDirectory() as folder:
        path = written(parts, "timm", folder)
        model = models.create_model(f"local-dir:{path}", pretrained=True)
    return torch_step(flags, parts, model, compiled)


def timm_compiled(flags, parts):
    return timm(flags, parts, compiled=True)


def huggingface(flags, parts):
    """Hugging Face's ViT, with PyTorch's fused attention."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        model = transformers.ViTForImageClassification.from_pretrained(
            written(parts, "huggingface", folder), attn_implementation="sdpa"
        )
    return torch_step(flags, parts, model, compiled=False)


def torch_step(flags, parts, model, compiled: bool):
    """A step of PyTorch as its users write it: autocast in bfloat16, fused AdamW, clipping."""
    device = flags.device
    batch = parts[3]
    model = model.to(device).train(not flags.inference)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=DECAY, fused=True)
    forward = torch.compile(model) if compiled else model
    raw = torch.tensor(batch["image"], device=device)
    labels = torch.tensor(batch["label"], device=device, dtype=torch.long)
    half = flags.dtype == "bfloat16"

    def logits_of():
        images = (raw.permute(0, 3, 1, 2).float() / 127.5 - 1).contiguous()
        with torch.autocast(device, torch.bfloat16, enabled=half):
            out = forward(images)
        return getattr(out, "logits", out).float()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def run():
        if flags.inference:
            with torch.inference_mode():
                return logits_of().mean()
        loss = torch.nn.functional.cross_entropy(logits_of(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return run, lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None


PEERS = {f.__name__: f for f in (ours, plain, timm, timm_compiled, huggingface)}
REMATS = ("none", "full", "save_attention", "save_products")
OURS = {f"ours_{remat}": functools.partial(ours, remat=remat) for remat in REMATS}


def wait(result) -> float:
    """The number, when the device has it."""
    return float(result)


def measure(flags) -> dict:
    """Runs the peers in turn, A B A B, and compares them."""
    parts = our_parts(flags)
    runs, first, losses, peak, times = {}, {}, {}, {}, {}
    for name in flags.peers.split(","):
        if (
            name == "plain"
            and not flags.model.startswith("ViT")
            or (name == "huggingface" and not flags.model.startswith("ViT"))
        ):
            continue
        began = time.perf_counter()
        runs[name], peak[name] = (PEERS | OURS)[name](flags, parts)
        losses[name] = [wait(runs[name]())]
        first[name] = time.perf_counter() - began
        losses[name] += [wait(runs[name]()) for _ in range(2)]
        times[name] = []
        peak[name] = peak[name]() if callable(peak[name]) else peak[name]
        if flags.device == "cpu":
            copies = 1 if flags.inference else 3  # the weights, and two moments
            count = registry.count_parameters(parts[0].model_config)
            peak[name] = memory_of_step(runs[name], 4 * copies * count)
    for _ in range(flags.rounds):
        for name, run in runs.items():
            for _ in range(3):
                began = time.perf_counter()
                wait(run())
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    title = f"{flags.model}, {flags.image_size} px, batch {flags.batch_size}, {flags.dtype}"
    print(title + (", inference" if flags.inference else ""))
    print("  ours:", choices.summarize(parts[0].model_config, parts[1]))
    for name, seconds in medians.items():
        held = f"{peak[name] / 2**20:8.0f} MiB" if peak[name] else " " * 12
        print(
            f"  {name:<14} {seconds:.4f} s  {flags.batch_size / seconds:8.1f} images/s  "
            f"{seconds / medians['ours']:.2f} x ours  {held}  first {first[name]:5.1f} s  "
            f"losses {' '.join(f'{loss:.4f}' for loss in losses[name])}",
            flush=True,
        )
    flops = 3 * parts[0].model_config.flops() * flags.batch_size / (3 if flags.inference else 1)
    shared = [values for name, values in losses.items() if name != "plain"]
    tolerance = 2e-2 if flags.dtype == "bfloat16" else 1e-3
    assert all(
        math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
        for values in shared for a, b in zip(values, shared[0], strict=True)
    ), f"not the same work: {losses}"  # fmt: skip
    return {
        "row": title, "inference": flags.inference, "seconds": medians, "first": first,
        "losses": losses, "bytes": peak, "flops_per_second": flops / medians["ours"],
    }  # fmt: skip


def matmul_rate() -> float:
    """FLOP/s of a product of two 8192 x 8192 bfloat16 matrices."""
    a = jnp.ones((8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        product(a).block_until_ready()
        times.append(time.perf_counter() - began)
    return 2 * 8192**3 / statistics.median(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=4, help="of three steps each, in turn")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    flags = parser.parse_args()
    cuda = flags.device == "cuda"
    if cuda != (jax.default_backend() == "gpu"):
        sys.exit(f"--device={flags.device}, but JAX runs on {jax.default_backend()}")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows = [(flags.model, flags.image_size, flags.batch_size, flags.inference)]
    rows = rows if flags.model else GPU_ROWS if cuda else CPU_ROWS
    dtypes = [flags.dtype] if flags.dtype else ["bfloat16"] if cuda else ["float32", "bfloat16"]
    rate = matmul_rate() if cuda else None
    results = []
    # On a GPU, attention's implementations beside each other, unless one is asked for.
    kinds = ("xla", "cudnn") if cuda and flags.attention == "auto" else (flags.attention,)
    for row, dtype, kind in itertools.product(rows, dtypes, kinds):
        flags.model, flags.image_size, flags.batch_size, flags.inference = row
        flags.dtype, flags.attention = dtype, kind
        results.append(measure(flags))
        gc.collect()
    if rate:
        print(f"8192^3 bfloat16: {rate / 1e12:.0f} TFLOP/s")
        for result in results:
            print(f"  {result['row']}: {result['flops_per_second'] / rate:.0%} of it")
    print(json.dumps({"results": results, "matmul_rate": rate} | context()))


if __name__ == "__main__":
    main()
