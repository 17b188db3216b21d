"""What the objective of a trained model owns, for models that answer by it."""

from typing import NamedTuple

import jax

from vit_jax import objectives
from vit_jax.base import durations, schema
from vit_jax.checkpoints.descriptions import parts_to_use
from vit_jax.config import config_class, default_config
from vit_jax.data.labels.segments import described
from vit_jax.models import classifier
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import Objective, ObjectiveContext
from vit_jax.objectives.networks import OWN, Networks


class Own(NamedTuple):
    """What belongs to a trained model besides itself.

    Attributes:
      networks: the model and its objective.
      weights: the arrays of what the objective owns.
    """

    networks: Networks
    weights: Weights


def trained_networks(
    description: dict, model_config: classifier.ClassifierConfig
) -> Networks | None:
    """The networks of the run that a checkpoint is of; `None` unless its model answers by what the objective owns."""
    config = schema.typed(config_class(), schema.fill(default_config(), description["config"]))
    if not objectives.find_objective(config.objective)[0].own_answers:
        return None
    how = dict(batch_size=config.batch_size, examples_per_epoch=description["training_examples"])
    total_steps = durations.steps(config.duration, **how)

    def make_objective(model_config: classifier.ClassifierConfig) -> Objective:
        context = ObjectiveContext(
            model_config,
            config.data.mean,
            config.data.std,
            total_steps,
            lambda duration: durations.steps(duration, total_steps=total_steps, **how),
            batch_size=config.batch_size // config.accumulate,
            num_classes=len(description["classes"]),
            segments=described(description.get("segments"), description["classes"]),
        )
        return objectives.make(config.objective, context)

    return Networks(model_config, make_objective)


def abstract_own(networks: Networks, description: dict) -> dict[str, dict]:
    """Shapes and dtypes of what the objective owns, by the names of the saved parts: parameters (averaged, if the
    run kept an average), and what is not trained.
    """
    params, variables = jax.eval_shape(networks.init, jax.random.key(0))
    trained, untrained = f"{parts_to_use(description)[0]}_{OWN}", f"{OWN}_variables"
    return {trained: params[OWN], untrained: variables.get(OWN, {})}
