"""Classes by their names alone: an image is of the class whose texts are nearest (CLIP, arXiv 2103.00020 §3.1; the text
is made canonical as in big_vision's evaluators/proj/image_text/prompt_engineering, for towers of SigLIP).
"""

import dataclasses

import numpy as np
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data import sources
from vit_jax.evaluation import contract
from vit_jax.evaluation.both_towers import TwoTowerEvaluator
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Watch
from vit_jax.evaluation.templates import TEMPLATES, check_templates
from vit_jax.evaluation.words import class_vectors, names_of, prompts, warn_of_names


@dataclasses.dataclass(frozen=True)
class ZeroShotOptions(contract.EvaluatorOptions):
    """What `zero_shot` takes."""

    templates: tuple = option(TEMPLATES, "texts of a class, whose name stands for {}")
    names: tuple = option((), "of the classes, in their order; (): as the data set calls them")


class ZeroShot(TwoTowerEvaluator):
    """`accuracy`, `top5_accuracy` and the number of `examples` of a data set with classes; an image has the class whose
    texts, averaged over the templates, are nearest.
    """

    Options = ZeroShotOptions

    def __init__(self, options: ZeroShotOptions, context: EvalContext):
        super().__init__(options, context)
        self.source = sources.open_eval(self.config.data)
        if not self.source.classes or self.source.multi_label:
            raise ConfigError(
                f"config.eval.evaluators: 'zero_shot' needs images with one label each, and {self.config.data.name!r} "
                f"({self.config.data.path or 'no path'}) has none: set its option data, such as "
                "('zero_shot', {'data': {'name': 'folder', 'path': 'DIR'}})"
            )
        count = len(self.source.classes)
        if options.names and len(options.names) != count:
            raise ConfigError(
                f"config.eval.evaluators: zero_shot: names has {len(options.names)}, and the data {count} classes"
            )
        check_templates(options.templates, "config.eval.evaluators: zero_shot")
        self._names = options.names or names_of(self.source.classes)
        program = self.text_program
        warn_of_names(self._names, options.templates[0], program.rows, program.text)

    high_is_good = ("accuracy", "top5_accuracy")

    def metrics(self) -> tuple[str, ...]:
        return ("accuracy", "top5_accuracy", "examples")

    def main_metric(self) -> str:
        return "accuracy"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        templates = self.options.templates
        texts = prompts(self._names, templates, self.text_program.text)
        means = class_vectors(self.text_vectors(texts, trained, mesh, watch), len(self._names))
        images, is_read, labels = self.image_vectors(self.source, trained, mesh, watch)
        nearest = np.argsort(-(images @ means.T), axis=1, kind="stable")[:, :5]
        right = (nearest == labels[:, None])[is_read]
        count = max(1, len(right))
        return {
            "accuracy": right[:, 0].sum() / count,
            "top5_accuracy": right.sum() / count,
            "examples": len(right),
        }
