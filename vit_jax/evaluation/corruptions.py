"""ImageNet-C: accuracy on images that noise, blur, weather and coding have damaged (arXiv 1903.12261)."""

import dataclasses

import numpy as np
from jax.sharding import Mesh

from vit_jax.data import sources
from vit_jax.data.labels.classes import with_classes
from vit_jax.data.options import Data
from vit_jax.evaluation import contract
from vit_jax.evaluation.accuracy import Accuracy
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Evaluator, Watch

# The mean error of AlexNet over the five severities (hendrycks/robustness).
ALEXNET = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640,
    "defocus_blur": 0.819880, "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360,
    "snow": 0.866816, "frost": 0.826572, "fog": 0.819324, "brightness": 0.564592,
    "contrast": 0.853204, "elastic_transform": 0.646056, "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}  # fmt: skip
SEVERITIES = range(1, 6)


class Corruptions(Evaluator):
    """`mce`, the mean over corruptions of the error over AlexNet's; `error`, the mean error; and of each
    corruption its error over AlexNet's.

    `data.name` is TFDS's `imagenet2012_corrupted`, or `folder`, whose `path` has a folder
    CORRUPTION/SEVERITY/CLASS for each.
    """

    Options = contract.EvaluatorOptions
    low_is_good = ("mce", "error", *ALEXNET)
    by_engine = True

    def __init__(self, options: contract.EvaluatorOptions, context: EvalContext):
        super().__init__(options, context)
        data = self.data()
        sections = {
            (name, severity): _section(data, name, severity)
            for name in ALEXNET
            for severity in SEVERITIES
        }
        self._sources = {key: sources.open_eval(section) for key, section in sections.items()}
        first = next(iter(sections.values()))
        changed = tuple((f, getattr(first, f)) for f in ("name", "path", "eval_split", "holdout"))
        self._accuracy = Accuracy(Accuracy.Options(data=changed), context)

    def metrics(self) -> tuple[str, ...]:
        return ("mce", "error", *ALEXNET)

    def main_metric(self) -> str:
        return "mce"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        errors = {}
        for key, source in self._sources.items():
            self._accuracy.source = with_classes(source, self.context.classes)
            errors[key] = 1 - self._accuracy(trained, mesh, watch)["accuracy"]
        return summarized(errors)


def summarized(errors: dict[tuple[str, int], float]) -> dict[str, float]:
    """The metrics for the errors by (corruption, severity)."""
    by_corruption = {
        name: float(np.mean([errors[name, s] for s in SEVERITIES]) / known)
        for name, known in ALEXNET.items()
    }
    mean = {
        "mce": float(np.mean(list(by_corruption.values()))),
        "error": float(np.mean(list(errors.values()))),
    }
    return mean | by_corruption


def _section(data: Data, name: str, severity: int) -> Data:
    """The section `config.data` for one corruption of one severity."""
    if data.name == "folder":
        path = f"{data.path}/{name}/{severity}"
        return dataclasses.replace(data, path=path, eval_split="test", holdout=1.0)
    return dataclasses.replace(data, name=f"{data.name}/{name}_{severity}")
