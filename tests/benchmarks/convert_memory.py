"""Memory and time of converting a large checkpoint of random weights, each way in its own process.

    python tests/benchmarks/convert_memory.py FOLDER [MODEL]

MODEL is ViT-H/14 unless it is said. FOLDER gets about five times its size in files, which stay there.
"""

import os
import resource
import subprocess
import sys
import time

import jax
import numpy as np

from vit_jax.base import patterns
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange import formats, loading
from vit_jax.models import registry


def main(folder: str, model: str = "ViT-H/14") -> None:
    for job in (
        ("make", model, "random.npz"),
        ("convert", "random.npz", "huggingface", "huggingface"),
        ("convert", "huggingface", "again.npz", "official"),
        ("convert", "random.npz", "orbax", "orbax"),
        ("convert", "orbax", "again2.npz", "official"),
    ):
        # A process starts with the peak of the one that starts it: this one does no work.
        subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--job", *job], cwd=folder, check=True
        )


def make(model: str, path: str) -> None:
    """Writes random weights."""
    config = registry.model_config(model)
    like = registry.abstract(config)[1]
    sizes = [4 * leaf.size / 2**30 for leaf in jax.tree.leaves(like)]
    print(f"{model}: {sum(sizes):.2f} GiB, the largest array {max(sizes):.2f} GiB")

    def lazy(name: str, leaf) -> LazyArray:
        def draw() -> np.ndarray:
            return np.random.default_rng(0).standard_normal(leaf.shape, np.float32) * 0.02

        return LazyArray(leaf.shape, np.dtype(np.float32), draw)

    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, patterns.map_named(lazy, like)), path, "official"
    )


def convert(source: str, destination: str, to: str) -> None:
    """Converts and says what it took."""
    base, began = _peak(), time.monotonic()
    loading.convert(source, destination, to)
    seconds = time.monotonic() - began
    names = f"{source} -> {destination}"
    print(f"{names:<28} peak {_peak():.2f} GiB, {base:.2f} at the start, {seconds:.0f} s")


def _peak() -> float:
    """Resident memory in GiB; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        {"make": make, "convert": convert}[sys.argv[2]](*sys.argv[3:])
    else:
        main(*sys.argv[1:])
