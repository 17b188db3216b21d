"""The features of images: which of them are asked for, their program, and batches of them as they come."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator

import flax.struct
import jax
import jax.numpy as jnp
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
from vit_jax.models.contract import PatchBatch
from vit_jax.models.layer_features import LayerFeatures
from vit_jax.prediction import finite
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
        `data.native_sizes`; 0: all are seen at one size; `None`: as in the run, unless `image_size` or `stride` is set.
    """

    layers: tuple[layer_features.Layer, ...] = ()
    maps: bool = False
    norm: bool = True
    image_size: Size | None = None
    stride: int = 0
    native_tokens: int | None = None


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
    of_one_size = wanted.image_size is not None or wanted.stride
    if of_one_size and wanted.native_tokens:
        raise ConfigError(
            f"native_tokens = {wanted.native_tokens} gives each image a size of its own: set it without image_size and "
            "stride"
        )
    native = None if of_one_size else native_size(run, data, wanted.native_tokens)
    layers = layer_features.check_layers(run.model_config, wanted.layers) if wanted.layers else ()
    features = make_features(definition, run.model_config, data, layers, norm=wanted.norm)
    if native:
        return Compiled(data, jax.jit(_with_grids(features)), native)
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


@flax.struct.dataclass
class NativeLayer(layer_features.LayerFeatures):
    """What a layer gives of images at sizes of their own.

    Attributes:
      grids: (B, 2), the rows and columns of the patches of each image; further patches are zero.
    """

    grids: jax.Array | np.ndarray

    @property
    def map(self) -> list[np.ndarray]:
        """(h, w, D) of each image."""
        grids = np.asarray(self.grids).tolist()
        return [
            x[: rows * columns].reshape(rows, columns, -1)
            for x, (rows, columns) in zip(self.patches, grids, strict=True)
        ]


def _with_grids(features: Callable) -> Callable:
    """`make_features` of images at sizes of their own, whose layers are `NativeLayer`."""

    def of_patches(weights: registry.Weights, images: PatchBatch):
        pooled, layers = features(weights, images)
        padded, length = [], images.patches.shape[1]
        for layer in layers:
            count = layer.tokens.shape[1]
            real = jnp.arange(count) < images.lengths(count)[:, None]
            tokens = jnp.where(real[..., None], layer.tokens, 0)
            grid = (1, length)  # of the array
            padded.append(
                NativeLayer(tokens, layer.name, grid, layer.has_class_token, images.grids)
            )
        return pooled, tuple(padded)

    return of_patches


def compute_features(
    run: TrainedModel,
    files: Iterable[Named],
    batch_size: int,
    compiled: Compiled,
    *,
    rows: int = 0,
) -> Iterator[tuple[list[str], tuple[np.ndarray, tuple[LayerFeatures, ...]], list[BadImage]]]:
    """Batch by batch the names of the images that can be read, their features (n, D) float32 and those of layers, and
    what is wrong with the others. The devices compute a batch while the caller has the previous one.

    Args:
      run: from `at_size`.
      compiled: from `compile_features`.
      rows: of the arrays that the devices see; by default as many as images in the first batch.

    Raises:
      CheckpointError: features are not finite.
    """
    weights = registry.split(run.model)[1]
    size = rows
    under_way = collections.deque()
    for decoded in read_ahead(files, compiled.read, batch_size):
        size = size or len(decoded)
        images, real = compiled.batch(decoded, size)
        names = [file.name for file, image in decoded if not isinstance(image, BadImage)]
        bad = [image for _, image in decoded if isinstance(image, BadImage)]
        under_way.append((names, real, bad, compiled.function(weights, images)))
        if len(under_way) > 1:
            yield _on_host(run, *under_way.popleft())
    while under_way:
        yield _on_host(run, *under_way.popleft())


def _on_host(
    run: TrainedModel, names: list[str], real: np.ndarray, bad: list[BadImage], arrays
) -> tuple:
    arrays = jax.tree.map(lambda x: x[real], jax.device_get(arrays))
    finite.check_answers(run, names, arrays)
    return names, arrays, bad
