"""Evaluates a trained model from its checkpoint."""

import dataclasses

import jax
from absl import logging

from vit_jax import evaluation
from vit_jax.checkpoints.reading import Run
from vit_jax.config import Config
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import Subject, Trained, Watch
from vit_jax.evaluation.forward import normalized_as
from vit_jax.models import registry


def evaluate_run(run: Run, config: Config, watch: Watch = iter) -> dict[str, float]:
    """All metrics of `config.eval.evaluators`; of several, each one's are logged as they come.

    Args:
      run: from `reading.load_run`.
      config: the run's, perhaps with other fields in its sections `data` and `eval`.
      watch: see `Evaluator`.

    Raises:
      ConfigError: the data does not go with the model, there is no such evaluator, or it is not
        known how images are normalised.
    """
    config = dataclasses.replace(config, data=normalized_as(config.data, run.directory))
    definition, weights = registry.split(run.model)
    classes = run.classes if run.model_config.num_classes else ()
    subject = Subject(config, run.model_config, definition, classes)
    suite = evaluation.make(config.eval.evaluators, subject)
    mesh = meshes.replica_mesh()
    found, data = {}, config.data
    logging.info("evaluating on %s (%s)", data.path or data.name, data.eval_split)
    with jax.set_mesh(mesh):
        for metrics in suite.each(Trained(weights), mesh, watch):
            if len(suite.evaluators) > 1:
                logging.info("%s", text(metrics))
            found |= metrics
    return found


def text(metrics: dict[str, float]) -> str:
    """Metrics on one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
