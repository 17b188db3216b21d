"""What two recipes compile to on eight H100s, kept as JSON to be reviewed in `tests/golden/gpu/`.

    python -m tests.planning.gpu_golden [NAME …]     rewrites them on purpose, a minute each

It needs `pip install 'vit_jax[plan-gpu]'`. `test_gpu_golden.py` compares. A change there is a change of what a GPU
will do: of copies, of transpositions, of memory, of traffic.
"""

import importlib.metadata
import json
import sys

import jax

from tests.planning import golden
from tests.planning.golden import Case
from vit_jax.planning import plan, target

FOLDER = golden.FOLDER / "gpu"
CASES = {
    "vit_jft-B16": Case("vit_jft.py:B/16", "h100:8", changes=(("batch_size", 2048),)),
    "vit_jft-L16": Case("vit_jft.py:L/16", "h100:8", changes=(("batch_size", 1024),)),
}
# One H100 each: nothing is kept of them but that they compile and fit.
_EOMT = (
    ("init_from", ""), ("model.name", "ViT-B/16"), ("data.mean", (0.5, 0.5, 0.5)),
    ("data.std", (0.5, 0.5, 0.5)), ("data.interpolation", "bilinear"),
)  # fmt: skip
COMPILED = {
    "H/14": Case("vit_jft.py:H/14", "h100:1", changes=(("batch_size", 64),)),
    "MAE-L": Case("mae.py:L/16", "h100:1", changes=(("batch_size", 256),)),
    "DINO-B": Case("dino.py:B/16", "h100:1", changes=(("batch_size", 64),)),
    "Mixer-B": Case("mixer.py:B/16,jft300m", "h100:1", changes=(("batch_size", 256),)),
    "R50+B/16": Case(
        "vit_i1k.py:B/16,none", "h100:1",
        changes=(("batch_size", 128), ("model.name", "R50+ViT-B/16")),
    ),
    "DeiT-S": Case("deit.py:S", "h100:1", changes=(("batch_size", 256),)),
    "EoMT": Case("segmentation.py", "h100:1", changes=_EOMT, examples=20_210, num_classes=150),
}  # fmt: skip


def plan_of(case: Case) -> dict:
    where = target.find(case.topology)  # before JAX looks for devices
    return plan.make_plan(golden.assembly_of(case), where)


def reviewed_part(case: Case, made: dict) -> dict:
    """Of a plan what is kept."""
    kernels = {
        part: {"kernels": row["kernels"], "bytes": row["bytes"]}
        for part, row in made["roofline"].items()
    }
    layers = golden.assembly_of(case).model_config.depth
    return {
        "choices": made["choices"],
        "mesh": made["mesh"],
        "batch_per_chip": made["batch_per_chip"],
        "memory": {name: made["memory"][name] for name in ("arguments", "temporaries", "peak")},
        "kernels": kernels,
        "attention_calls_a_layer": kernels["attention"]["kernels"] / layers,
        "milliseconds": {
            name: round(1e3 * made["seconds"][name], 2) for name in ("floor", "expected")
        },
        "mfu": [round(share, 3) for share in made["run"]["mfu"][:2]],
        "collectives": made["collectives"],
    }


def versions() -> dict:
    """Of what decides how a program is compiled."""
    return {"jax": jax.__version__, "cuda": importlib.metadata.version("jax-cuda13-plugin")}


def write(name: str) -> None:
    case = CASES[name]
    kept = {"config": case.config, "topology": case.topology, "versions": versions()}
    kept |= reviewed_part(case, plan_of(case))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        write(name)
        print(f"{name}: written", flush=True)
