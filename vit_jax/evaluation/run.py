"""Evaluates a trained model from its checkpoint."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from absl import logging

from vit_jax import evaluation
from vit_jax.base import logs
from vit_jax.checkpoints import reading
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import Config
from vit_jax.devices import meshes
from vit_jax.evaluation import suites
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Watch, held_out
from vit_jax.evaluation.forward import normalized_as
from vit_jax.evaluation.leakage import judged_images
from vit_jax.evaluation.templates import with_run_templates
from vit_jax.models import registry
from vit_jax.objectives import find_objective


def evaluate_run(
    run: TrainedModel,
    config: Config,
    watch: Watch = iter,
    *,
    suite: str = "",
    data_dir: str = "",
    logits_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """All metrics of `config.eval.evaluators`; of several, each one's are logged as they come.

    Args:
      run: from `loading.load_run`.
      config: the run's, perhaps with other fields in its sections `data` and `eval`.
      watch: see `Evaluator`.
      suite: one of `suites.SUITES`, in place of the config's evaluators.
      data_dir: where its data sets are, see `suites.make`.
      logits_of: another engine than XLA, see `EvalContext`.

    Returns:
      The metrics, and why parts of the suite are skipped, by their prefix.

    Raises:
      ConfigError: the data does not go with the model, there is no such evaluator, or it is not
        known how images are normalised.
    """
    run = with_objective_modules(run)
    judges, absent = make_judges(run, config, suite, data_dir, logits_of)
    trained = evaluated(run)
    mesh, all_metrics = meshes.replica_mesh(), {}
    with jax.set_mesh(mesh):
        for metrics in judges.each(trained, mesh, watch):
            if len(judges.evaluators) > 1:
                logging.info("%s", text(metrics))
            all_metrics |= metrics
    return all_metrics, absent


def make_judges(
    run: TrainedModel,
    config: Config,
    suite: str = "",
    data_dir: str = "",
    logits_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[evaluation.Suite, dict[str, str]]:
    """The evaluators of `evaluate_run`, whose arguments these are, and why parts of the suite are skipped.

    They serve any checkpoint of the run, and compile what they compute once.
    """
    run = with_objective_modules(run)
    config = dataclasses.replace(config, data=normalized_as(config.data, run.directory))
    definition, _ = registry.split(run.model)
    classes = run.classes if run.model_config.num_classes or run.objective_modules else ()
    networks = run.objective_modules.networks if run.objective_modules else None
    context = EvalContext(config, run.model_config, definition, classes, networks, logits_of)
    if suite:
        judges, absent = suites.make(suite, context, data_dir)
    else:
        entries = with_run_templates(config.eval.evaluators, run.config.eval.evaluators)
        judges, absent = evaluation.make(entries, context), {}
        judged = [
            (evaluator, source)
            for _, evaluator in judges.evaluators
            if (source := held_out(evaluator))
        ]
        lines = [judged_images(evaluator.data(), len(source)) for evaluator, source in judged]
        for line in dict.fromkeys(lines):  # Several judge the same images.
            logging.info("%s", line)
    for prefix, evaluator in judges.evaluators if logits_of else ():
        if not evaluator.by_engine:
            logging.warning("%s: computed by XLA, whatever --engine is", prefix or "metrics")
    return judges, absent


def with_objective_modules(run: TrainedModel) -> TrainedModel:
    """`run` with what its evaluators need of its objective, where the model answers without it."""
    if run.objective_modules or not find_objective(run.config.objective)[0].evaluates_with_modules:
        return run
    description = reading.read_description(run.directory)
    whole = meshes.replicated(meshes.replica_mesh())
    modules = reading.read_modules(run.directory, description, run.model_config, whole, judged=True)
    return dataclasses.replace(run, objective_modules=modules)


def evaluated(run: TrainedModel) -> EvaluatedModel:
    """The model of a run, as evaluators take it."""
    run = with_objective_modules(run)
    weights = registry.split(run.model)[1]
    if run.objective_modules is None:
        return EvaluatedModel(weights)
    return EvaluatedModel(weights, module_weights=run.objective_modules.weights)


def text(metrics: dict[str, float]) -> str:
    """Metrics on one line."""
    return "  ".join(f"{name} {logs.number_text(value)}" for name, value in metrics.items())
