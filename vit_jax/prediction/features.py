"""The features of images: which of them are asked for, their program, and batches of them as they come."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from vit_jax.base.errors import ConfigError
from vit_jax.base.sizes import Size
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data import crops
from vit_jax.data.record import BadImage
from vit_jax.evaluation import windows
from vit_jax.evaluation.forward import data_of, make_features
from vit_jax.interchange import loading
from vit_jax.models import layer_features, registry
from vit_jax.models.layer_features import LayerFeatures
from vit_jax.prediction.images import Compiled, Named, native_size, read_ahead


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which features.

    Attributes:
      layers: numbers or names, see `layer_features.compute`; (): only the input of the head.
      maps: whether they must be maps of the image.
      norm: whether the outputs of layers go through the model's last norm.
      image_size: of the images as the model sees them; `None`: its own. Positions are interpolated, or with a
        stride the model's own windows slide over images of this size.
      stride: pixels from one window to the next; 0: no windows.
      native_tokens: each image is seen at the size and aspect of its own that so many patches allow, see
        `data.native_sizes`; 0: all are seen at one size.
    """

    layers: tuple[layer_features.Layer, ...] = ()
    maps: bool = False
    norm: bool = True
    image_size: Size | None = None
    stride: int = 0
    native_tokens: int = 0


_POOLED = Wanted()


def at_size(run: TrainedModel, wanted: Wanted) -> TrainedModel:
    """The run at the size of images that is asked for; with windows the model stays as it is.

    Raises:
      ConfigError: the model cannot be fitted to that size.
    """
    if wanted.image_size is None or wanted.stride:
        return run
    return loading.resized(run, wanted.image_size)


def compile_features(run: TrainedModel, wanted: Wanted = _POOLED) -> Compiled:
    """A function of weights and images that gives features (B, D) float32 and those of layers, see
    `forward.make_features`.

    Args:
      run: from `at_size`.

    Raises:
      ConfigError: there is no such layer, it is no map, or windows do not fit.
    """
    definition, weights = registry.split(run.model)
    data = data_of(run)
    if wanted.native_tokens:
        if any((wanted.layers, wanted.maps, wanted.image_size, wanted.stride)):
            raise ConfigError(
                "native_tokens gives the features that the head reads: set it without layers, maps, image_size and "
                "stride"
            )
        native = native_size(run, data, wanted.native_tokens)
        features = make_features(definition, run.model_config, data)
        return Compiled(data, jax.jit(features), native)
    layers = layer_features.check_layers(run.model_config, wanted.layers) if wanted.layers else ()
    features = make_features(definition, run.model_config, data, layers, norm=wanted.norm)
    image = jax.ShapeDtypeStruct((1, *crops.shape(data)), np.uint8)
    layer_shapes = jax.eval_shape(features, weights, image)[1]
    if wanted.maps or wanted.stride:
        grids = [layer.known_grid() for layer in layer_shapes]
    if wanted.stride:
        if wanted.image_size is None:
            raise ConfigError(
                "stride is for windows that slide over larger images: set image_size too, such as 1024x2048"
            )
        size = wanted.image_size
        features = windows.slide(features, data.image_size, size, wanted.stride, grids)
        data = data_of(dataclasses.replace(run, config=loading.prepared_at(run, size)))
    return Compiled(data, jax.jit(features))


def compute_features(
    run: TrainedModel, files: Iterable[Named], batch_size: int, compiled: Compiled
) -> Iterator[tuple[list[str], tuple[np.ndarray, tuple[LayerFeatures, ...]], list[BadImage]]]:
    """Batch by batch the names of the images that can be read, their features (n, D) float32 and those of layers, and
    what is wrong with the others. The devices compute a batch while the caller has the previous one.

    Args:
      run: from `at_size`.
      compiled: from `compile_features`.
    """
    weights, size = registry.split(run.model)[1], 0
    under_way = collections.deque()
    for decoded in read_ahead(files, compiled.read, batch_size):
        size = size or len(decoded)
        images, real = compiled.batch(decoded, size)
        names = [file.name for file, image in decoded if not isinstance(image, BadImage)]
        bad = [image for _, image in decoded if isinstance(image, BadImage)]
        under_way.append((names, real, bad, compiled.function(weights, images)))
        if len(under_way) > 1:
            yield _on_host(*under_way.popleft())
    while under_way:
        yield _on_host(*under_way.popleft())


def _on_host(names: list[str], real: np.ndarray, bad: list[BadImage], arrays) -> tuple:
    return names, jax.tree.map(lambda x: x[real], jax.device_get(arrays)), bad
