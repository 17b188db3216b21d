"""How far both counts of `plan` are from the time that a step takes, by kind of operation: an hour on one host of TPUs.

    python tests/benchmarks/tpu_drill.py --out=drill.json [--cases=S/16,…] [--rehearse]

Each case is a training step on the chips of a host, compiled and traced there. The profiler's time of every operation
stands beside the compiler's estimate, and beside the floor of `planning/tpu_roofline.py`: products at the peak, bytes
at the memory's rate. Kernels have no estimate; bundles of theirs are in `tests/planning/attention_bundles.json`. OUT
has what was measured up to the last case; a case that fails costs only itself, and makes the exit code 1. --rehearse
takes a tiny step on a CPU, with the rates of v5e, so that only the figures are new on a TPU.

docs/notes/2026-11-26-calibration-on-tpus.md says what to do with them.
"""

import argparse
import collections
import json
import pathlib
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# A recipe, images on a device, fields.
CASES = {
    "S/16": ("vit_s16_i1k.py", 128, {}),
    "B/16": ("scaling_vit.py:B/16", 64, {}),
    "L/16": ("vit_i21k.py:L/16", 16, {}),
    "H/14": ("vit_jft.py:H/14", 16, {}),
    "B/16 at 384": ("scaling_vit.py:B/16", 16, {"data.image_size": 384}),
    "B/16 at 640": ("scaling_vit.py:B/16", 8, {"data.image_size": 640}),
    "B/16 at 1024": ("scaling_vit.py:B/16", 2, {"data.image_size": 1024}),
    "H/14 at 518": ("vit_jft.py:H/14", 4, {"data.image_size": 518}),
}
REHEARSAL = ("digits.py", 8, {"model.depth": 2})
STEPS = 3  # that are traced
KERNEL = '"tpu_custom_call"'
TRANSCENDENTAL = {"exponential", "tanh", "erf", "logistic", "log", "rsqrt", "power"}
MOVES = {"copy", "transpose", "bitcast", "slice", "dynamic-slice", "pad", "concatenate", "reshape"}
SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "convert", "broadcast", "iota"}


def kind_of(program, instruction) -> str:
    """What an operation is made of: 'product', 'product, curve, store', 'kernel', 'sum, bf16', …"""
    if KERNEL in instruction.attributes:
        return "kernel"
    parts = [instruction, *(inner for _, inner in program.inside(instruction))]
    codes = {part.opcode for part in parts} - SILENT - {"fusion"}
    words = []
    if codes & {"dot", "convolution"}:
        words.append("product")
    if codes & TRANSCENDENTAL:
        words.append("curve")
    if codes & {"reduce", "reduce-window"}:
        words.append("sum")
    if "dynamic-update-slice" in codes:
        words.append("store")
    if not words:
        words.append("move" if codes <= MOVES else "elementwise")
    if "product" not in words:
        words += sorted({shape.dtype for shape in instruction.shapes})[:1]
    return ", ".join(words)


def read_trace(folder: str) -> dict[str, float]:
    """Seconds of all runs of each operation that the profiler saw, of all devices, by its name."""
    import jax

    seconds: dict[str, float] = collections.defaultdict(float)
    for path in pathlib.Path(folder).rglob("*.xplane.pb"):
        data = jax.profiler.ProfileData.from_file(str(path))
        for plane, line in ((p, line) for p in data.planes for line in p.lines):
            # A TPU's line of operations; a CPU says of each event which one it is.
            on_tpu = plane.name.startswith("/device:TPU") and line.name == "XLA Ops"
            for event in line.events:
                name = event.name if on_tpu else dict(event.stats).get("hlo_op")
                if name and not event.name.startswith("end: "):
                    seconds[re.match(r"%?([\w.-]+)", name)[1]] += event.duration_ns / 1e9
    return dict(seconds)


def rows(program, tpu, seconds: dict[str, float]) -> Iterator[dict]:
    """Of every operation that the profiler saw: microseconds of a step on a device."""
    from vit_jax.planning import tpu_roofline

    devices = tpu.devices_per_chip
    shapes = {i.name: i.shapes for lines in program.computations.values() for i in lines}
    for instruction, times in program.steps():
        if instruction.name not in seconds or instruction.opcode in (
            "while",
            "call",
            "conditional",
        ):
            continue
        flops = tpu_roofline.product_flops(program, instruction, shapes)
        size = tpu_roofline.large_bytes(program, instruction, shapes)
        estimated = instruction.estimated_cycles
        yield {
            "name": instruction.name,
            "kind": kind_of(program, instruction),
            "source": instruction.source,
            "measured": 1e6 * seconds[instruction.name] / STEPS,
            "estimated": estimated and 1e6 * times * estimated / tpu.clock,
            "products": 1e6 * times * flops * devices / tpu.peak,
            "bytes": 1e6 * times * size * devices / tpu.hbm_rate,
        }


def by_kind(table: list[dict]) -> list[dict]:
    """The rows added up, longest first, with the factors that calibrate either count; `None` where it has nothing."""
    kinds: dict[str, list[dict]] = collections.defaultdict(list)
    for row in table:
        kinds[row["kind"]].append(row)
    sums = []
    for kind, members in kinds.items():
        measured = sum(row["measured"] for row in members)
        estimated = sum(row["estimated"] or 0 for row in members)
        floor = sum(max(row["products"], row["bytes"]) for row in members)
        factors = {
            "measured_over_estimated": measured / estimated if estimated else None,
            "measured_over_floor": measured / floor if floor else None,
        }
        sums.append(dict(kind=kind, operations=len(members), measured=measured, **factors))
    return sorted(sums, key=lambda row: -row["measured"])


def measure(spec: str, images: int, fields: dict) -> dict:
    """A case."""
    import jax

    from vit_jax.benchmarks import breakdown, step
    from vit_jax.devices import chips
    from vit_jax.planning import hlo
    from vit_jax.recipes.user_files import load_config

    config = load_config(str(ROOT / "configs" / spec))
    devices = jax.device_count()
    config.batch_size = images * devices
    config.mesh.update(dict(data=devices, fsdp=1, tensor=1))
    for field, value in fields.items():
        section, name = field.split(".")
        config[section][name] = value
    timed = step.Timed(config)
    times = breakdown.seconds(timed.run, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            breakdown.seconds(timed.run, STEPS, warm_up=0)
        seconds = {name: total / devices for name, total in read_trace(folder).items()}
    kind = jax.devices()[0].device_kind
    known = {tpu.device_kind: tpu for tpu in chips.TPUS.values()}
    tpu = known.get(kind, chips.TPUS["v5e"])
    table = list(rows(hlo.parse(timed.compiled.as_text()), tpu, seconds))
    total = sum(row["measured"] for row in table)
    peak = tpu.peak * devices / tpu.devices_per_chip
    return {
        "device": kind,
        "step_us": 1e6 * statistics.median(times),
        "operations_us": total,
        "share_of_peak": timed.assembly.step_flops / statistics.median(times) / peak,
        "attention": list(timed.attention),
        "kinds": by_kind(table),
        "rows": sorted(table, key=lambda row: -row["measured"])[:100],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rehearse", action="store_true")
    flags = parser.parse_args()
    cases = (
        {"rehearsal": REHEARSAL}
        if flags.rehearse
        else {n: CASES[n] for n in flags.cases.split(",")}
    )
    results = {}
    for name, case in cases.items():
        try:
            results[name] = measure(*case)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        flags.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {results[name].get('error') or results[name]['kinds'][:3]}", flush=True)
    return int(any("error" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
