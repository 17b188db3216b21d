"""How tokens know their places (ViT §D.4, Table 8): what kinds of positions there are, and where they
are added. What is computed of images before that is in `embeddings`.

  learned     1-D: a vector for every patch, row by row of the image.
  learned2d   vectors of half the width for every column (X) and every row (Y), one after the other.
  factorized  vectors of the whole width for every column and every row, added up (NaViT, 2307.06304 §2.1).
  sincos2d    fixed sines and cosines of column and row.
  fixed2d     the same as MAE has them: a table that a checkpoint has, in which learned tokens have zeros,
              and which may be trained later, as `learned`.
  sinusoid    fixed ones of the row number in a table, which a checkpoint has: T2T's.
  relative    1-D relative attention: an embedding for every distance p_q - p_k of two patches' places
              in that row, as a further key; queries meet it as they do keys: q·(k + e) / √C.
  bias2d      relative position bias (BEiT, 2106.08254): for every distance down and across, and every head,
              a number that is added to the logits; three more to, from and among tokens that are no patches.
  coordinates  made of the coordinates of a patch's centre, by learned frequencies and an MLP: `table_positions`.
  transformer_xl, deberta  the terms of these models for distances in the row of patches: `zoo/relative_terms`.

They are added at the stem, after the patch embedding, or at the beginning of every layer, in each its
own or in all the same. `IN_LOGITS` act in attention, so in every layer: see `relative_positions`.

Where the paper says nothing, all that is learned begins as the 1-D table of the official code, normal
with 0.02. At another resolution, learned2d's tables are interpolated along their axis, which is what would
become of the 2-D table that they make together.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.models import classifier
from vit_jax.models.embeddings import (
    draw_position,
    interpolate,
    sincos_2d,
    sinusoids,
    spread_sincos_2d,
)

# Kinds that act in attention, and how many products with the queries or keys each adds.
IN_LOGITS = {"relative": 1, "bias2d": 0, "transformer_xl": 1, "deberta": 2}
_MADE = ("learned2d", "factorized", "coordinates")  # kinds whose table is made of other parameters
KINDS = ("learned", *_MADE, "sincos2d", "fixed2d", *IN_LOGITS, "none")
_TABLES = ("learned", "sinusoid", "fixed2d")
WITH_PREFIX = (*_TABLES, *_MADE)  # kinds with rows for learned tokens
PLACES = ("auto", "stem", "layers", "shared")
# How `native_sizes` resizes a table: with antialiasing, or `linear` without.
RESIZES = ("bilinear", "bicubic", "linear")
_STACK = "encoder/layers/"


def place(kind: str, at: str) -> str:
    """Where positions are: `stem`, `layers` where each layer has parameters of its own, `shared`; '' for none.

    Args:
      kind: one of `KINDS`, or `sinusoid`.
      at: one of `PLACES`.
    """
    if kind == "none":
        return ""
    usual = "shared" if kind == "deberta" else "layers" if kind in IN_LOGITS else "stem"
    level = usual if at == "auto" else at
    # What is fixed is the same in every layer.
    fixed = kind in ("sincos2d", "sinusoid", "fixed2d")
    return "shared" if fixed and level == "layers" else level


def check_positions(config: classifier.ClassifierConfig) -> None:
    """Raises `ConfigError` for positions that there are not; `config` is that of `vit_zoo`, here and below."""
    kind, at = config.position, config.position_at
    if kind in ("sincos2d", "fixed2d") and (config.width % 4 or config.width < 8):
        raise ConfigError(
            f"position {kind} needs a model width of 8 or more that 4 divides, not {config.width}"
        )
    if kind in ("learned2d", "coordinates") and config.width % 2:
        raise ConfigError(f"position {kind} needs an even model width, not {config.width}")
    if config.position_of_registers and config.placed_tokens and not config.position_of_class:
        raise ConfigError(
            "model.position_of_registers needs model.position_of_class: the class token stands before them"
        )
    if kind == "none" and at != "auto":
        raise ConfigError(
            f"model.position=none has nothing to add at model.position_at={at}: leave that at auto"
        )
    if kind in IN_LOGITS and at == "stem":
        raise ConfigError(
            f"model.position={kind} acts in attention, so in every layer: model.position_at is layers or shared"
        )
    if kind in IN_LOGITS and config.attention not in ("auto", "xla"):
        raise ConfigError(
            f"model.position={kind} adds to the attention logits, which the kernel of model.attention="
            f"{config.attention} cannot do: take auto or xla"
        )


def variables(
    config: classifier.ClassifierConfig, rngs: nnx.Rngs
) -> nnx.Module | nnx.Variable | None:
    """What a checkpoint has of the positions of one place; `None` if nothing."""
    patches = math.prod(config.grid)
    match config.position:
        case "sinusoid":
            return nnx.Variable(jnp.asarray(sinusoids(config.prefix + patches, config.width)))
        case "fixed2d":
            table = sincos_2d(config.grid, config.width, periods=config.width // 4)
            return nnx.Variable(jnp.pad(table, [(0, 0), (config.prefix, 0), (0, 0)]))
        case "learned":
            return draw_position((1, config.prefix + patches, config.width), rngs)
    if config.position in _MADE:
        from vit_jax.models import table_positions

        return table_positions.make(config, rngs)
    if config.position in IN_LOGITS:
        from vit_jax.models import relative_positions

        return draw_position(relative_positions.table_shape(config), rngs)
    return None


def table(learned, config: classifier.ClassifierConfig, dtype, places=None) -> jax.Array:
    """What is added to the tokens: (1, prefix + N, D).

    Args:
      learned: from `variables`.
      places: see `vit.VisionTransformer`.
    """
    if config.position == "sincos2d":
        return jnp.asarray(spread_sincos_2d(config.grid, config.width, places), dtype)
    return (learned() if isinstance(learned, nnx.Module) else learned[...]).astype(dtype)


def of_layer(learned, config: classifier.ClassifierConfig, dtype, places=None) -> jax.Array:
    """What is added to the tokens: (1, T, D), with rows of zeros for tokens without a position; of relative
    positions, their table.
    """
    if config.position in IN_LOGITS:
        return learned[...]
    added = table(learned, config, dtype, places)
    placeless = jnp.zeros((1, config.tokens - added.shape[1], config.width), dtype)
    return jnp.concatenate(
        [added[:, : config.prefix], placeless, added[:, config.prefix :]], axis=1
    )


def fit_parameter(
    name: str, source: classifier.ClassifierConfig, target: classifier.ClassifierConfig, resize: str
) -> tuple[str, Callable] | None:
    """`classifier.ClassifierConfig.fit_parameter` of positions; `None` for other parameters."""
    stacked, part = name.startswith(_STACK), name.removeprefix(_STACK)
    if part.split("/")[0] != "position":
        return None
    kinds = [(config.position, config.position_place) for config in (source, target)]
    # A fixed table may be trained.
    trained = [(kind, kinds[1][1]) for kind in ("sinusoid", "fixed2d")]
    if kinds[0] != kinds[1] and (kinds[0] not in trained or kinds[1][0] != "learned"):
        raise ConfigError(
            f"{name} is of positions {' at '.join(kinds[0])} in the checkpoint, {' at '.join(kinds[1])} in the "
            "model: set model.position and model.position_at as they are there"
        )
    step = _fit(part, source, target, resize)
    if step and stacked:
        words, function = step
        return words, lambda x: np.stack([function(layer) for layer in x])
    return step


def _fit(part: str, source, target, resize: str) -> tuple[str, Callable] | None:
    """`fit_parameter` of a parameter of one place."""
    if source.position in _TABLES:
        return classifier.fit_positions(source, target, resize)
    same = source.grid == target.grid or source.position == "coordinates"
    if part == "position/tokens" or same:
        return None
    if source.position in IN_LOGITS:
        from vit_jax.models import relative_positions

        return relative_positions.resizing(source, target, resize)
    axis = 1 if part == "position/x" else 0
    old, new = ((1, config.grid[axis]) for config in (source, target))
    return resize, lambda x: interpolate(x, new, method=resize, old_grid=old)
