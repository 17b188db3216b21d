"""The rows: what is compared with what, the runs of a row as they are stored, and what the rule says of them."""

import dataclasses
import importlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tests.parity import comparison

FIRST_SEED = 20
SEEDS = 10
OTHER_SEEDS = 1000  # is added for the peer's, so that the engines share no draw by chance
ENGINES = ("ours", "theirs")
_PACKAGES = ("jax", "flax", "optax", "torch", "timm", "transformers", "lightly")


@dataclasses.dataclass(frozen=True)
class Row:
    """A comparison by a module's functions of a seed, `ours` and `theirs`.

    Attributes:
      about: what is compared with whose engine.
      module: of this folder.
      variant: what its functions take beside the seed; '': nothing.
      judge: the quantity that says how good a run is; '': no curves are compared, but statistics of many draws.
      percent: whether it is a share.
      family: rows of one family are corrected together.
    """

    about: str
    module: str
    variant: str = ""
    judge: str = "accuracy"
    percent: bool = True
    family: str = "recipes"

    def engine(self, name: str) -> Callable[[int], dict[str, np.ndarray]]:
        """What makes the curves of a seed, of 'ours' or 'theirs'."""
        function = getattr(importlib.import_module(f"tests.parity.{self.module}"), name)
        if not self.variant:
            return function
        return lambda seed: function(seed, self.variant)


def _part(about: str, variant: str) -> Row:
    about = f"CIFAR-10, the recipe of deit3 without its parts, {about}; timm's parts"
    return Row(about, "deit", variant, family="parts of deit3")


ROWS = {
    "batch": Row(
        "what is drawn for a batch: crops, erasing, mixing, policies; timm's parts",
        "batch",
        judge="",
    ),
    "plain": Row("digits, AdamW, warm-up, cosine; Flax's layers and optax", "plain"),
    "huggingface": Row(
        "CIFAR-10, crops and flips, AdamW, linear; transformers' ViT, Trainer's rules",
        "huggingface",
    ),
    "deit": Row(
        "CIFAR-10, DeiT: repeats, RandAugment, mixing, erasing, EMA; timm's parts", "deit", "deit"
    ),
    "deit3": Row("CIFAR-10, DeiT III: 3-Augment, LAMB, binary loss; timm's parts", "deit", "deit3"),
    "finetune": Row(
        "CIFAR-10 at twice the size, SGD, interpolated positions; timm's ViT", "finetune"
    ),
    "mae": Row(
        "CIFAR-10, a masked autoencoder; transformers' ViTMAEForPreTraining",
        "mae",
        judge="held_out",
        percent=False,
    ),
    "first_steps": Row(
        "200 photos, the first 100 steps of configs/deit.py: losses and norms; timm's DeiT",
        "first_steps",
        judge="loss",
        percent=False,
    ),
    "eomt": Row(
        "scenes of digits, EoMT; transformers' EomtForUniversalSegmentation",
        "eomt",
        judge="mean_iou",
    ),
    "dino": Row("CIFAR-10, DINO; lightly's head, loss and average, timm's ViT", "dino"),
    "deit3_bare": _part("as it is", "bare"),
    "deit3_lamb": _part("with LAMB alone", "lamb"),
    "deit3_average": _part("with an average of the weights alone", "average"),
    "deit3_policy": _part("with 3-Augment alone", "policy"),
    "deit3_binary": _part("with the sigmoid loss alone", "binary"),
    "deit3_drop_path": _part("with stochastic depth alone", "drop_path"),
    "deit3_crops": _part("with random crops alone", "crops"),
}


def families() -> dict[str, list[str]]:
    """The rows that have curves, by the family whose tests are corrected together."""
    by_family = {}
    for name, row in ROWS.items():
        if row.judge:
            by_family.setdefault(row.family, []).append(name)
    return by_family


def run(name: str, seeds: Iterable[int], folder: pathlib.Path) -> None:
    """Trains with both engines and appends each run's curves to FOLDER/ROW.jsonl. What stands there is not repeated."""
    file = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    done = {(line["engine"], line["seed"]) for line in _lines(file)}
    for seed in seeds:
        for engine, offset in zip(ENGINES, (0, OTHER_SEEDS), strict=True):
            if (engine, seed + offset) in done:
                continue
            curves = ROWS[name].engine(engine)(seed + offset)
            rounded = {key: [float(f"{x:.6g}") for x in values] for key, values in curves.items()}
            line = json.dumps({"engine": engine, "seed": seed + offset, "curves": rounded})
            with file.open("a") as written:
                written.write(line + "\n")


def stored(name: str, folder: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """(seeds, TENTHS) by engine and by quantity, of the runs in FOLDER/ROW.jsonl."""
    curves = {}
    for line in _lines(folder / f"{name}.jsonl"):
        for quantity, values in line["curves"].items():
            curves.setdefault(line["engine"], {}).setdefault(quantity, []).append(values)
    return {
        engine: {quantity: np.array(values) for quantity, values in of_engine.items()}
        for engine, of_engine in curves.items()
    }


def is_complete(name: str, folder: pathlib.Path, seeds: int = SEEDS) -> bool:
    """Whether both engines have run a row with all seeds of the rule."""
    engines = [line["engine"] for line in _lines(folder / f"{name}.jsonl")]
    return all(engines.count(engine) == seeds for engine in ENGINES)


def judge(
    family: Sequence[str], folder: pathlib.Path, seeds: int = SEEDS
) -> list[tuple[comparison.Difference, bool]]:
    """The two numbers of each row of a family that has been run, and whether the rule calls them different."""
    found = []
    for name in family:
        if is_complete(name, folder, seeds):
            curves = stored(name, folder)
            both = (curves[engine][ROWS[name].judge] for engine in ENGINES)
            found += comparison.differences(name, *both)
    verdicts = comparison.rejected([x.p_value for x in found], tests=2 * len(family))
    return list(zip(found, verdicts, strict=True))


def table(family: Sequence[str], folder: pathlib.Path) -> list[str]:
    """The rows of a family as lines of Markdown: the verdict, both numbers, and the smallest difference at the end that
    is found with probability `comparison.POWER` at the strictest step of the correction.
    """
    judged = {}
    for difference, differs in judge(family, folder):
        judged.setdefault(difference.row, []).append((difference, differs))
    lines = [
        "| row | by the rule | at the end | over the whole curve | finds |",
        "|---|---|---|---|---|",
    ]
    for name in family:
        if name not in judged:
            lines.append(f"| `{name}` | not rerun | | | |")
            continue
        (end, end_differs), (area, area_differs) = judged[name]
        verdict = "**differs**" if end_differs or area_differs else "no difference was found"
        level = comparison.LEVEL / (2 * len(family))
        smallest = comparison.smallest_seen(end.seeds, level) * end.scatter
        scale, digits = (100, 2) if ROWS[name].percent else (1, 4)
        numbers = " | ".join(_in_words(number, scale, digits) for number in (end, area))
        lines.append(f"| `{name}` | {verdict} | {numbers} | {scale * smallest:.{digits}f} |")
    return lines


def _in_words(difference: comparison.Difference, scale: int, digits: int) -> str:
    ours, theirs = (f"{scale * x:.{digits}f}" for x in (difference.ours, difference.theirs))
    apart = f"{scale * (difference.ours - difference.theirs):+.{digits}f}".replace("-", "−")
    error = f"{scale * difference.error:.{digits}f}"
    return f"{ours} − {theirs} = {apart} (error {error}, p {difference.p_value:.2f})"


def versions() -> str:
    """The versions of the engines."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)


def _lines(file: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
