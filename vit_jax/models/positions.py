"""How tokens know their places (ViT §D.4, Table 8). A kind of position embedding is a class, a `Position`: it knows
what a model learns for it, what it adds to tokens, its values for images of any size, and how its parameters become
those of another grid. `KINDS` has all of them by name; nothing else asks for the name of a kind.

Positions are added at the stem, after the patch embedding, or at the beginning of every layer, in each its own or in
all the same. Some act in attention, so in every layer.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.contract import PatchBatch

PLACES = ("auto", "stem", "layers", "shared")
# How images of their own sizes resize a table: with antialiasing, or `linear` without.
RESIZES = ("bilinear", "bicubic", "linear")
_STACK = "encoder/layers/"

Variables = nnx.Module | nnx.Variable | None
# How parameters are fitted, in words, and the function that fits them.
Fit = tuple[str, Callable[[np.ndarray], np.ndarray]]


class Position:
    """A kind of position embedding in a model of one config.

    Attributes:
      name: of the kind, `config.position`.
      config: of the model: its `grid`, `prefix`, `tokens`, `width` and `heads` are used.
      usual_place: one of `PLACES`, for `position_at=auto`.
      is_fixed: whether all layers have the same positions, since nothing of them is learned.
      has_prefix: whether learned tokens have positions too, `config.prefix` rows before the patches'.
      shown_by: what the rows of its table are of, 'patches', 'distances' or 'biases'; '' if nothing can be shown.
      acts_in_logits: whether attention adds it to its logits; all others are added to tokens.
      logit_products: how many products with the queries or keys it costs there.
    """

    usual_place = "stem"
    is_fixed = False
    has_prefix = False
    shown_by = "patches"
    acts_in_logits = False
    logit_products = 0

    def __init__(self, config: ClassifierConfig):
        self.config = config
        self.name = config.position

    def check(self) -> None:
        """Raises `ConfigError` if the model cannot have these positions."""

    def variables(self, rngs: nnx.Rngs) -> Variables:
        """The parameters of one place, a stem or a layer, as they begin; `None` if there are none."""
        return None

    def table(
        self, variables: Variables, dtype: jnp.dtype, spread: tuple[int, int] | None = None
    ) -> jax.Array | None:
        """The positions of all tokens that have one, (1, prefix + N, D).

        Args:
          variables: those of `variables`.
          spread: another grid, whose computed positions are spread over the patches; `None`: their own grid.
        """
        raise ConfigError(
            f"model.position={self.name}: its class has no method `table`: define it, or extend ComputedPosition and "
            "define `values`"
        )

    def at(self, variables: Variables, table: jax.Array, native: PatchBatch) -> jax.Array:
        """The positions (B, N, D) of the patches of images of their own sizes.

        Args:
          table: the patches' rows (1, N, D) of `table`.

        Raises:
          ConfigError: this kind has none.
        """
        raise ConfigError(
            f"model.position={self.name} has positions for the grid of the model alone, and images have sizes of "
            "their own (config.data.native_tokens): take learned, sincos2d or coordinates"
        )

    def of_layer(
        self, variables: Variables, dtype: jnp.dtype, spread: tuple[int, int] | None = None
    ) -> jax.Array:
        """The positions that a layer adds to its tokens, (1, T, D): zeros for tokens without a position."""
        prefix = self.config.prefix
        added = self.table(variables, dtype, spread)
        placeless = jnp.zeros((1, self.config.tokens - added.shape[1], self.config.width), dtype)
        return jnp.concatenate([added[:, :prefix], placeless, added[:, prefix:]], axis=1)

    def in_logits(self, values: jax.Array):
        """What attention takes for the values of `of_layer`, see `compute.attend`; of kinds that act there."""
        raise NotImplementedError

    def with_arrays(self, params: Any) -> Variables:
        """`variables` that hold these arrays.

        Args:
          params: an array, nested arrays of a module, or `None`, as a checkpoint has them.
        """
        variables = nnx.eval_shape(lambda: self.variables(nnx.Rngs(0)))
        if isinstance(variables, nnx.Module):
            return nnx.merge(nnx.split(variables)[0], params)
        return None if variables is None else nnx.Param(params)

    def as_learned(self, params: Any) -> np.ndarray:
        """The table that `learned` positions would need for the same: (1, prefix + N, D), of a kind without
        `has_prefix` (1, N, D).

        Args:
          params: see `with_arrays`.
        """
        return np.zeros((1, patches_of(self.config), self.config.width), np.float32)

    def fit(self, part: str, target: ClassifierConfig, resize: str) -> Fit | None:
        """`ClassifierConfig.fit_parameter` of a parameter of one place, 'position' or 'position/…'."""
        return None


class NoPosition(Position):
    """Nothing is added."""

    usual_place = ""

    def table(
        self, variables: Variables, dtype: jnp.dtype, spread: tuple[int, int] | None = None
    ) -> None:
        return None


class ComputedPosition(Position):
    """Positions that are a function of row and column: `values` is all that a kind of yours needs. If the function has
    parameters, `variables` makes them, a module of Flax NNX, which `values` gets.
    """

    is_fixed = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.is_fixed = cls.variables is Position.variables

    def values(self, variables: Variables, rows, columns, height, width) -> jax.Array:
        """The positions (…, N, D) of patches in these rows and columns.

        Args:
          rows, columns: (…, N), from 0 on; between two patches too.
          height, width: the numbers of rows and columns of the image, which broadcast against these.
        """
        raise NotImplementedError

    def table(
        self, variables: Variables, dtype: jnp.dtype, spread: tuple[int, int] | None = None
    ) -> jax.Array:
        height, width = self.config.grid
        rows, columns = np.divmod(np.arange(height * width), width)
        if spread is not None:
            rows = (rows + 0.5) * (spread[0] / height) - 0.5
            columns = (columns + 0.5) * (spread[1] / width) - 0.5
            height, width = spread
        return self.values(variables, rows, columns, height, width)[None].astype(dtype)

    def as_learned(self, params: Any) -> np.ndarray:
        return np.asarray(self.table(self.with_arrays(params), jnp.dtype("float32")))

    def at(self, variables: Variables, table: jax.Array, native: PatchBatch) -> jax.Array:
        # Which few runs need.
        from vit_jax.models import native_sizes

        rows, columns = native_sizes.places(native)
        heights = native.grids[:, 0:1]
        widths = native.grids[:, 1:2]
        return self.values(variables, rows, columns, heights, widths).astype(table.dtype)


# Of a published ViT. `learned` and `sincos2d` are the paper's.
KINDS: LazyTable[type[Position]] = LazyTable(
    {
        "learned": "vit_jax.models.grid_positions:Learned",
        "learned2d": "vit_jax.models.table_positions:Learned2d",
        "factorized": "vit_jax.models.table_positions:Factorized",
        "coordinates": "vit_jax.models.table_positions:Coordinates",
        "sincos2d": "vit_jax.models.grid_positions:Sincos2d",
        "fixed2d": "vit_jax.models.table_positions:Fixed2d",
        "relative": "vit_jax.models.relative_positions:Relative",
        "bias2d": "vit_jax.models.relative_positions:Bias2d",
        "transformer_xl": "vit_jax.models.relative_positions:TransformerXL",
        "deberta": "vit_jax.models.relative_positions:Deberta",
        "none": "vit_jax.models.positions:NoPosition",
    }
)
# Of a T2T-ViT.
SINUSOID: Mapping[str, str] = {"sinusoid": "vit_jax.models.table_positions:Sinusoid"}
_T2T: LazyTable[type[Position]] = LazyTable(SINUSOID)


def register(name: str, kind: type[Position]) -> None:
    """Adds a kind of positions from outside the package: `model.position=NAME` of ViTs."""
    KINDS[name] = kind


def of(config: ClassifierConfig) -> Position:
    """The positions of a model."""
    return kind_of(config.position)(config)


def kind_of(name: str) -> type[Position]:
    """The kind of that name."""
    return (_T2T if name in _T2T else KINDS)[name]


def place(name: str, at: str) -> str:
    """Where positions are: `stem`, `layers` where each layer has parameters of its own, `shared`; '' for none.

    Args:
      name: of the kind.
      at: one of `PLACES`.
    """
    kind = kind_of(name)
    level = kind.usual_place if at == "auto" else at
    return "shared" if kind.is_fixed and level == "layers" else level


def check_positions(config: ClassifierConfig) -> None:
    """Raises `ConfigError` for positions that there are not; `config` is that of a published ViT."""
    kind = of(config)
    at = config.position_at
    kind.check()
    if (
        config.position_of_registers
        and config.tokens_with_position
        and not config.position_of_class
    ):
        raise ConfigError(
            "model.position_of_registers needs model.position_of_class: the class token stands before them"
        )
    if not kind.usual_place and at != "auto":
        raise ConfigError(
            f"model.position={kind.name} has nothing to add at model.position_at={at}: leave that at auto"
        )
    if kind.acts_in_logits and at == "stem":
        raise ConfigError(
            f"model.position={kind.name} acts in attention, so in every layer: model.position_at is layers or shared"
        )
    if kind.acts_in_logits and config.attention not in ("auto", "xla"):
        raise ConfigError(
            f"model.position={kind.name} adds to the attention logits, which the kernel of model.attention="
            f"{config.attention} cannot do: take auto or xla"
        )


def fit_parameter(
    name: str, source: ClassifierConfig, target: ClassifierConfig, resize: str
) -> Fit | None:
    """`ClassifierConfig.fit_parameter` of positions; `None` for other parameters."""
    part = name.removeprefix(_STACK)
    if part.split("/")[0] != "position":
        return None
    before = (source.position, source.position_place)
    after = (target.position, target.position_place)
    is_trained_now = kind_of(source.position).is_fixed and target.position == "learned"
    if before != after and not (is_trained_now and before[1] == after[1]):
        raise ConfigError(
            f"{name} is of positions {' at '.join(before)} in the checkpoint, {' at '.join(after)} in the "
            "model: set model.position and model.position_at as they are there"
        )
    fitted = of(source).fit(part, target, resize)
    if fitted and name.startswith(_STACK):
        words, function = fitted
        return words, lambda x: np.stack([function(layer) for layer in x])
    return fitted


def patches_of(config: ClassifierConfig) -> int:
    """The number of patches of a model's grid."""
    return math.prod(config.grid)
