"""What `calibration` finds, as a table and as a picture of accuracy over cost."""

from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax.pictures import style
from vit_jax.pictures.page import png
from vit_jax.pictures.plot import Plot


def text(result: dict) -> str:
    """The table of `calibration.calibrate`'s result: a row for each exit and for each budget."""
    judged, known = result["judged_on"], result["calibrated_on"]
    rows = [("", "GFLOPs", "accuracy", "geometric", "entropy", "random", "leave", "thresholds")]
    for number, row in enumerate(result["exits"], start=1):
        rows.append((f"exit {number}", f"{row['gflops']:.4g}", f"{row['accuracy']:.2%}"))
    for row in result["budgets"]:
        rivals = (
            "-" if row[n] is None else f"{row[n]:.2%}" for n in ("geometric", "entropy", "random")
        )
        shares = " ".join(f"{share:.0%}" for share in row["shares"])
        values = ",".join(f"{value:.4f}" for value in row["thresholds"])
        name, spent = f"budget {row['budget']:g}", f"{row['gflops']:.4g}"
        rows.append((name, spent, f"{row['accuracy']:.2%}", *rivals, shares, values))
    rows = [(*row, *[""] * (len(rows[0]) - len(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [
        "",
        f"Thresholds solved on {known['images']} images of {known['split']}; accuracy and GFLOPs "
        f"(10⁹ multiply-adds an image)",
        f"on the {judged['images']} images of {judged['split']}. geometric: the official code's best "
        "setting within the budget;",
        "entropy: leaving by low entropy; random: by lot, with the same shares.",
    ]
    return "\n".join(lines)


def draw_report(result: dict, path: epath.PathLike) -> None:
    """A PNG file of accuracy over cost: the official code's settings as a curve, the budgets as dots,
    each exit alone as reference.
    """
    curve = sorted((row["gflops"], row["accuracy"]) for row in result["geometric"])
    solved = [(row["gflops"], row["accuracy"]) for row in result["budgets"]]
    alone = [(row["gflops"], row["accuracy"]) for row in result["exits"]]
    rivals = [(row["calibration"]["gflops"], row["random"]) for row in result["budgets"]]
    most = max(gflops for gflops, _ in [*curve, *solved, *alone, *rivals])
    plot = Plot(
        "Accuracy over what an image costs",
        x="GFLOPs (multiply-adds) of an image", y="accuracy [%]", x_limits=(0.0, 1.05 * most),
    )  # fmt: skip
    _, orange, green = style.COLOURS[:3]
    plot.line(*_percent(curve), style.BLUE, "geometric shares")
    plot.dots(*_percent(rivals), style.GREY, "leaving by lot", shape="^")
    plot.dots(*_percent(alone), orange, "one exit alone", shape="s")
    for number, (gflops, accuracy) in enumerate(alone, start=1):
        plot.note(gflops, 100 * accuracy, f"exit {number}", orange)
    plot.dots(*_percent(solved), green, "solved for a budget")
    epath.Path(path).write_bytes(png(plot.image()))


def _percent(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """GFLOPs and accuracies in percent."""
    gflops, accuracies = np.array(points, np.float64).reshape(-1, 2).T
    return gflops, 100 * accuracies
