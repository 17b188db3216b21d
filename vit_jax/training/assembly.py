"""From a config to the parts of a run: the one place where model, objective, optimizer and step are
put together.

Needs no devices and no data, only two numbers about the data; training, planning, benchmarks and
tests all start here.
"""

import dataclasses
from collections.abc import Callable

import jax
import optax
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import objectives, optim
from vit_jax.base import durations, schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import Config
from vit_jax.data.augmentation import augment
from vit_jax.models import registry
from vit_jax.training import state as states
from vit_jax.training.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts of a run.

    Attributes:
      config: the run's.
      model_config: the family's config.
      definition: the model without its parameters.
      optimizer, learning_rate: see `optim.make`.
      init: random key -> first state.
      train_step: (state, batch) -> (state, metrics), not compiled.
      total_steps: length of the run.
      to_steps: a duration of the config in steps.
    """

    config: ConfigDict
    model_config: object
    definition: nnx.GraphDef
    optimizer: optax.GradientTransformation
    learning_rate: Callable
    init: Callable
    train_step: Callable
    total_steps: int
    to_steps: Callable[[str], int]

    def abstract_state(self, mesh: jax.sharding.Mesh) -> states.TrainState:
        """Shapes, dtypes and shardings of the state on a mesh."""
        return states.abstract(self.init, mesh, fsdp_min_size=self.config.mesh.fsdp_min_size)


def check(config: ConfigDict) -> None:
    """Raises `ConfigError` for whatever is wrong with a config that can be told without data and
    devices.
    """
    schema.check(config, Config)
    augment.check(config.augment)
    model_config_of(config, config.model.num_classes or 1)
    objectives.make(config.objective)
    if config.batch_size % config.accumulate:
        raise ConfigError(
            f"config.batch_size {config.batch_size} cannot be cut into config.accumulate = {config.accumulate} parts"
        )


def model_config_of(config: ConfigDict, num_classes: int):
    """The family's config for data with `num_classes` classes.

    Raises:
      ConfigError: the config states another number, or describes no model.
    """
    options = schema.options_said(config.model)
    if options.get("num_classes", num_classes) != num_classes:
        raise ConfigError(
            f"config.model.num_classes is {options['num_classes']}, but the data has {num_classes} classes"
        )
    name = options.pop("name")
    return registry.model_config(
        name, image_size=config.data.image_size, **options | {"num_classes": num_classes}
    )


def assemble(config: ConfigDict, *, num_classes: int, examples_per_epoch: int | None) -> Assembly:
    """Puts a run together.

    Args:
      config: a checked config.
      num_classes: classes of the data.
      examples_per_epoch: examples in the training set; `None` if unknown, then no duration may be
        in epochs.
    """
    model_config = model_config_of(config, num_classes)
    definition, params = registry.abstract(model_config)
    total_steps = durations.steps(
        config.duration, batch_size=config.batch_size, examples_per_epoch=examples_per_epoch
    )

    def to_steps(duration: str) -> int:
        return durations.steps(
            duration,
            batch_size=config.batch_size,
            examples_per_epoch=examples_per_epoch,
            total_steps=total_steps,
        )

    optimizer, learning_rate = optim.make(
        config.optim, params, total_steps=total_steps, to_steps=to_steps
    )
    objective = objectives.make(config.objective)
    return Assembly(
        config=config,
        model_config=model_config,
        definition=definition,
        optimizer=optimizer,
        learning_rate=learning_rate,
        init=states.initializer(model_config, optimizer, ema=config.optim.ema > 0),
        train_step=make_train_step(
            definition, model_config, objective, optimizer, learning_rate, config
        ),
        total_steps=total_steps,
        to_steps=to_steps,
    )
