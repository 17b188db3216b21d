"""Models as named tensors: what all formats but our own do with a family's `Conversion`.

Every family is asked whether a file has its names. Which files there are, and what stands beside
the tensors, is known to the formats.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange import safetensors, state_dicts
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.conversions import translation
from vit_jax.interchange.conversions.contract import (
    NOTHING,
    Beside,
    Conversion,
    DetectedModel,
)
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.interchange.formats import (
    LoadedCheckpoint,
    ReadOptions,
    configure,
    how_to_accept,
)
from vit_jax.models import classifier, registry
from vit_jax.models.registry import Weights


@dataclasses.dataclass(frozen=True)
class Found:
    """Whose names a file has.

    Attributes:
      family, conversion: those that recognise the file.
      recognised: the model.
      prefix: what stands before all names of the model.
      tensors: the file's, by their names in the conversion's rules.
      renamed: those names to the file's own, where they differ.
    """

    family: registry.Family
    conversion: Conversion
    recognised: DetectedModel
    prefix: str
    tensors: dict[str, LazyArray]
    renamed: dict[str, str]


def find_family(
    file: CheckpointFile,
    format: str,
    metadata: Mapping[str, Any] | None = None,
    prefixes: Sequence[str] = ("",),
) -> Found | None:
    """The family whose names in a format a file uses, and its model; `None` if no family recognises
    it.

    Args:
      metadata: see `Conversion.recognise`.
      prefixes: what may stand before all names of a model, in the order in which to look.

    Raises:
      CheckpointError: it seems to be a family's, but lacks something; or the file is damaged.
    """
    problems = []
    for prefix in prefixes:
        mine = {n.removeprefix(prefix): t for n, t in file.tensors.items() if n.startswith(prefix)}
        for family in registry.families():
            conversion = conversions_of(family).get(format)
            if conversion is None:
                continue
            canonical = conversion.canonical(mine)
            tensors = {canonical[name]: tensor for name, tensor in mine.items()}
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            try:
                recognised = conversion.recognise(shapes, metadata or {})
            except (KeyError, ValueError) as error:
                whose = f"a {registry.family_name(family)} model with the names of {format}"
                lacks = isinstance(error, KeyError)
                why = f"lacks {error}" if lacks else f"a tensor has other axes ({error})"
                problems.append(f"looks like {whose}, but {why}")
                continue
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if recognised:
                renamed = {new: old for old, new in canonical.items() if new != old}
                return Found(family, conversion, recognised, prefix, tensors, renamed)
    if problems:
        raise CheckpointError(f"{file.path}: {problems[0]}")
    return None


def is_found(file: CheckpointFile, format: str, **options) -> bool:
    """Whether `find_family` finds a family's model, or part of one."""
    try:
        return find_family(file, format, **options) is not None
    except CheckpointError:
        return bool(file.tensors)


