"""What a family says about each format that others keep its models in: how their tensors are
recognised, which of them is which parameter, and what the other code cannot compute.

`table.py` has the conversions of every family by format: `official`, `big_vision`, `timm`,
`huggingface`, or `authors`, the PyTorch code that the family was published with.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.base.sizes import Size
from vit_jax.interchange.conversions.rules import Constant, Rule
from vit_jax.interchange.conversions.skips import Skip
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.objectives.contract import SavedObjective

Shapes = Mapping[str, tuple[int, ...]]

USUAL_IMAGE_SIZE = 224  # of a model whose file does not tell


@dataclasses.dataclass(frozen=True)
class Open:
    """An option that a file's tensors leave open.

    Attributes:
      values: the possible ones; () for any.
      doubt: which value is assumed, and why it may be wrong; '' if no warning is needed.
      ask: the option and what it may be, where no value is likely enough to be assumed and the
        user has to give one; '' otherwise.
    """

    values: tuple = ()
    doubt: str = ""
    ask: str = ""


def heads_of(published: Mapping[Any, int], size: Any, what: str = "width") -> dict[str, Open]:
    """How open the number of heads is, which no tensor tells: the published number for a published size, else asked.

    Args:
      published: heads by size.
      what: what a size is.
    """
    known = ", ".join(f"{heads} at {known_size}" for known_size, heads in sorted(published.items()))
    ask = f"heads: published models have, by {what}, {known}; this one is of {what} {size}"
    return {"heads": Open(ask="" if size in published else ask)}


@dataclasses.dataclass(frozen=True)
class DetectedModel:
    """A model that a file holds.

    Attributes:
      options: of the family's config, `image_size` and `channels` among them.
      layout: which variant of the format's names the file has, where there are several; JSON.
      open: options whose value in `options` is only the likeliest. What the user says, or the model
        that the weights are for, takes precedence.
      left_out: tensors that are not part of the model; of a family of one's own patterns will do.
      assumed: further options that neither tensors nor what stands beside them contain: `options` has
        what the format's code, or the published models of that form, compute with.
    """

    options: dict[str, Any]
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    open: dict[str, Open] = dataclasses.field(default_factory=dict)
    left_out: tuple[Skip | str, ...] = ()
    assumed: tuple[str, ...] = ()


class Conversion:
    """One format's names of one family's parameters.

    Attributes:
      conventions: options that the other code cannot vary, with the values that it computes with. A
        model with others is not written.
      renamed: (pattern, replacement) pairs that turn other names of the same tensors into those of
        `rules`.
      beside_text: whether its files have a text tower too, without which none is written.
    """

    conventions: ClassVar[dict[str, Any]] = {}
    renamed: ClassVar[tuple[tuple[str, str], ...]] = ()
    beside_text: ClassVar[bool] = False

    def recognise(self, shapes: Shapes, metadata: Mapping[str, Any]) -> DetectedModel | None:
        """The model that a file holds, or `None` if it is not of this family.

        Args:
          shapes: of the file's tensors, by name.
          metadata: what is known beside the tensors: fields of a config.json; and `image_size`, in its
            one form, where a file or the user says it.

        Raises:
          KeyError, ValueError: it seems to be of this family, but lacks a tensor, or one has other
            axes.
          CheckpointError: it is of this family, but our code cannot compute it.
        """
        raise NotImplementedError

    def rules(self, config: ClassifierConfig, layout: Mapping[str, Any]) -> list[Rule | Constant]:
        """Which tensors are which parameters; some may be of parameters that the model does not have.

        Args:
          layout: as `recognise` or `layout` gives it.
        """
        raise NotImplementedError

    def layout(self, config: ClassifierConfig) -> dict[str, Any]:
        """The variant of the names that a new file gets."""
        return {}

    def of(self, config: ClassifierConfig) -> "Conversion":
        """What converts a model of this config, where a family has several under one format."""
        return self

    def prepared(self, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """A file's tensors as `rules` take them, where the format's code computes what it uses of them.

        Raises:
          CheckpointError: one of those that belong together is missing.
        """
        return dict(tensors)

    def refusal(self, config: ClassifierConfig) -> str:
        """Why the other code cannot compute a model, beside `conventions`; '' if it can."""
        return ""

    def expressed(self, config: ClassifierConfig, params: dict) -> tuple[ClassifierConfig, dict]:
        """An equivalent model that the format can express: (config, all its arrays)."""
        return config, params

    def preprocessing(self, config: ClassifierConfig) -> Preprocessing | None:
        """How images are prepared where the file does not say it; `None` if the code has several ways."""
        return None

    def preprocessing_named(
        self, parts: Iterable[str], config: ClassifierConfig
    ) -> Preprocessing | None:
        """How images are prepared for the published model that the parts of a path name; `None` if they name none."""
        return None

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """Every name with the one that it has in `rules`."""
        result = {name: name for name in names}
        for pattern, new in self.renamed:
            result = {name: re.sub(pattern, new, now) for name, now in result.items()}
        return result


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a file has of an objective beside the model; by default nothing.

    Attributes:
      rules: which tensors are which parameters.
      params: these, nested dict.
      stated: what the file's header, or config.json, says of it.
      layout: of the model's own names, where the file is new.
      model_format: the format of the model's own names, where it is another.
    """

    rules: Sequence[Rule | Constant] = ()
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stated: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model_format: str = ""


NOTHING = Beside()


