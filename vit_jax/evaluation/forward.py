"""From images to what a model says of them: what evaluation, prediction and the benchmark of
inference share.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from flax import nnx

from vit_jax.base import schema, sizes
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.compute import choices
from vit_jax.config import config_class
from vit_jax.data import crops
from vit_jax.data.augmentation import augment
from vit_jax.data.options import Data
from vit_jax.models import classifier, registry
from vit_jax.models.contract import Capture, ModelOutput, PatchBatch
from vit_jax.models.registry import Weights

if TYPE_CHECKING:
    from vit_jax.models.layer_features import Layer, LayerFeatures


def normalized_as(data: Data, source: epath.PathLike) -> Data:
    """The section `config.data` with a mean and a deviation for each channel; says how images are
    prepared.

    Args:
      data: of a run, perhaps changed by the user.
      source: the checkpoint, for messages.

    Raises:
      ConfigError: neither the checkpoint nor the user says mean and std, or not for every channel.
    """
    augment.check_normalization(data, source)
    data = augment.with_channels(data)
    size, crop = f"{sizes.size_text(data.image_size)} pixels", crops.describe_crop(data)
    if data.native_tokens:
        size, crop = f"up to {data.native_tokens} patches", f"whole, {data.interpolation}"
    logging.info("images: %s (%s), mean %s, std %s", size, crop, data.mean, data.std)
    return data


def data_of(run: TrainedModel) -> Data:
    """The section `config.data` of a run, see `normalized_as`."""
    return normalized_as(schema.typed(config_class(run.config), run.config).data, run.directory)


def make_forward(
    definition: nnx.GraphDef,
    model_config: classifier.ClassifierConfig,
    data: Data,
    *,
    capture: Capture = False,
) -> Callable[[Weights, jax.Array], ModelOutput]:
    """The forward pass, to be compiled.

    Args:
      definition: the model's, from `registry.abstract` or `registry.split`.
      model_config: the family's config.
      data: that section of a run's config; `mean`, `std` and `permute` are used.
      capture: what the model gives beside its output.

    Returns:
      `forward(weights, images)`: uint8 (B, H, W, C) to what the model gives, computed in the type that
      suits the devices that are traced for.
    """
    network = make_network(definition, model_config, capture=capture)

    def forward(weights: Weights, images: jax.Array) -> ModelOutput:
        return network(weights, _prepared(images, model_config, data))

    return forward


def make_network(
    definition: nnx.GraphDef, model_config: classifier.ClassifierConfig, *, capture: Capture = False
) -> Callable[[Weights, jax.Array], ModelOutput]:
    """`make_forward` for images that are normalised already, floats."""
    options = {"capture": capture} if capture else {}

    def network(weights: Weights, images: jax.Array) -> ModelOutput:
        return _model(definition, model_config, weights)(images, **options)

    return network


def make_features(
    definition: nnx.GraphDef,
    model_config: classifier.ClassifierConfig,
    data: Data,
    layers: "Sequence[Layer]" = (),
    *,
    norm: bool = True,
) -> "Callable[[Weights, jax.Array], tuple[jax.Array, tuple[LayerFeatures, ...]]]":
    """What a model makes of images, to be compiled: few-shot and nearest-neighbour evaluation, `predict` and the
    Python API take features from here.

    Args:
      definition, model_config, data: see `make_forward`.
      layers, norm: see `layer_features.compute`.

    Returns:
      `features(weights, images)`: uint8 (B, H, W, C), or a `PatchBatch` of uint8, to the input of the head (B, D)
      float32, and the outputs of layers, float32.
    """
    from vit_jax.models import layer_features

    def features(weights: Weights, images: jax.Array):
        model = _model(definition, model_config, weights)
        prepared = _prepared(images, model_config, data)
        output, selected = layer_features.compute(model, prepared, layers, norm=norm)
        return jax.tree.map(lambda x: x.astype(jnp.float32), (output.features, selected))

    return features


def make_exit(
    definition: nnx.GraphDef, model_config: classifier.ClassifierConfig, data: Data
) -> Callable[[int, Weights, jax.Array, Any], tuple[jax.Array, Any]]:
    """One exit of a model that has several, to be compiled; arguments as for `make_forward`.

    Returns:
      `exit(index, weights, images, carried)`: uint8 (B, H, W, C) and what the exit before passes on
      (`None` to the first) to logits (B, classes) float32 and what is passed on, arrays (B, …).
    """

    def exit(index: int, weights: Weights, images: jax.Array, carried: Any):
        model = _model(definition, model_config, weights)
        return model.exit(index, _prepared(images, model_config, data), carried)

    return exit


def _model(
    definition: nnx.GraphDef, model_config: classifier.ClassifierConfig, weights: Weights
) -> nnx.Module:
    """The model, with exact products of its heads in float32. By default TPUs round the factors to bfloat16, and GPUs
    round them to TensorFloat-32, so that close logits would be in another order than on a CPU.
    """
    model = nnx.merge(registry.for_devices(definition, model_config), *weights)
    for path, module in nnx.iter_modules(model):
        name = "/".join(map(str, path))
        if isinstance(module, nnx.Linear) and re.fullmatch(classifier.HEADS, f"{name}/"):
            module.precision = jax.lax.Precision.HIGHEST
    return model


def _prepared(
    images: jax.Array | PatchBatch, model_config: classifier.ClassifierConfig, data: Data
) -> jax.Array | PatchBatch:
    dtype = jnp.dtype(choices.with_compute_dtype(model_config).dtype)
    if isinstance(images, PatchBatch):
        from vit_jax.data.augmentation import patches

        return patches.normalize(images, data.mean, data.std, dtype)
    return augment.prepared(images, data, dtype)
