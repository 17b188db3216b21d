"""A plan as text for a terminal."""

from vit_jax.base import sizes
from vit_jax.planning.estimate import BLIND, BLIND_GPU

_GIB = 2**30


def text(plan: dict) -> str:
    """The plan as an aligned table with its basis below."""
    rows = [*_work(plan), ("", ""), *_memory(plan)]
    if plan["fits"]:
        rows += [("", ""), *_network(plan)]
        if "seconds" in plan:
            rows += [("", ""), *_time(plan)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}".rstrip() for name, value in rows]
    if not plan["fits"]:
        lines += ["", f"Out of memory by {size_text(plan['missing_bytes'])} a device. What helps:"]
        lines += [f"  {advice}" for advice in plan["advice"]]
    if "tried" in plan:
        lines += ["", "Tried:", *(f"  {tried}" for tried in plan["tried"])]
        advice = f"Set {' '.join(plan['options'])}" if plan["options"] else "The config is best."
        lines += ["", advice]
    if "seconds" in plan:
        blind = BLIND_GPU if "roofline" in plan else BLIND
        lines += ["", *(f"{name}: {reason}." for name, reason in blind.items())]
    return "\n".join(lines)


def summary_row(plan: dict) -> str:
    """A plan in one line, for lists of what was tried."""
    choice = (
        f"remat {plan['remat']:<14} unroll {plan['unroll']:<2} accumulate {plan['accumulate']:<3}"
        f" mesh {' x '.join(map(str, plan['mesh'].values())):<12}"
    )
    if not plan["fits"]:
        return f"{choice} out of memory by {size_text(plan['missing_bytes'])}"
    time = f"{1e3 * plan['seconds']['expected']:.0f} ms" if "seconds" in plan else ""
    return f"{choice} {size_text(plan['memory']['peak'])} {time}".rstrip()


def range_text(values: list[float]) -> str:
    """(least, expected, most) of a figure: '12 (10 to 15)'."""
    return _range([_number(value) for value in values])


def _work(plan: dict) -> list[tuple[str, str]]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    slices = f"{plan['slices']} x " if plan["slices"] > 1 else ""
    once = plan["model_flops_per_step"] / plan["devices"]
    each = f"{plan['batch_per_chip']:g} a chip, {plan['batch_per_pass']:g} a pass of a replica"
    matrices = [("matrices", _matrices(plan["matrices"]))] if "matrices" in plan else []
    return [
        ("model", f"{plan['model']}, {plan['image_size']} px, {plan['dtype']}"),
        ("parameters", f"{plan['parameters']:,}"),
        ("topology", f"{slices}{plan['topology']}: {plan['chips']:,} chips, {plan['hosts']} hosts"),
        ("mesh", mesh),
        ("batch", f"{plan['batch_size']:,}: {each}"),
        (
            "optimizer, remat",
            f"{plan['optimizer']}, {plan['remat']}, accumulate {plan['accumulate']}",
        ),
        ("choices", plan["choices"]),
        ("steps", f"{plan['steps']:,}"),
        (
            "products of a step",
            f"{plan['flops_per_device']:.3g} FLOP a device, without recomputation {once:.3g}",
        ),
        *_sizes(plan),
        *matrices,
    ]


def _matrices(matrices: dict) -> str:
    stacks = [
        f"{row['count']} of {row['shape'][0]} x {row['shape'][1]}" for row in matrices["stacks"]
    ]
    most, equal = matrices["flops_per_device"], matrices["flops_per_device_if_equal"]
    return f"{', '.join(stacks)}; {most:.3g} FLOP a device, {most / equal:.2f} x an equal share"


def _sizes(plan: dict) -> list[tuple[str, str]]:
    """The steps of each size of images or patches, and the products of all together."""
    if "sizes" not in plan:
        return []
    rows, total, largest = [], 0.0, 0.0
    for row in plan["sizes"]:
        total += row["steps"] * row["flops_per_device"]
        largest += row["steps"] * plan["flops_per_device"]
        start = f" from {row['first_step']:,}" if "first_step" in row else ""
        text = f"{row['steps']:,} steps{start}, {row['flops_per_device']:.3g} FLOP a device"
        if "seconds" in row:
            seconds = row["seconds"]
            text += f", {_ms(seconds['expected'])} expected, {_ms(seconds['floor'])} floor"
        if "patches" in row:
            name = f"{row['patches']} patches"
            text = f"{row['batch_size']:,} images, {text}"
        elif "patch" in row:
            name = f"patches of {row['patch']}"
        else:
            name = f"{sizes.size_text(row['image_size'])} px"
        rows.append((f"  {name}", text))
    saved = (
        f"{total:.3g} FLOP a device, {1 - total / largest:.1%} less than all at the largest size"
    )
    return [*rows, ("products of the run", saved)]


