"""Accuracy and processor time of DeiT-Ti on labelled photos, by how many tokens each block merges:

    python -m tests.benchmarks.token_merging WEIGHTS FOLDER [--merge=0,4,8,13,16]

FOLDER has labels.csv with columns file and label; images are prepared as timm does it. Times are the least of three
rounds.
"""

import csv
import pathlib
import resource
import sys

import numpy as np
from flax import nnx

import vit_jax
from tests.interchange.test_timm import prepared

BATCH, ROUNDS = 50, 3


def processor_time() -> float:
    """Seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@nnx.jit
def logits(model, x):
    return model(x).logits


def main(weights: str, folder: str, *more: str) -> None:
    """Prints a row of a table for each number."""
    merge = next(
        (m.removeprefix("--merge=") for m in more if m.startswith("--merge=")), "0,4,8,13,16"
    )
    with (pathlib.Path(folder) / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    labels = np.array([int(row["label"]) for row in rows])
    images = np.stack([prepared(pathlib.Path(folder) / row["file"]) for row in rows])
    plain = None
    print(
        "| merged a block | top-1, % | same class as without, % | ms an image | 10⁹ multiply-adds |"
    )
    print("|--:|--:|--:|--:|--:|")
    for count in map(int, merge.split(",")):
        run = vit_jax.load_run(weights, heads=3, token_merging=count)
        logits(run.model, images[:BATCH]).block_until_ready()
        times = []
        for _ in range(ROUNDS):
            begin = processor_time()
            batches = range(0, len(images), BATCH)
            found = [np.asarray(logits(run.model, images[i : i + BATCH])) for i in batches]
            times.append(processor_time() - begin)
        classes = np.concatenate(found).argmax(-1)
        plain = classes if plain is None else plain
        right, same = (100 * (classes == other).mean() for other in (labels, plain))
        time = 1000 * min(times) / len(images)
        work = run.model_config.flops() / 2e9
        print(f"| {count} | {right:.1f} | {same:.1f} | {time:.1f} | {work:.2f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