def read_named(
    file: CheckpointFile,
    match: Found,
    format: str,
    request: ReadOptions,
    stated: Mapping[str, Any],
) -> LoadedCheckpoint:
    """The model that was found, its tensors unread.

    Args:
      stated: options that the file says beside its tensors.

    Raises:
      CheckpointError: a tensor or parameter is left over, missing or of another shape.
      ConfigError: an override is no option of the family.
    """
    recognised, path = match.recognised, file.path
    fields = {field.name for field in dataclasses.fields(match.family.Config)}
    options = recognised.options | {n: value for n, value in stated.items() if n in fields}
    asked, taken = {}, set()
    for name, left_open in recognised.open.items():
        if name in stated or name in request.overrides:
            continue
        hint = request.hints.get(name)
        if hint is not None and (not left_open.values or hint in left_open.values):
            options[name] = hint
            taken.add(name)
        elif left_open.ask:
            asked[name] = left_open.ask
        elif left_open.doubt:
            logging.warning("%s does not state %s: %s", path, name, left_open.doubt)
    if asked:
        raise CheckpointError(
            f"{path} does not state these options, and another value gives other results:\n  "
            + "\n  ".join(asked.values())
            + f"\nSet them ({_how_to_say(asked, match.family.Config)}; to train from it "
            "--config.model.OPTION=VALUE), or name the file or its folder as the "
            "published model is called ('vit_jax models --published'), or put its config.json beside it"
        )
    config = configure(match.family.Config, options, request.overrides)
    _check_depth(file, request.overrides)
    conversion = match.conversion.of(config)
    tensors, reshaped = conversion.prepared(match.tensors), recognised.layout.get("reshaped", {})
    like = registry.abstract_weights(config)[1]
    table = conversion.rules(config, recognised.layout)
    known = translation.specs(table, patterns.union(*like))
    left_out = state_dicts.left_out(recognised.left_out, tensors, known, config, path)
    state_dicts.refuse_lost_positions(recognised.left_out, file.tensors, match.prefix, config, path)
    if match.prefix and file.container not in ("npz", "msgpack"):
        state_dicts.check_beside(file.tensors, match.prefix, path)
    wide = [name for name, tensor in tensors.items() if tensor.dtype == np.float64]
    if wide:
        logging.info("%s: %d tensors of float64 are rounded to float32", path, len(wide))
        tensors |= {name: _rounded(tensors[name]) for name in wide}
    skipped_tensors = {name: tensors[name] for name in left_out}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    tensors = {n: _squeezed(t) if n in reshaped else t for n, t in tensors.items()}
    if not request.allow_nonfinite:
        tensors = {
            name: finite(f"{path}: {match.prefix}{match.renamed.get(name, name)}", tensor)
            for name, tensor in tensors.items()
        }
    arrays = translation.to_ours(table, tensors, patterns.union(*like), source=path)
    params, variables = divided(arrays, like)
    layout = {
        "format": format,
        "dtypes": {n: np.dtype(t.dtype).name for n, t in tensors.items() if t.dtype != np.float32},
        "renamed": match.renamed,
        "constants": translation.constants(table, tensors, source=path),
    }
    layout |= recognised.layout
    preprocessing = conversion.preprocessing(config)
    known = {*stated, *request.overrides, *taken}
    assumed = dict.fromkeys((*recognised.open, *recognised.assumed))
    assumed = [n for n in assumed if n not in known and hasattr(config, n)]
    assumed += ["preprocessing"] if preprocessing else []
    return LoadedCheckpoint(
        config,
        params,
        None,
        preprocessing,
        layout,
        variables,
        skipped_tensors,
        assumed=tuple(assumed),
    )


