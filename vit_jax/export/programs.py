"""What is exported of a model: a function of its weights and images, and the names of the outputs that are asked for.
How it is written is in `onnx.py` and `stablehlo.py`.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax import objectives
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data.augmentation import augment
from vit_jax.data.options import Data
from vit_jax.evaluation import maps
from vit_jax.evaluation.forward import make_forward, make_network
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.contract import ModelOutput

INSIDE = "inside"
BESIDE = "beside"
PROBABILITIES = "probabilities"
LOGITS = "logits"
FEATURES = "features"
MAPS = ("scores", "masks", "classes")  # outputs of a model that segments
RANKED = (PROBABILITIES, LOGITS, MAPS[0])  # whose largest number is that of the best class
_HOW_MAPS = "# enlarge scores bilinearly to the size of the image: the class with the highest is that of the pixel"


class Program(NamedTuple):
    """What is written.

    Attributes:
      answer: weights and images to one array, or to several.
      weights: its first argument.
      outputs: the names of what it gives.
      writer_note: what to do with that.
    """

    answer: Callable
    weights: Any
    outputs: tuple[str, ...]
    writer_note: str = ""


def output_names(run: TrainedModel) -> tuple[str, ...]:
    """All outputs that a model may have in a file."""
    if run.objective_modules is not None:
        return MAPS if run.objective_modules.networks.objective.panoptic else MAPS[:1]
    if run.model_config.num_classes:
        return PROBABILITIES, LOGITS, FEATURES
    return (FEATURES,)


def chosen_outputs(run: TrainedModel, wanted: Sequence[str]) -> tuple[str, ...]:
    """The outputs that are asked for; by default probabilities, features of a model without head, and all of one that
    segments.

    Raises:
      ConfigError: the model has no such output, or it is asked for twice.
    """
    known = output_names(run)
    for name, count in collections.Counter(wanted).items():
        if name not in known:
            raise ConfigError(f"--outputs={name}: the outputs of this model are {', '.join(known)}")
        if count > 1:
            raise ConfigError(f"--outputs={','.join(wanted)}: name {name} once")
    if wanted:
        return tuple(wanted)
    return known if run.objective_modules is not None else known[:1]


def make_program(
    run: TrainedModel,
    data: Data,
    *,
    normalization: str = INSIDE,
    outputs: Sequence[str] = (),
    dtype: str = "float32",
) -> Program:
    """The program of a model.

    Args:
      data: how images are normalised, the section `config.data`.
      normalization: see `run.export`.
      outputs: see `chosen_outputs`.
      dtype: that it computes in, 'float32' or 'float16'.

    Raises:
      ConfigError: see `chosen_outputs`.
    """
    names = chosen_outputs(run, outputs)
    config = _portable(run.model_config, dtype)
    if run.objective_modules is not None:
        return _map_program(run, config, data, normalization, names)
    return _class_program(run, config, data, normalization, names)


def _portable(config: ClassifierConfig, dtype: str) -> ClassifierConfig:
    """The model in one dtype, without kernels that are written for one kind of chip."""
    config = dataclasses.replace(config, dtype=dtype)
    if hasattr(config, "attention"):
        config = dataclasses.replace(config, attention="xla")  # pyrefly: ignore
    return config


def _map_program(
    run: TrainedModel,
    config: ClassifierConfig,
    data: Data,
    normalization: str,
    names: tuple[str, ...],
) -> Program:
    """Of a model that segments."""
    networks = dataclasses.replace(run.objective_modules.networks, model_config=config)
    inside = normalization == INSIDE
    network = maps.make_answers(networks, data) if inside else maps.make_map_network(networks)

    def answer(weights: tuple, images: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        arrays = dict(zip(MAPS, network(*weights, images), strict=False))
        return _in_order(arrays, names)

    return Program(
        answer, (registry.split(run.model)[1], run.objective_modules.weights), names, _HOW_MAPS
    )


def _class_program(
    run: TrainedModel,
    config: ClassifierConfig,
    data: Data,
    normalization: str,
    names: tuple[str, ...],
) -> Program:
    """Of a model that does not segment."""
    definition, _ = registry.abstract(config)
    _, weights = registry.split(run.model)
    plain = make_network(definition, config)
    activation = objectives.activation(run.config.objective)

    def beside(weights: registry.Weights, images: jax.Array) -> ModelOutput:
        return plain(weights, augment.permuted(images, data))

    network = make_forward(definition, config, data) if normalization == INSIDE else beside

    def answer(weights: registry.Weights, images: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        output = network(weights, images)
        arrays = {FEATURES: output.features.astype(np.float32)}
        if output.logits is not None:
            arrays |= {LOGITS: output.logits, PROBABILITIES: activation(output.logits)}
        return _in_order(arrays, names)

    return Program(answer, weights, names)


def _in_order(
    arrays: dict[str, jax.Array], names: tuple[str, ...]
) -> jax.Array | tuple[jax.Array, ...]:
    """Arrays by name as a program gives them: one alone is no tuple."""
    chosen = tuple(arrays[name] for name in names)
    return chosen if len(names) > 1 else chosen[0]
