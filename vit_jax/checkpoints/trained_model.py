"""A trained model and what is needed to use it, wherever it comes from."""

import dataclasses
from typing import TYPE_CHECKING

from etils import epath
from flax import nnx

from vit_jax.checkpoints.objective_weights import ObjectiveModules
from vit_jax.models import classifier

if TYPE_CHECKING:
    from vit_jax.annotations import RunConfig


@dataclasses.dataclass
class TrainedModel:
    """A trained model and what is needed to use it.

    Attributes:
      model: with its parameters loaded (the averaged ones, if the run kept an average).
      model_config: the family's config.
      config: the run's.
      classes: label names, in the order of the logits.
      step: steps trained.
      directory: of the checkpoint.
      objective_modules: the objective's modules and their arrays, if the model predicts with them.
    """

    model: nnx.Module
    model_config: classifier.ClassifierConfig
    config: "RunConfig"
    classes: tuple[str, ...]
    step: int
    directory: epath.Path
    objective_modules: ObjectiveModules | None = None
