"""What single layers of a model give of images, for any family: class token, patches, maps. The one place that
knows it; training, evaluation, prediction and inspection take features from here.

In a training step, of an objective that reads several layers:

    output, layers = layer_features.compute(learner.model, images, (3, 7, 11), rngs=rngs)
    maps = [layer.map for layer in layers]  # (B, h, w, D) each
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.models import classifier, layout, registry
from vit_jax.models.contract import ModelOutput

# The layers that are meant by a number alone: of two branches those of the large one.
_MAIN = "blocks"

Layer = int | str


@flax.struct.dataclass
class LayerFeatures:
    """What a layer gives of a batch.

    Attributes:
      tokens: (B, N, D): class and distillation token, then patches or places row by row; no registers, as in
        `ModelOutput.tokens`.
      name: of the layer: 'blocks/3', 'stage2'.
      grid: rows and columns of the patches; `None` of a family whose config has no grid.
      has_class_token: whether the first token is one.
    """

    tokens: jax.Array | np.ndarray
    name: str = flax.struct.field(pytree_node=False)
    grid: tuple[int, int] | None = flax.struct.field(pytree_node=False)
    has_class_token: bool = flax.struct.field(pytree_node=False)

    @property
    def class_token(self) -> jax.Array | np.ndarray | None:
        """(B, D); `None` of a network without one."""
        return self.tokens[:, 0] if self.has_class_token else None

    @property
    def patches(self) -> jax.Array | np.ndarray:
        """(B, h * w, D), without learned tokens. Raises `ConfigError` without a grid."""
        rows, columns = self.known_grid()
        return self.tokens[:, -rows * columns :]

    @property
    def map(self) -> jax.Array | np.ndarray:
        """(B, h, w, D), without learned tokens. Raises `ConfigError` without a grid."""
        x = self.patches
        return x.reshape(x.shape[0], *self.known_grid(), x.shape[-1])

    def known_grid(self) -> tuple[int, int]:
        """Rows and columns of the patches. Raises `ConfigError` without a grid."""
        if self.grid is None:
            raise ConfigError(
                f"the model's family has no grid (`grid` of its config), so the patches of {self.name} have no places "
                "in the image: take its tokens, without maps"
            )
        return self.grid


def compute(
    model: classifier.Classifier,
    images: jax.Array,
    layers: Sequence[Layer],
    *,
    norm: bool = True,
    deterministic: bool = True,
    rngs: nnx.Rngs | None = None,
) -> tuple[ModelOutput, tuple[LayerFeatures, ...]]:
    """A model's output and that of single layers, in the dtype of its computation; gradients reach all of them. Of
    layers that run in a loop all are captured, (L, B, N, D), before some are selected.

    Args:
      model: of any family.
      images: (B, H, W, C), normalised.
      layers: numbers of the blocks, from 0, or from the end if negative; or names, see `layer_names`. A number is
        that of a feature map, where there are no blocks.
      norm: whether the outputs of layers go through the model's last norm.
      deterministic, rngs: see `Classifier`.

    Raises:
      ConfigError: there is no such layer.
    """
    call = {"deterministic": deterministic, "rngs": rngs}
    output = model(images, **call, capture=_without_attention) if layers else model(images, **call)
    selected = select(model, output.intermediates, layers, norm=norm)
    return dataclasses.replace(output, intermediates={}), selected


def select(
    model: classifier.Classifier,
    captured: dict[str, jax.Array],
    layers: Sequence[Layer],
    *,
    norm: bool = True,
) -> tuple[LayerFeatures, ...]:
    """Layers of what a model captured, `ModelOutput.intermediates`; arguments as of `compute`."""
    return tuple(_select(model, captured, layer, norm) for layer in resolve(layers, captured))


def last(output: ModelOutput, config: classifier.ClassifierConfig) -> LayerFeatures:
    """The tokens of a model's output, which the last norm has normed."""
    return _of_tokens(output.tokens, "tokens", layout.network(config))


def abstract(
    config: classifier.ClassifierConfig, layers: Sequence[Layer] = (), *, norm: bool = True
) -> tuple[LayerFeatures, ...]:
    """Shapes and dtypes of what `compute` gives of one image; without layers of the output's tokens, see `last`."""

    def look(model: classifier.Classifier, images: jax.Array) -> tuple[LayerFeatures, ...]:
        output, selected = compute(model, images, layers, norm=norm)
        return selected or (last(output, config),)

    return shapes_of(config, look)


