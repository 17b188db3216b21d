"""Bundles of the attention kernels on v5e, an image each, as models call them, kept in `attention_bundles.json`.

    python -m tests.planning.attention_bundles     counts all again and rewrites the file: 6 minutes

A bundle is issued a cycle, so these are the kernels' cycles where nothing waits for memory.
`test_attention_bundles.py` refuses a slower schedule.
"""

import importlib.metadata
import json
import pathlib

import jax
import jax.numpy as jnp

from vit_jax.compute import attend
from vit_jax.devices import meshes
from vit_jax.planning import hlo, kernels, target

FILE = pathlib.Path(__file__).with_suffix(".json")
TOPOLOGY = "v5e:1x1"
# Tokens, heads and channels of a head.
SHAPES = {
    "MAE's decoder": (197, 16, 32),
    "S/16": (197, 6, 64),
    "B/16": (197, 12, 64),
    "L/16": (197, 16, 64),
    "H/14": (257, 16, 80),
    "g/14": (257, 16, 88),
    "G/14": (257, 16, 104),
    "B/16 at 384 pixels": (577, 12, 64),
    "B/16 at 512 pixels": (1024, 12, 64),
    "B/16 at 768 pixels": (2304, 12, 64),
    "NaFlexViT of B/16, 1,024 patches": (1028, 12, 64),
    "NaFlexViT of B/16, 576 patches": (580, 12, 64),
}
WITH_LENGTHS = {f"{name}, lengths": shape for name, shape in SHAPES.items() if "NaFlex" in name}
SHAPES |= WITH_LENGTHS


def count(name: str) -> dict[str, int]:
    """Bundles of the forward and the backward kernel."""
    tokens, heads, size = SHAPES[name]
    width = heads * size
    mesh = meshes.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, target.find(TOPOLOGY).devices[:1])

    def layer(x, kernel, bias, lengths):
        packed = attend.project_and_attend(x, kernel, bias, lengths=lengths)
        if packed is not None:
            return packed
        projected = attend.project(x, kernel, bias, implementation="auto")
        return attend.attend(*projected, lengths=lengths)

    @jax.jit
    def forward_and_backward(x, kernel, bias, lengths):
        heads, back = jax.vjp(lambda *arrays: layer(*arrays, lengths), x, kernel, bias)
        return back(heads)

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((2, tokens, width), jnp.bfloat16)
        kernel = jax.ShapeDtypeStruct((width, 3, heads, size), jnp.float32)
        bias = jax.ShapeDtypeStruct((3, heads, size), jnp.float32)
        lengths = jax.ShapeDtypeStruct((2,), jnp.int32) if name in WITH_LENGTHS else None
        text = forward_and_backward.lower(x, kernel, bias, lengths).compile().as_text()
    counted = kernels.count_bundles(kernels.find_kernels(hlo.parse(text)), TOPOLOGY)
    return {
        "backward" if "backward" in name else "forward": bundles
        for name, bundles in counted.items()
    }


def versions() -> dict[str, str]:
    """Of what makes the schedule."""
    return {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}


if __name__ == "__main__":
    counted = {"versions": versions()} | {name: count(name) for name in SHAPES}
    FILE.write_text(json.dumps(counted, indent=1) + "\n")
    print(FILE.read_text())
