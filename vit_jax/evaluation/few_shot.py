"""Few-shot linear evaluation: a regularised least-squares fit of few examples per class, from frozen
features to {-1, 1} targets, in closed form (ViT §4.1; settings of big_vision's evaluator).
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.linalg
from absl import logging
from jax.sharding import Mesh

from vit_jax.base.schema import option
from vit_jax.evaluation import contract
from vit_jax.evaluation.contract import Trained, Watch
from vit_jax.evaluation.features import FeatureEvaluator, of_examples

_BIAS = 100.0  # the constant feature; so large that its weight is hardly regularised


@dataclasses.dataclass(frozen=True)
class Options(contract.Options):
    """What `few_shot` takes."""

    shots: tuple = option((1, 5, 10, 25), "examples of each class", minimum=1)
    l2: float = option(1024.0, "weight of the regularisation", above=0)
    seeds: int = option(
        3, "random choices of the examples, over which accuracy is averaged", minimum=1
    )


class FewShot(FeatureEvaluator):
    """`5shot` and so on: accuracy on the evaluated examples, the mean over random choices of those to
    fit; `5shot_std`, its standard deviation over the choices.
    """

    Options = Options

    def __call__(self, trained: Trained, mesh: Mesh, watch: Watch = iter) -> dict[str, float]:
        """See `Evaluator`. A class that has fewer examples than asked for gives all it has."""
        weights = trained.weights
        train, labels = of_examples(self.batches(self.train, weights, mesh, watch), mesh)
        test, truth = of_examples(self.batches(self.test, weights, mesh, watch), mesh)
        classes, metrics = len(self.train.classes), {}
        fewest = np.bincount(labels, minlength=classes).min()
        if fewest < max(self.options.shots):
            logging.warning(
                "few_shot: some classes have only %d examples, fewer than %d: they give all they have",
                fewest, max(self.options.shots),
            )  # fmt: skip
        for shots in self.options.shots:
            found = []
            for seed in range(self.options.seeds):
                chosen = choose(labels, shots, seed)
                fit = fit_linear(train[chosen], labels[chosen], classes, self.options.l2)
                found.append(np.mean(fit(test).argmax(-1) == truth))
            metrics[f"{shots}shot"] = float(np.mean(found))
            metrics[f"{shots}shot_std"] = float(np.std(found))
        return metrics


def choose(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """The indices of up to `shots` examples of each class, drawn class by class.

    Args:
      labels: (n,) of all examples.
    """
    random = np.random.default_rng(seed)
    drawn = [random.permutation(np.flatnonzero(labels == c))[:shots] for c in np.unique(labels)]
    return np.concatenate(drawn)


def fit_linear(features: np.ndarray, labels: np.ndarray, classes: int, l2: float) -> Callable:
    """The fit (n, D) -> (n, classes) scores that minimises Σ|X W - Y|² + l2 |W|², Y being 1 for an
    example's class and -1 for the others; a function of further features.

    Features are standardised by those that are fitted, and get a constant one. Computed in float64,
    by the smaller of the two Gram matrices.
    """
    mean, std = features.mean(0, dtype=np.float64), features.std(0, dtype=np.float64) + 1e-5

    def prepared(x: np.ndarray) -> np.ndarray:
        x = (x - mean) / std
        return np.concatenate([x, np.full((len(x), 1), _BIAS)], axis=1)

    x = prepared(features)
    y = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)
    if len(x) >= x.shape[1]:
        gram = x.T @ x + l2 * np.eye(x.shape[1])
        weights = scipy.linalg.solve(gram, x.T @ y, assume_a="pos")
    else:
        gram = x @ x.T + l2 * np.eye(len(x))
        weights = x.T @ scipy.linalg.solve(gram, y, assume_a="pos")
    return lambda further: prepared(further) @ weights
