"""What the objective of a trained model owns: for models that answer by it, and for runs that continue with it."""

from typing import NamedTuple

from vit_jax.base import schema
from vit_jax.checkpoints.descriptions import parts_to_use
from vit_jax.config import config_class, default_config
from vit_jax.data.labels.segments import described
from vit_jax.models import classifier
from vit_jax.models.registry import Weights
from vit_jax.objectives.networks import OWN, DataFacts, Networks


class ObjectiveModules(NamedTuple):
    """What belongs to a trained model besides itself.

    Attributes:
      networks: the model and its objective.
      weights: the arrays of what the objective owns.
    """

    networks: Networks
    weights: Weights


def trained_networks(description: dict, model_config: classifier.ClassifierConfig) -> Networks:
    """The networks of the run that a checkpoint is of."""
    filled = schema.fill(default_config(), description["config"])
    config = schema.typed(config_class(filled), filled)
    classes = description["classes"]
    data = DataFacts(
        num_classes=len(classes),
        examples_per_epoch=description["training_examples"],
        masks=described(description.get("segments"), classes),
    )
    return Networks.from_config(config, data, model_config)


def module_parts(description: dict) -> tuple[str, str]:
    """The names of the saved parts that are what the objective owns: parameters (averaged, if the run kept an
    average), and what is not trained.
    """
    return f"{parts_to_use(description)[0]}_{OWN}", f"{OWN}_variables"


def abstract_modules(networks: Networks, description: dict) -> dict[str, dict]:
    """Shapes and dtypes of the objective's arrays, by the names of `module_parts`; {} if it has none."""
    like = networks.abstract_modules()
    return {name: tree for name, tree in zip(module_parts(description), like, strict=True) if tree}