def layer_names(config: classifier.ClassifierConfig) -> list[str]:
    """The names of the layers whose outputs a model gives: 'blocks/0', …; 'small_blocks/0', …; 'stage1', …"""
    return _names(_shapes(config))


def check_layers(config: classifier.ClassifierConfig, layers: Sequence[Layer]) -> tuple[str, ...]:
    """The names of `layers`, which are as for `compute`.

    Raises:
      ConfigError: the model has no such layer; the message lists those that it has.
    """
    return resolve(layers, _shapes(config))


def resolve(layers: Sequence[Layer], arrays: dict) -> tuple[str, ...]:
    """The names of the layers that `check_layers` has accepted, among what is captured: `arrays`, arrays or their
    shapes by name.
    """
    names = _names(arrays)
    return tuple(_name(layer, names) for layer in layers)


def shapes_of(
    config: classifier.ClassifierConfig, look: Callable[[classifier.Classifier, jax.Array], Any]
) -> Any:
    """Shapes and dtypes of what `look(model, images)` gives of one image, (1, H, W, C)."""
    definition, weights = registry.abstract_weights(config)
    images = jax.ShapeDtypeStruct((1, *config.height_width, config.channels), jnp.float32)
    return jax.eval_shape(lambda w, x: look(nnx.merge(definition, *w), x), weights, images)


def _shapes(config: classifier.ClassifierConfig) -> dict[str, jax.ShapeDtypeStruct]:
    return shapes_of(
        config, lambda model, images: model(images, capture=_without_attention).intermediates
    )


def _without_attention(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: x for name, x in arrays.items() if "attention" not in name}


def _names(arrays: dict) -> list[str]:
    return [
        name
        for stream, x in arrays.items()
        if "attention" not in stream
        for name in (
            [f"{stream}/{i}" for i in range(x.shape[0])] if _is_stack(stream) else [stream]
        )
    ]


def _is_stack(stream: str) -> bool:
    """Whether the arrays of a name are those of several layers, one after the other."""
    return stream.endswith("blocks")


def _name(layer: Layer, names: Sequence[str]) -> str:
    choices = [name for name in names if name.startswith(f"{_MAIN}/")] or names
    if isinstance(layer, int):
        if -len(choices) <= layer < len(choices):
            return choices[layer]
        valid = (
            f"0 to {len(choices) - 1} ({', '.join(names)})" if names else "its family gives none"
        )
        raise ConfigError(f"there is no layer {layer}: the model has {len(choices)}, {valid}")
    if layer not in names:
        valid, hint = ", ".join(names) or "none, its family gives none", nearest(layer, names)
        hint = hint if "did you mean" in hint else ""
        raise ConfigError(f"there is no layer {layer!r}{hint}; the model has {valid}")
    return layer


def _select(
    model: classifier.Classifier, arrays: dict[str, jax.Array], name: str, norm: bool
) -> LayerFeatures:
    stream, _, index = name.partition("/")
    x = arrays[stream][int(index)] if index else arrays[stream]
    if norm and isinstance(model, classifier.Classifier):  # A guest may be any module.
        x = model.last_norm(x, name)
    if x.ndim == 4:  # a feature map
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        return LayerFeatures(flat, name, (x.shape[1], x.shape[2]), has_class_token=False)
    config = layout.network_of(model.config, name)
    return _of_tokens(_without_registers(x, config), name, config)


def _without_registers(x: jax.Array, config: classifier.ClassifierConfig) -> jax.Array:
    """What is captured of a layer, (B, N, D), less its registers, which follow class and distillation token."""
    count = getattr(config, "registers", 0)
    placed = getattr(config, "tokens_with_position", 0)
    if not count:
        return x
    return jnp.concatenate([x[:, :placed], x[:, placed + count :]], axis=1)


def _of_tokens(x: jax.Array, name: str, config: classifier.ClassifierConfig) -> LayerFeatures:
    """Tokens (B, N, D) of the network of a config."""
    grid = layout.grid(config) if layout.has_grid(config) else None
    return LayerFeatures(x, name, grid, layout.has_class_token(config))
