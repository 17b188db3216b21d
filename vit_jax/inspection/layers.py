"""Features of single layers, of any family: as tokens, or as maps."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.checkpoints import reading
from vit_jax.data import crops
from vit_jax.evaluation.forward import data_of, make_forward
from vit_jax.inspection.layout import layouts
from vit_jax.models import classifier, registry
from vit_jax.prediction.images import Compiled

# The layers that are meant by a number alone: of two branches those of the large one.
_MAIN = "blocks"


def make_layer_features(
    run: reading.Run, layers: Sequence[int | str], *, maps: bool = False
) -> Compiled:
    """A function of weights and images that gives the outputs of layers, float32.

    Args:
      layers: numbers of the blocks, from 0, or from the end if negative; or names: 'small_blocks/2' of a model of
        two branches, 'stage3' of a ResNet. A number is also that of a feature map, where there are no blocks.
      maps: (B, h, w, D), without class and other learned tokens, instead of all tokens (B, N, D).

    Raises:
      ConfigError: there is no such layer.
    """
    definition, weights = registry.split(run.model)
    data = data_of(run)
    forward = make_forward(definition, run.model_config, data, capture=_without_attention)
    images = jax.ShapeDtypeStruct((1, *crops.shape(data)), np.uint8)
    found = jax.eval_shape(lambda w, x: forward(w, x).intermediates, weights, images)
    places = [_find(layer, found) for layer in layers]

    @jax.jit
    def features(weights: registry.Weights, images: jax.Array) -> tuple[jax.Array, ...]:
        captured = forward(weights, images).intermediates
        return tuple(_one(captured, *place, run.model_config, maps) for place in places)

    return Compiled(data, features)


def layer_names(found: dict[str, jax.ShapeDtypeStruct]) -> list[str]:
    """The names of the layers whose outputs are captured: 'blocks/0', …; 'root', 'stage1', …"""
    return [
        name
        for stream, x in found.items()
        for name in ([f"{stream}/{i}" for i in range(len(x))] if _is_stack(stream) else [stream])
    ]


def _without_attention(found: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: x for name, x in found.items() if "attention" not in name}


def _is_stack(stream: str) -> bool:
    """Whether the arrays of a name are those of several layers, one after the other."""
    return stream.endswith("blocks")


def _find(layer: int | str, found: dict[str, jax.ShapeDtypeStruct]) -> tuple[str, int | None]:
    """The name under which a layer is captured, and which of several it is there."""
    names = layer_names(found)
    if isinstance(layer, int):
        several = [name for name in names if name.startswith(f"{_MAIN}/")] or names
        if not -len(several) <= layer < len(several):
            raise ConfigError(
                f"there is no layer {layer}: the model has {len(several)}, 0 to {len(several) - 1} ({', '.join(names)})"
            )
        layer = several[layer]
    if layer not in names:
        raise ConfigError(f"there is no layer {layer!r}{nearest(layer, names)}")
    stream, _, index = layer.partition("/")
    return stream, int(index) if index else None


def _one(
    captured: dict[str, jax.Array],
    stream: str,
    index: int | None,
    config: classifier.Options,
    maps: bool,
) -> jax.Array:
    x = captured[stream] if index is None else captured[stream][index]
    x = x.astype(jnp.float32)
    if x.ndim == 4:  # a feature map
        return x if maps else x.reshape(len(x), -1, x.shape[-1])
    if not maps:
        return x
    branch = "small_" if stream.startswith("small_") else ""
    rows, columns = layouts(config)[f"{branch}attention"].grid
    return x[:, -rows * columns :].reshape(len(x), rows, columns, -1)
