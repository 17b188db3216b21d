"""Few-shot linear evaluation: a regularised least-squares fit of few examples per class, from frozen
features to {-1, 1} targets, in closed form (ViT §4.1; settings of big_vision's evaluator).
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.linalg
import scipy.sparse
from absl import logging
from jax.sharding import Mesh

from vit_jax.base.schema import option
from vit_jax.evaluation import contract
from vit_jax.evaluation.contract import EvaluatedModel, Watch
from vit_jax.evaluation.features import FeatureEvaluator, of_examples

_ROWS = 1024  # copied at a time, in float64
_BIAS = 100.0  # the constant feature; so large that its weight is hardly regularised


@dataclasses.dataclass(frozen=True)
class FewShotOptions(contract.EvaluatorOptions):
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

    Options = FewShotOptions
    high_is_good = ("*shot",)
    low_is_good = ("*shot_std",)

    def metrics(self) -> tuple[str, ...]:
        return tuple(f"{n}shot{ending}" for n in self.options.shots for ending in ("", "_std"))

    def main_metric(self) -> str:
        return f"{self.options.shots[0]}shot"

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        """Accuracies of a linear fit by number of examples of each class. A class that has fewer gives all it has."""
        weights = trained.weights
        train, labels = of_examples(self.batches(self.train, weights, mesh, watch), mesh)
        test, truth = of_examples(self.batches(self.test, weights, mesh, watch), mesh)
        classes, most = self.train.classes, max(self.options.shots)
        examples = np.bincount(labels, minlength=len(classes))
        if examples.min() < most:
            data = self.data()
            logging.warning(
                "few_shot on %s: %r has only %d examples, fewer than %d: such classes give all they have",
                data.path or data.name, classes[examples.argmin()], examples.min(), most,
            )  # fmt: skip
        return accuracies(train, labels, test, truth, len(classes), self.options)


def accuracies(
    train: np.ndarray,
    labels: np.ndarray,
    test: np.ndarray,
    truth: np.ndarray,
    classes: int,
    options: FewShotOptions,
) -> dict[str, float]:
    """What `FewShot` finds.

    Args:
      train: features (n, D) to fit to, of classes `labels` (n,).
      test: features (m, D) to judge on, of classes `truth` (m,).
    """
    metrics = {}
    for shots in options.shots:
        shares = []
        for seed in range(options.seeds):
            chosen = choose(labels, shots, seed)
            fit = fit_linear(train[chosen], labels[chosen], classes, options.l2)
            shares.append(np.mean(fit(test).argmax(-1) == truth))
        metrics[f"{shots}shot"] = float(np.mean(shares))
        metrics[f"{shots}shot_std"] = float(np.std(shares))
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
    """`fit_members` of examples with one label each, (n,)."""
    n = len(features)
    starts = np.arange(n + 1)  # of the entries of each example
    of_class = scipy.sparse.csc_array((np.ones(n), labels, starts), (classes, n))
    return fit_members(features, of_class, l2)


def fit_members(features: np.ndarray, of_class: scipy.sparse.csc_array, l2: float) -> Callable:
    """The fit (n, D) -> (n, classes) scores that minimises Σ|X W - Y|² + l2 |W|², Y being 1 for the
    classes of an example and -1 for all other classes; a function of further features.

    Features are standardised by those that are fitted, and get a constant one. Fitted in float64, by the
    smaller of the two Gram matrices; scores are of the type of the features that they are of.

    Args:
      features: (n, D).
      of_class: (classes, n), 1 where an example is of a class.
    """
    (n, width), mean = features.shape, features.mean(0, dtype=np.float64)
    classes = of_class.shape[0]
    # Without their mean, the constant feature is fitted by itself, and X^T Y is twice a class's sum.
    if n >= width:
        gram, sums = np.zeros((width, width)), np.zeros((classes, width))
        for start in range(0, n, _ROWS):
            x = features[start : start + _ROWS] - mean
            gram += x.T @ x
            sums += of_class[:, start : start + _ROWS] @ x
        std = np.sqrt(np.diag(gram) / n) + 1e-5
        gram = gram / np.outer(std, std) + l2 * np.eye(width)
        weights = scipy.linalg.solve(gram, 2 * (sums / std).T, assume_a="pos")
    else:
        x = features - mean
        std = x.std(0) + 1e-5
        x /= std
        gram = x @ x.T + l2 * np.eye(n)
        weights = x.T @ scipy.linalg.solve(gram, 2 * of_class.T.toarray() - 1, assume_a="pos")
    constant = (2.0 * of_class.sum(1) - n) / (n + l2 / _BIAS**2)
    weights /= std[:, None]
    constant -= mean @ weights

    def scores(further: np.ndarray) -> np.ndarray:
        return further @ weights.astype(further.dtype) + constant.astype(further.dtype)

    return scores
