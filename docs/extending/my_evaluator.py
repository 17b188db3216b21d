"""my_evaluator.py: the accuracy of each class, their mean and the lowest."""

import dataclasses

import numpy as np

from vit_jax.extend import (
    EvaluatorOptions,
    Logits,
    LogitsEvaluator,
    load_config,
    option,
    register_evaluator,
)


@dataclasses.dataclass(frozen=True)
class BalancedOptions(EvaluatorOptions):
    least: int = option(1, "examples of a class, which is skipped if it has fewer", minimum=1)


class Balanced(LogitsEvaluator):
    Options = BalancedOptions
    high_is_good = ("mean", "lowest")

    def score(self, examples: Logits) -> dict[str, float]:
        best = examples.logits.argmax(-1)
        is_right = np.take_along_axis(examples.targets, best[:, None], axis=-1)[:, 0]
        classes = [
            of_class for of_class in examples.targets.T if of_class.sum() >= self.options.least
        ]
        accuracies = [is_right[of_class].mean() for of_class in classes]
        return {"mean": float(np.mean(accuracies)), "lowest": float(np.min(accuracies))}

    def metrics(self):
        return "mean", "lowest"


register_evaluator("balanced", Balanced)


def get_config():
    config = load_config("digits")
    config.eval.evaluators = ("accuracy", ("balanced", {"least": 5}))
    config.eval.best = "balanced/lowest"
    return config