class ObjectiveConversion:
    """One format's names of what an objective owns, in files that have it beside the model.

    Attributes:
      conventions: see `Conversion`.
      key: of a header, and of a checkpoint's `layout`: what the file says of the objective; '': nothing.
    """

    conventions: ClassVar[dict[str, Any]] = {}
    key: ClassVar[str] = ""

    def find(
        self,
        config: ClassifierConfig,
        tensors: Mapping[str, LazyArray],
        layout: Mapping[str, Any],
        hints: Mapping[str, Any],
    ) -> SavedObjective | None:
        """What the objective owns; `None`: nothing, or something else, of which a sentence is logged.

        Args:
          config: the model's.
          tensors: of the file, those that are no part of the model.
          layout: of the checkpoint.
          hints: options of the objective that it is for, taken where the file leaves them open.
        """
        raise NotImplementedError

    def beside(self, config: ClassifierConfig, saved: SavedObjective) -> Beside:
        """What a file gets."""
        raise NotImplementedError

    def refusal(self, config: ClassifierConfig) -> str:
        """Why the other code cannot compute the model, beside `conventions`; '' if it can."""
        return ""


class TimmConversion(Conversion):
    """timm's names. `metadata` are a folder's `model_args`, and the published model's `architecture` and
    `tag` (see `published`) where its config.json or name says them; `written_here`, whether our code
    wrote the file.

    Attributes:
      file_conventions: as `conventions`, for a file alone: what its code takes where no config.json
        says otherwise.
    """

    file_conventions: ClassVar[dict[str, Any]] = {"activation": "gelu"}

    def architecture(self, config: ClassifierConfig, layout: Mapping[str, Any]) -> tuple[str, dict]:
        """The model's name in timm, and the arguments that it needs beside those of that name.

        Args:
          layout: of the file's names, see `rules`.

        Raises:
          CheckpointError: timm has none, though it may have all of its tensors.
        """
        raise NotImplementedError


class HuggingFaceConversion(Conversion):
    """The names of `transformers`. `metadata` are the fields of config.json, and `processor_size`, the size of
    the images that preprocessor_config.json gives, or `None`.

    Attributes:
      model_types: those of `config.json` that it reads.
    """

    model_types: ClassVar[tuple[str, ...]] = ()

    def config_json(self, config: ClassifierConfig, layout: Mapping[str, Any]) -> dict[str, Any]:
        """What config.json says about the model, including `architectures` and `model_type`.

        Args:
          layout: of the file's names, see `rules`.
        """
        raise NotImplementedError


def refusal_of_pooling(config: ClassifierConfig) -> str:
    """`Conversion.refusal` of code that reads the class token of the last layer and nothing else."""
    if config.pool == "token" and not config.weighted_layers:
        return ""
    return "its authors' network reads the class token of the last layer"


def patch_grid(
    rows: int, prefixes: Iterable[int], patch: int, metadata: Mapping[str, Any]
) -> tuple[tuple[int, int], int]:
    """The grid of patches of a model whose position embedding has this many rows.

    It is that of the image size if this is known, else a square, else that of the size that is
    wanted, `metadata["wanted_size"]`.

    Args:
      rows: of the position embedding.
      prefixes: how many of these may belong to no patch, the likeliest first.
      patch: pixels of a side.
      metadata: see `Conversion.recognise`.

    Returns:
      (down, across), and the rows that belong to no patch.

    Raises:
      CheckpointError: the height and width of the grid are not known.
    """
    counts = [(rows - prefix, prefix) for prefix in prefixes]

    def fitting(*grids: tuple[int, int]) -> list[tuple[tuple[int, int], int]]:
        return [
            (grid, prefix) for grid in grids for n, prefix in counts if 0 < n == math.prod(grid)
        ]

    def of_size(name: str) -> tuple[int, int]:
        height, width = sizes.height_width(metadata.get(name) or 0)
        return height // patch, width // patch

    if grids := fitting(of_size("image_size")):
        return grids[0]
    squares = fitting(*((math.isqrt(max(count, 0)),) * 2 for count, _ in counts))
    wanted = fitting(of_size("wanted_size"))
    if squares and wanted and squares[0][1] != wanted[0][1]:
        both = " or ".join(f"{down} x {across}" for (down, across), _ in (squares[0], wanted[0]))
        problem = f"may be {both} patches and {squares[0][1]} or {wanted[0][1]} other tokens"
    elif grids := squares or wanted:
        return grids[0]
    else:
        problem = "is no square grid, and nothing says its height and width"
    raise CheckpointError(
        f"a position embedding of {rows} rows {problem}: set the size of the checkpoint's own images, such as "
        "image_size='224x448', when it is loaded or converted (--model=image_size=224x448)"
    )


def image_size(grid: tuple[int, int], patch: int) -> Size:
    """The size of images that are split into such a grid of patches."""
    return sizes.parse((grid[0] * patch, grid[1] * patch))


def timm_sizes(
    shapes: Shapes, patches: str, rows: int, prefix: int, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that the tensors of a network of patches tell where layers are called as timm's.

    Args:
      patches: the kernel that embeds patches.
      rows, prefix: of the position embedding, and how many of these belong to no patch.
      metadata: see `Conversion.recognise`.
    """
    width, channels, patch, _ = shapes[patches]
    grid, _ = patch_grid(rows, (prefix,), patch, metadata)
    return {
        "image_size": image_size(grid, patch),
        "num_classes": shapes.get("head.bias", (0,))[0],
        "patch": patch,
        "depth": count_layers(shapes, r"blocks\.(\d+)\."),
        "width": width,
        "channels": channels,
    }


def count_layers(names: Iterable[str], pattern: str) -> int:
    """How many layers there are, if `pattern` matches the beginning of their names and captures their
    number, from 0.
    """
    matches = map(re.compile(pattern).match, names)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)
