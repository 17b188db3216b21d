"""How good a run's classifier is on images that it has not learned from, as a part of a page: accuracy with class
names and counts, which classes are confused, and the surest mistakes. `judge` measures it once the run is done and
leaves it in the run's folder, where `report` finds it.
"""

import csv
import os
from collections.abc import Sequence

from etils import epath
from PIL import Image

from vit_jax.base import places
from vit_jax.evaluation import classification
from vit_jax.evaluation.progress import with_progress
from vit_jax.evaluation.run import evaluate_run
from vit_jax.pictures.page import Page
from vit_jax.prediction import overrides
from vit_jax.studies.labelling import Labelling, labelling_of_metrics

FOLDER = "judged"
_PAIRS = 10  # of classes that are confused, in the table
_CALIBRATED = 200  # images, of fewer the curve of probabilities is noise


def judge(
    workdir: epath.PathLike, data: Sequence[tuple[str, str]] = (), *, thresholds: str = ""
) -> dict[str, float]:
    """Measures a run's newest checkpoint, or a checkpoint of ours, into WORKDIR/judged.

    Args:
      data: fields of the config that say on which images, where the checkpoint is not of a run; see
        `overrides.load_to_evaluate`.
      thresholds: the option of the evaluator `classification`.

    Returns:
      The metrics of the evaluator `classification`, without its prefix.

    Raises:
      ConfigError: the images have no labels, or the model has no head.
    """
    folder = places.locate(workdir) / FOLDER
    # Process 0 alone writes, so the table may be written while others read it.
    options = {"out": str(folder), "images": True, "prefix": "judged", "thresholds": thresholds}
    changes = [*data, ("eval.evaluators", repr((("classification", options),)))]
    run, config = overrides.load_to_evaluate(workdir, changes)
    metrics, _ = evaluate_run(run, config, watch=with_progress)
    return {name.removeprefix("judged/"): value for name, value in metrics.items()}


def is_judged(workdir: epath.PathLike) -> bool:
    """Whether a run's folder has what `judge` writes."""
    return (epath.Path(workdir) / FOLDER / classification.METRICS).exists()


def add_to_page(page: Page, workdir: epath.PathLike) -> None:
    """Appends what `judge` found to a page."""
    folder = epath.Path(workdir) / FOLDER
    metrics = places.read_json(folder / classification.METRICS) or {}
    page.heading("Accuracy")
    classes = folder / classification.CLASSES
    rows = _read(classes) if classes.exists() else []
    labelling = labelling_of_metrics(metrics)
    for number, line in enumerate(labelling.lines(metrics, rows)):
        page.text(line, large=number == 0)
    if rows and "recall" in rows[0]:  # not if a softmax judged images of several labels
        page.table(labelling.class_table(rows))
        page.text(labelling.class_note())
    if (folder / classification.THRESHOLDS).exists():
        page.text(
            "The threshold of each class was chosen on these very images, for the highest F1. Recall, precision and F1 "
            "of other images are therefore a little lower; average precision needs no threshold."
        )
    pictures = ["calibration"] if metrics["examples"] >= _CALIBRATED else []
    if (folder / classification.CONFUSION).exists():
        page.heading("Which classes are taken for which")
        pairs = _confused_rows(folder)
        if len(pairs) > 1:
            page.table(pairs)
        else:
            page.text("None is.", absent=True)
        pictures = ["confusion", *pictures]
    for name in pictures:
        if (folder / f"{name}.png").exists():
            with (folder / f"{name}.png").open("rb") as file:
                page.picture(Image.open(file).copy(), name)
    if (folder / classification.MISTAKES).exists():
        page.heading("The surest mistakes")
        _add_mistakes(page, folder, labelling)


def _confused_rows(folder: epath.Path) -> list[list[str]]:
    """The pairs of classes that are confused most."""
    pairs = [row for row in _read(folder / classification.CONFUSION) if _is_wrong(row)]
    pairs.sort(key=lambda row: -int(row["examples"]))
    table = [["class", "taken for", "images"]]
    return table + [[r["class"], r["predicted"], r["examples"]] for r in pairs[:_PAIRS]]


def _add_mistakes(page: Page, folder: epath.Path, labelling: Labelling) -> None:
    rows = _read(folder / classification.MISTAKES)
    if not rows:
        page.text("There are none.", absent=True)
        return
    page.text(
        "The most probable answers that are wrong come first. Look at their labels, too: some may be wrong."
    )
    pictures = []
    for row in rows:
        if row["picture"]:
            content = (folder / row["picture"]).read_bytes()
            name = os.path.basename(row["image"])
            pictures.append((content, f"{labelling.mistake(row)}: {name}", row["image"]))
    page.gallery(pictures)


def _is_wrong(row: dict[str, str]) -> bool:
    return row["class"] != row["predicted"]


def _read(path: epath.Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
