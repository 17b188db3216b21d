"""Named lists of evaluators: what is reported of a model of ImageNet, and how well its features serve other
sets. Sets that do not exist are skipped and named.
"""

import dataclasses
from collections.abc import Iterator

from absl import logging

from vit_jax import evaluation
from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.data import sources
from vit_jax.data.record import DataAbsent
from vit_jax.data.sources.known_sets import FEW_SHOT
from vit_jax.data.sources.prepared import DESCRIPTION
from vit_jax.data.sources.tfds import data_dir
from vit_jax.evaluation.contract import EvalContext
from vit_jax.evaluation.features import FeatureEvaluator
from vit_jax.evaluation.templates import with_run_templates


@dataclasses.dataclass(frozen=True)
class Part:
    """One row of a suite.

    Attributes:
      prefix: of its metrics.
      evaluator: its name.
      data: the data set, by its name in TFDS or here; DIR/NAME of `vit_jax prepare`, or a folder of class
        folders, where the suite is given a DIR.
      split: the examples that are judged.
      options: of the evaluator.
    """

    prefix: str
    evaluator: str
    data: str
    split: str = "test"
    options: tuple[tuple[str, object], ...] = ()


_PRESENT = (("present", True),)
_UNKNOWN = (("unlabelled", "unknown"),)  # an image without a label says nothing in ReaL
SUITES: dict[str, tuple[Part, ...]] = {
    "imagenet": (
        Part("imagenet", "classification", "imagenet2012"),
        Part("real", "classification", "imagenet2012_real", options=_UNKNOWN),
        Part("v2", "classification", "imagenet_v2/matched-frequency"),
        Part("v2_threshold", "classification", "imagenet_v2/threshold-0.7"),
        Part("v2_top", "classification", "imagenet_v2/topimages"),
        Part("objectnet", "classification", "objectnet"),
        Part("r", "classification", "imagenet_r", options=_PRESENT),
        Part("a", "classification", "imagenet_a", options=_PRESENT),
        Part("c", "imagenet_c", "imagenet2012_corrupted", "validation"),
    ),
} | {
    evaluator: tuple(Part(n.partition("/")[2], evaluator, n) for n in FEW_SHOT)
    for evaluator in ("few_shot", "knn")
}
# Sets that TFDS has with a test split and names of classes.
_ZERO_SHOT = (
    "imagenet2012", "cifar10", "cifar100", "caltech101", "cars196", "dtd", "oxford_flowers102", "oxford_iiit_pet",
)  # fmt: skip
SUITES["zero_shot"] = tuple(Part(name, "zero_shot", name) for name in _ZERO_SHOT)


def make(
    name: str, context: EvalContext, folder: str = ""
) -> tuple[evaluation.Suite, dict[str, str]]:
    """The evaluators of a suite whose data is there, and of the others why it is not.

    Args:
      folder: where the data sets are; '': where TFDS keeps its own.

    Raises:
      ConfigError: there is no such suite, no data of it is there, or it does not go with the model.
    """
    if name not in SUITES:
        raise ConfigError(f"there is no suite {name!r}{nearest(name, SUITES)}")
    entries = with_run_templates(
        [_entry(part, folder) for part in SUITES[name]], context.config.eval.evaluators
    )
    evaluators, absent = [], {}
    for part, entry in zip(SUITES[name], entries, strict=True):
        try:
            evaluators += evaluation.make([entry], context).evaluators
        except DataAbsent as error:
            absent[part.prefix] = str(error)
            logging.warning("%s is skipped: %s", part.prefix, error)
    if not evaluators:
        raise ConfigError(
            f"suite {name!r} is not prepared in {data_dir(folder)}: none of its sets is there "
            f"({', '.join(part.data for part in SUITES[name])}). Prepare one with "
            "'vit_jax prepare NAME --out=DIR/NAME' and set --data_dir=DIR"
        )
    return evaluation.Suite(tuple(evaluators)), absent


def _entry(part: Part, folder: str) -> tuple[str, dict]:
    """The evaluator as `config.eval.evaluators` would name it."""
    data = {"name": part.data, "path": folder, "eval_split": part.split}
    place = places.locate(folder or ".", "--data_dir") / part.data
    if part.data in sources.OPENERS:
        data["path"] = str(place)
    elif folder and place.exists():
        if (place / DESCRIPTION).exists():
            data |= {"name": "prepared", "path": str(place)}
        elif not any(any(place.glob(f"{pattern}/dataset_info.json")) for pattern in ("*", "*/*")):
            data |= {"name": "folder", "path": str(place), "eval_split": "test"}
            evaluator = evaluation.EVALUATORS[part.evaluator]
            if not issubclass(evaluator, FeatureEvaluator):  # those learn from some
                data["holdout"] = 1.0
    return part.evaluator, dict(part.options) | {"prefix": part.prefix, "data": data}


def table(metrics: dict[str, float], absent: dict[str, str]) -> Iterator[str]:
    """A Markdown table with a row for each part of a suite, and a line for each that is skipped."""
    rows: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        prefix, _, metric = name.partition("/")
        rows.setdefault(prefix, {})[metric] = value
    for columns in dict.fromkeys(tuple(row) for row in rows.values()):
        yield f"| | {' | '.join(columns)} |"
        yield "|---" * (len(columns) + 1) + "|"
        for prefix, row in rows.items():
            if tuple(row) == columns:
                yield f"| {prefix} | {' | '.join(f'{value:.4g}' for value in row.values())} |"
        yield ""
    for prefix, why in absent.items():
        yield f"{prefix}: skipped, {why}"