def _check_depth(file: CheckpointFile, overrides: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for more layers than a file can have, before each of their names is looked for."""
    depth, stacked = (
        overrides.get("depth", 0),
        (x.shape[0] for x in file.tensors.values() if x.shape),
    )
    if isinstance(depth, int) and depth > max(len(file.tensors), *stacked):
        raise CheckpointError(
            f"{file.path} has {len(file.tensors):,} tensors, too few for --model=depth={depth}: leave it out"
        )


def _how_to_say(names: Iterable[str], config_class: type) -> str:
    """Of options, on the command line; what is none, only a name or config.json tells."""
    known = [name for name in names if name in config_class.__dataclass_fields__]
    return " ".join(f"--model={name}=…" for name in known)


def conversion_of(
    config: classifier.ClassifierConfig,
    format: str,
    path: epath.PathLike,
    *,
    as_it_was: bool = False,
    alone: bool = False,
) -> Conversion:
    """The conversion of a model's family to a format.

    Args:
      as_it_was: the model was read from such a file, and is written under the same names.
      alone: the file gets no text tower.

    Raises:
      CheckpointError: there is none, or the other code would compute the model with other numbers.
    """
    family = registry.family_of(config)
    conversion = conversions_of(family).get(format)
    if conversion is None:
        others = list(conversions_of(family)) or ["none but orbax"]
        raise CheckpointError(
            f"{path} is not written: the format {format} has no {registry.family_name(family)} models; "
            f"these have: {', '.join(others)}"
        )
    conversion = conversion.of(config)
    if alone and conversion.beside_text:
        raise CheckpointError(
            f"{path} is not written: the authors' format has such models only in files of CLIP and open_clip, beside a "
            "text tower, and this checkpoint has none of theirs: convert with --to=timm or --to=huggingface"
        )
    # What the other code has not, before what an option of the user's can change.
    if not as_it_was and (reason := conversion.refusal(config)):
        raise CheckpointError(f"{path} is not written: {reason}")
    refuse_other_conventions(config, conversion.conventions, format, path)
    return conversion


def refuse_other_conventions(
    config: classifier.ClassifierConfig,
    conventions: Mapping[str, Any],
    code: str,
    path: epath.PathLike,
) -> None:
    """Raises `CheckpointError` for a model that `code` would compute with other numbers."""
    for name, value in conventions.items():
        if getattr(config, name, value) != value:
            raise CheckpointError(
                f"{path} is not written: {code} computes with {name} = {value!r}, this model "
                f"with {getattr(config, name)!r}. " + how_to_accept(name, value)
            )


def expressed(
    checkpoint: LoadedCheckpoint, conversion: Conversion, format: str
) -> LoadedCheckpoint:
    """An equivalent model that a format can express, with the layout of its file: the one that it
    was read with, if that was of this format.
    """
    if checkpoint.layout.get("format") == format:
        return checkpoint
    arrays = patterns.union(checkpoint.params, checkpoint.variables)
    config, arrays = conversion.expressed(checkpoint.model_config, arrays)
    layout = {"format": format, "dtypes": {}, "renamed": {}, "constants": None}
    layout |= conversion.layout(config)
    return dataclasses.replace(
        checkpoint, model_config=config, params=arrays, variables={}, layout=layout
    )


def arrays(
    checkpoint: LoadedCheckpoint, conversion: Conversion
) -> Iterator[tuple[str, np.ndarray]]:
    """A file's tensors, in the layout of `expressed`.

    Raises:
      CheckpointError: the format has no place for a parameter; before the first tensor.
    """
    layout = checkpoint.layout
    table = conversion.rules(checkpoint.model_config, layout)
    named = translation.to_theirs(
        table,
        patterns.union(checkpoint.params, checkpoint.variables),
        dtypes=layout["dtypes"],
        constants=layout.get("constants"),
    )
    renamed, reshaped = layout.get("renamed", {}), layout.get("reshaped", {})
    return ((renamed.get(n, n), x.reshape(reshaped.get(n, x.shape))) for n, x in named)


def planned(
    checkpoint: LoadedCheckpoint, conversion: Conversion, extra: Beside = NOTHING
) -> dict[str, LazyArray]:
    """All tensors of a file, by name, without the values of parameters; arguments as of `write_safetensors`."""
    layout = checkpoint.layout
    tensors = translation.planned(
        conversion.rules(checkpoint.model_config, layout),
        patterns.union(checkpoint.params, checkpoint.variables),
        dtypes=layout["dtypes"],
        constants=layout.get("constants"),
    )
    renamed = layout.get("renamed", {})
    own = {renamed.get(name, name): tensor for name, tensor in tensors.items()}
    return own | translation.planned(extra.rules, extra.params)


def write_safetensors(
    checkpoint: LoadedCheckpoint,
    conversion: Conversion,
    path: epath.PathLike,
    metadata: Mapping[str, str],
    extra: Beside = NOTHING,
) -> None:
    """Writes a model as a `.safetensors` file, a tensor at a time.

    Args:
      extra: what else the file gets.

    Raises:
      CheckpointError: the format has no place for a parameter, or the file cannot be written.
    """
    tensors = itertools.chain(
        arrays(checkpoint, conversion), translation.to_theirs(extra.rules, extra.params)
    )
    specs = {
        name: (tensor.shape, tensor.dtype)
        for name, tensor in planned(checkpoint, conversion, extra).items()
    }
    safetensors.write(path, tensors, specs, {"format": "pt"} | dict(metadata))


def finite(name: str, tensor: LazyArray) -> LazyArray:
    """The tensor, which raises `CheckpointError` when it is read and has NaNs or infinities."""

    def read() -> np.ndarray:
        array = tensor.read()
        check_finite(name, array, ". To read it all the same, set allow_nonfinite=True")
        return array

    return LazyArray(tensor.shape, tensor.dtype, read)


def check_finite(name: str, array: np.ndarray, advice: str = "") -> None:
    """Raises `CheckpointError` if an array of this name has NaNs or infinities."""
    # No boolean array beside a large one: minimum and maximum are NaN if anything is.
    if array.size and not np.isfinite([array.min(), array.max()]).all():
        bad = array.size - np.count_nonzero(np.isfinite(array))
        raise CheckpointError(
            f"{name}: {bad} of {array.size} numbers are not finite (NaN or infinity): the file is damaged, or its "
            f"training diverged{advice}"
        )


def divided(arrays: dict, like: Weights) -> Weights:
    """The way back from `patterns.union`."""
    by_name = patterns.named(arrays)
    return Weights(*(patterns.map_named(lambda name, _: by_name[name], tree) for tree in like))


def _rounded(tensor: LazyArray) -> LazyArray:
    dtype = np.dtype(np.float32)
    return LazyArray(tensor.shape, dtype, lambda: tensor.read().astype(dtype))


def _squeezed(tensor: LazyArray) -> LazyArray:
    shape = tuple(size for size in tensor.shape if size > 1)
    return LazyArray(shape, tensor.dtype, lambda: tensor.read().reshape(shape))