def _memory(plan: dict) -> list[tuple[str, str]]:
    memory, capacity = plan["memory"], plan["memory"]["capacity"]
    share = f", {memory['peak'] / capacity:.0%} of {size_text(capacity)}" if capacity else ""
    rows = [
        ("memory of a device", f"peak {size_text(memory['peak'])}{share}"),
        (
            "  arguments",
            f"{size_text(memory['arguments'])}, of that state {size_text(memory['state'])}",
        ),
        ("  temporaries", size_text(memory["temporaries"])),
    ]
    if "local_disk_bytes" in plan:
        rows.append(
            ("  local disk", f"{size_text(plan['local_disk_bytes'])} a host, for checkpoint.local")
        )
    for array in memory["largest"][:4]:
        rows.append(("  large", f"{size_text(array['bytes'])}  {array['what']}"))
    return rows


def _network(plan: dict) -> list[tuple[str, str]]:
    rows = [("collectives of a step", "" if plan["collectives"] else "none")]
    for row in plan["collectives"]:
        among = f"{row['devices']} devices"
        if row["crosses_slices"]:
            among = f"{among}, beyond NVLink" if "roofline" in plan else f"{row['devices']} slices"
        size, sent = size_text(row["bytes"]), size_text(row["sent_bytes"])
        rows.append(
            (f"  {row['kind']}", f"{row['count']:>5g} over {among:<13} {size}, {sent} sent")
        )
    return rows


def _time(plan: dict) -> list[tuple[str, str]]:
    seconds, run = plan["seconds"], plan["run"]
    rising = {name: [_number(v) for v in reversed(values)] for name, values in run.items()}
    slices = seconds["slices"]
    parts = [f"{name} {_ms(seconds[name])}" for name in ("products", "memory", "network")]
    where = "beyond NVLink" if "roofline" in plan else "between slices"
    parts.append(f"{where} {'unknown' if slices is None else _ms(slices)}")
    rows = [
        ("time of a step", f"{_ms(seconds['expected'])} expected"),
        ("  range", f"{_ms(seconds['floor'])} floor to {_ms(seconds['ceiling'])} ceiling"),
        ("  at best", ", ".join(parts)),
        *(_roofline(plan) if "roofline" in plan else _cycles(plan)),
        ("images/s", _range(rising["images_per_second"])),
        ("MFU", _range([f"{share:.0%}" for share in reversed(run["mfu"])])),
        ("time to finish", f"{range_text(run['hours'])} hours"),
        ("chip-hours", range_text(run["chip_hours"])),
        ("TPUv3-core-days", f"{range_text(run['tpu_v3_core_days'])}, by peak rates"),
    ]
    return rows + ([("cost", range_text(run["cost"]))] if "cost" in run else [])


def _cycles(plan: dict) -> list[tuple[str, str]]:
    cycles = plan["cycles"]["all"]
    total = sum(cycles.values())
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in cycles.items())
    return [
        ("  cycles", f"{total / 1e6:.0f} M: {shares}"),
        *(("  above its floor", _gap(row)) for row in _gaps(plan["rooflines"])[:3]),
        *(("  branches", _conditional(row)) for row in plan["conditionals"][:3]),
        *(("  kernel", _kernel(row)) for row in plan["kernels"]),
    ]


def _roofline(plan: dict) -> list[tuple[str, str]]:
    parts = {part: row for part, row in plan["roofline"].items() if row["kernels"]}
    names = ("kernels", "bytes", "flops", "floor", "usual")
    parts["all kernels"] = {name: sum(row[name] for row in parts.values()) for name in names}
    return [
        (
            f"  {part}",
            f"{row['kernels']:>6,} kernels {row['bytes'] / 1e9:>7.2f} GB {row['flops'] / 1e12:>7.2f} TFLOP"
            f" {1e3 * row['floor']:>7.2f} ms floor {1e3 * row['usual']:>7.2f} ms usual",
        )
        for part, row in parts.items()
    ]


def _gaps(rooflines: list[dict]) -> list[dict]:
    """The operations that the compiler estimates furthest above their floor, first."""
    return sorted(rooflines, key=lambda row: row["floor"] - row["estimated"])


def _gap(row: dict) -> str:
    bounds = ", ".join(f"{name} {_ms(row[name])}" for name in ("products", "bytes"))
    return f"{row['name']}: estimated {_ms(row['estimated'])}, {bounds}, {row['times']:g} times"


def _conditional(row: dict) -> str:
    counted = f"{row['branches']}, {row['counted']}, {row['times']:g} times"
    return f"{row['cycles'] / 1e6:.3g} M cycles: {counted}"


def _kernel(row: dict) -> str:
    programs = f"{row['bundles']:,} bundles x {row['programs']:,} programs"
    return f"{row['times'] * row['cycles'] / 1e6:.3g} M cycles: {row['name']}, {programs}, {row['times']:g} times"


def _range(values: list[str]) -> str:
    least, expected, most = values
    return f"{expected} ({least} to {most})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size_text(size: float) -> str:
    """Bytes in GiB, or MiB."""
    if size >= _GIB / 10:
        return f"{size / _GIB:.2f} GiB"
    return f"{size / 2**20:.2f} MiB"
