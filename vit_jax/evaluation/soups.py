"""Greedy soups: which of several fine-tuned models are averaged (arXiv 2203.05482, Recipe 1)."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import logging

from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import Config
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import EvaluatedModel
from vit_jax.evaluation.metric_order import rank
from vit_jax.evaluation.run import make_judges
from vit_jax.interchange import averaging
from vit_jax.interchange.formats import LoadedCheckpoint
from vit_jax.models.registry import Weights


def greedy(scores: Sequence[float], score: Callable[[Sequence[int]], float]) -> list[int]:
    """The models of a greedy soup, in the order in which they were added.

    From the best model on, each is added if the average is then at least as good as it was.

    Args:
      scores: of each model alone; higher is better. A model whose score is not a number comes last, and joins no soup.
      score: of the average of the models with these numbers.
    """
    order = sorted(range(len(scores)), key=lambda number: -rank(scores[number]))
    soup, best = order[:1], scores[order[0]]
    for number in order[1:]:
        new = score([*soup, number])
        logging.info("model %d: %.6g with it, %.6g without it", number + 1, new, best)
        if new >= best:
            soup, best = [*soup, number], new
    return soup


class Judge:
    """Scores models of one architecture with the evaluators of a config; it compiles once.

    Attributes:
      order: the metric that models are compared by, and its direction (`config.eval.best`).
    """

    def __init__(self, run: TrainedModel, config: Config):
        """Takes the model's structure from `run`, and data and evaluators from `config`; see `make_judges`."""
        self._suite, _ = make_judges(run, config)
        self.order = self._suite.metric_order(config.eval.best)
        self._mesh = meshes.replica_mesh()

    def __call__(self, models: Sequence[LoadedCheckpoint]) -> float:
        """The score of the average of `models`; higher is better.

        Raises:
          ConfigError: the evaluators have found no such metric.
        """
        soup = averaging.average(models)
        arrays = jax.tree.map(np.asarray, Weights(soup.params, soup.variables))
        weights = jax.device_put(arrays, meshes.replicated(self._mesh))
        with jax.set_mesh(self._mesh):
            metrics = self._suite(EvaluatedModel(weights), self._mesh)
        return self.order.score(self.order.of(metrics))
