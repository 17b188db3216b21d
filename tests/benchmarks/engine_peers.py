"""Inference by our engines beside timm, on the same cores, in turn.

    python tests/benchmarks/engine_peers.py [--model=S/16] [--batch_size=1] [--rounds=5] [--only=xla,openvino]

Each contender is a process of its own that classifies images of 224 × 224 pixels in float32: `xla`, `onnxruntime`,
`openvino` and `auto` as `vit_jax predict --engine` does, `timm` by PyTorch (`pip install timm torch`). Prints the least
and the median milliseconds of processor time for an image, and the least of wall time; on a machine with other work
only the first says much. Threads that wait do not spin.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

ENGINES = ("auto", "xla", "onnxruntime", "openvino")
TIMM = {"Ti/16": "deit_tiny", "S/16": "vit_small", "B/16": "vit_base"}
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
RUNS = 8  # images of a round, at least


def ours(engine: str, file: str) -> Callable[[np.ndarray], object]:
    import jax

    from vit_jax.export.engines import make_classifier
    from vit_jax.models import registry
    from vit_jax.prediction.overrides import load_for_images
    from vit_jax.prediction.predict import make_best

    normalized = [(f"data.{name}", "(0.5, 0.5, 0.5)") for name in ("mean", "std")]
    run = load_for_images(file, normalized, "predict")
    classifier = make_classifier(run, engine)
    best = make_best(run, classifier and classifier.logits)
    weights = registry.split(run.model)[1]
    return lambda images: jax.device_get(best.function(weights, images, 5))


def timm(model: str) -> Callable[[np.ndarray], object]:
    import torch

    from tests import without_torchvision

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    create = without_torchvision.timm_models().create_model
    network = create(f"{TIMM[model]}_patch16_224").eval()

    def classify(images: np.ndarray):
        with torch.inference_mode():
            pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
            return network((pixels / 127.5 - 1).contiguous()).softmax(-1).topk(5)

    return classify


def child(name: str, model: str, file: str, batch_size: int) -> None:
    """Classifies when a line comes on standard input, and prints the seconds of an image."""
    classify = timm(model) if name == "timm" else ours(name, file)
    images = np.random.default_rng(0).integers(0, 256, (batch_size, 224, 224, 3), np.uint8)
    for _ in range(3):
        classify(images)
    print("ready", flush=True)
    runs = -(-RUNS // batch_size)
    for _ in sys.stdin:
        began = time.process_time(), time.perf_counter()
        for _ in range(runs):
            classify(images)
        ended = time.process_time(), time.perf_counter()
        print(
            json.dumps([(b - a) / runs / batch_size for a, b in zip(began, ended, strict=True)]),
            flush=True,
        )
    os._exit(0)  # engines' threads need not be waited for


def write_model(model: str, folder: str) -> str:
    """A checkpoint with random weights."""
    import jax

    from vit_jax.interchange import formats
    from vit_jax.models import registry

    config = registry.model_config(f"ViT-{model}", num_classes=1000, head_init="normal")
    parameters = jax.device_get(registry.initialize(config, jax.random.key(0)))
    file = pathlib.Path(folder) / "random.npz"
    formats.write_checkpoint(formats.LoadedCheckpoint(config, parameters), file, "official")
    return str(file)


def start(name: str, options: argparse.Namespace, file: str) -> subprocess.Popen:
    command = [sys.executable, __file__, f"--child={name}", f"--file={file}", f"--model={options.model}",
               f"--batch_size={options.batch_size}"]  # fmt: skip
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | PASSIVE, **pipes)
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"{name} ended, see above")
    return process


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=TIMM, default="S/16")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join((*ENGINES, "timm")))
    parser.add_argument("--child")
    parser.add_argument("--file")
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.model, options.file, options.batch_size)
    names = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        file = write_model(options.model, folder)
        children = {name: start(name, options, file) for name in names}
        times = {name: [] for name in names}
        for _ in range(options.rounds):
            for name, process in children.items():
                print(file=process.stdin, flush=True)
                times[name].append(json.loads(process.stdout.readline()))
        for process in children.values():
            process.stdin.close()
            process.wait()
    for name, rounds in times.items():
        processor, wall = zip(*rounds, strict=True)
        print(
            f"{name:12} processor {1e3 * min(processor):6.1f} ms, median {1e3 * statistics.median(processor):6.1f}; "
            f"wall {1e3 * min(wall):6.1f} ms an image"
        )
    return None


if __name__ == "__main__":
    main()
