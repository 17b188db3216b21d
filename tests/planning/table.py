"""The table of docs/planning.md, made by `vit_jax plan`:

    python -m tests.planning.table [MODEL …]     these rows anew, or all: a minute each

Every row is a run of the command in a process of its own, on whose output the row is based.
"""

import json
import pathlib
import re
import subprocess
import sys
import time

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "planning.md"
ROWS = {
    "B/16": "--config=configs/scaling_vit.py:B/16 --topology=v5e:8x8",
    "H/14": "--config=configs/vit_jft.py:H/14 --topology=v5e:16x16 --config.batch_size=8192 --config.mesh.fsdp=16",
    "g/14": "--config=configs/scaling_vit.py:g/14 --topology=v5p:4x8x8",
    "G/14": "--config=configs/scaling_vit.py:G/14 --topology=v5p:8x8x16 --config.batch_size=32768 "
    "--config.mesh.fsdp=16",
    "22B": "--config=configs/scaling_vit.py:G/14 --config.model.name=ViT-22B/14 --topology=v5p:8x8x16 "
    "--config.mesh.fsdp=32 --config.mesh.tensor=4",
}
HEAD = (
    "| model | flags | chips: mesh | peak memory | step, ms | MFU | days |",
    "|---|---|---|---|---|---|---|",
)


def row(model: str, plan: dict) -> str:
    """A line of the table."""
    memory, run, seconds = plan["memory"], plan["run"], plan["seconds"]
    mesh = " x ".join(str(size) for size in plan["mesh"].values())
    step = [1e3 * seconds[basis] for basis in ("expected", "floor", "ceiling")]
    cells = [
        model,
        f"`{ROWS[model]}`",
        f"{plan['chips']:,}: {mesh}",
        f"{memory['peak'] / 2**30:.1f} of {memory['capacity'] / 2**30:.1f} GiB",
        "{:.0f} ({:.0f} to {:.0f})".format(*step),
        f"{run['mfu'][1]:.0%}",
        f"{run['hours'][1] / 24:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def make(model: str) -> str:
    command = [sys.executable, "-m", "vit_jax", "plan", *ROWS[model].split(), "--json"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(f"{model}: {time.monotonic() - began:.0f} s", flush=True)
    return row(model, json.loads(done.stdout.splitlines()[-1]))


def put(new: dict[str, str]) -> None:
    """Puts lines, by model, into the document."""
    text = DOCS.read_text()
    lines = dict(re.findall(r"^(\| (\S+) \| `--config.*)$", text, re.MULTILINE))
    lines = {model: line for line, model in lines.items()} | new
    table = "\n".join([*HEAD, *(lines[model] for model in ROWS if model in lines)])
    start, end = "<!-- table -->", "<!-- end -->"
    before, after = text.partition(start)[0], text.partition(end)[2]
    DOCS.write_text(f"{before}{start}\n{table}\n{end}{after}")


if __name__ == "__main__":
    for name in sys.argv[1:] or ROWS:
        put({name: make(name)})
