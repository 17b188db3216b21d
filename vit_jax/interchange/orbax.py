"""Our own checkpoint directories as one format among others, written as step 0 of a run."""

import dataclasses
import functools
import math

import jax
import numpy as np
from absl import logging
from etils import epath

from vit_jax import objectives
from vit_jax.base import patterns, schema
from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.checkpoints import descriptions, reading, saving
from vit_jax.checkpoints.lora import BASE, adapters_in, saved_like
from vit_jax.checkpoints.objective_weights import module_parts
from vit_jax.compute import digests
from vit_jax.config import Config, config_class, default_config
from vit_jax.data.augmentation import augment
from vit_jax.data.labels import imagenet
from vit_jax.interchange import answers, file_header, lora, saved_objectives, tensors_by_name
from vit_jax.interchange.checkpoint_file import CheckpointFile
from vit_jax.interchange.formats import (
    LoadedCheckpoint,
    Preprocessing,
    ReadOptions,
    SavedRun,
    Unmerged,
    configure,
    probabilities_of,
)
from vit_jax.models import naming, registry
from vit_jax.models.lora import ADAPTERS
from vit_jax.objectives.contract import Objective, SavedObjective

NAME = "orbax"
# The key under which a description keeps what is needed to write the format that the weights came
# from.
LAYOUT, ASSUMED = "layout", "assumed"
# A model of at most this many bytes is read in one go: one array of it takes as long.
_AT_ONCE = 2**26


def recognises(file: CheckpointFile) -> bool:
    """Whether it is a run's workdir, its checkpoints folder or one checkpoint."""
    path = file.path
    folders = [folder for folder in (path, path / reading.FOLDER) if folder.is_dir()]
    entries = [entry.name for folder in folders for entry in folder.iterdir()]
    return any(name == "description" or name.isdigit() for name in entries)


def read(file: CheckpointFile, request: ReadOptions) -> LoadedCheckpoint:
    """The model of a run's checkpoint; the averaged weights, if the run kept an average."""
    folder = reading.find_checkpoint(file.path)
    description = reading.read_description(folder)
    stored = descriptions.stored_model_config(description)
    config = configure(type(stored), vars(stored), request.overrides)
    like = registry.abstract_weights(config)[1]
    if like != registry.abstract_weights(stored)[1]:
        raise CheckpointError(
            f"{file.path} holds another model than one with {request.overrides}: it is {stored}"
        )

    def arrays(part: str, tree: dict) -> dict:
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        at_once = size <= _AT_ONCE and jax.process_count() == 1

        @functools.cache
        def whole() -> dict[str, np.ndarray]:
            return patterns.named(reading.read_parts(folder, {part: tree}, description)[part])

        def lazy(name: str, leaf) -> LazyArray:
            def read() -> np.ndarray:
                if at_once:
                    return whole()[name].copy()
                return reading.read_array(folder, part, tree, name)

            array = LazyArray(leaf.shape, np.dtype(leaf.dtype), read)
            return (
                array
                if request.allow_nonfinite
                else tensors_by_name.finite(f"{folder}: {name}", array)
            )

        return patterns.map_named(lazy, tree)

    parts = descriptions.parts_to_use(description)
    params, variables = map(arrays, parts, saved_like(description, like))
    unmerged = None
    if adapters_in(description):
        also = patterns.names({name: tree for name, tree in params.items() if name != ADAPTERS})
        unmerged = Unmerged(params[ADAPTERS], tuple(also), description[BASE]["path"])
        params = lora.whole_model(folder, description, params, like, stored)
    renamed = description.get(LAYOUT, {}).get("renamed", {})
    if "storage_tokens" in renamed.values() and not config.knows_positions:
        logging.warning(
            "%s was converted from a file of DINOv3 by an earlier version, which lost its rotary positions: convert "
            "that file again", folder,
        )  # fmt: skip
    # An earlier version's lacks fields that came later: they are at their defaults.
    filled = schema.fill(default_config(), description["config"])

    def read_modules() -> registry.Weights:
        names = module_parts(description)
        like = reading.abstract_parts(folder, names)
        return registry.Weights(*(arrays(name, like[name]) for name in names))

    kind, options = objectives.find_objective(filled.objective)
    owns = kind.make_modules is not Objective.make_modules
    return LoadedCheckpoint(
        config,
        params,
        tuple(description["classes"]),
        file_header.preprocessing_in(filled.data),
        description.get(LAYOUT, {}),
        variables,
        probabilities=objectives.probabilities(filled.objective),
        settings=answers.settings_of(schema.typed(config_class(filled), filled)),
        run=SavedRun(folder, description),
        called=filled.model.name,
        assumed=tuple(n for n in description.get(ASSUMED, ()) if n not in request.overrides),
        adapters=unmerged,
        objective=SavedObjective(kind, dataclasses.asdict(options), read_modules) if owns else None,
    )


def described(checkpoint: LoadedCheckpoint) -> tuple[Config, dict]:
    """The config of a run that would have given this model, as far as that is known, and what a
    checkpoint of it would say; unnamed classes are ImageNet's, or numbers.
    """
    config = default_config()
    config.model.name = naming.nearest_name(checkpoint.model_config, checkpoint.called)
    # Where it is not known how images are normalised, users of the model have to say it.
    unknown = Preprocessing(checkpoint.model_config.image_size, mean=(), std=())
    config.data.update(dataclasses.asdict(checkpoint.preprocessing or unknown))
    config.data.image_size = checkpoint.model_config.image_size
    config.data.channels = checkpoint.model_config.channels
    if probabilities_of(checkpoint) == "sigmoid":
        config.objective.loss = "sigmoid"
    config.update_from_flattened_dict(checkpoint.settings)
    config = schema.typed(config_class(config), config)
    if checkpoint.preprocessing:
        config = dataclasses.replace(config, data=augment.with_channels(config.data))
    classes = checkpoint.classes or imagenet.names_if_unnamed(checkpoint.model_config.num_classes)
    return config, descriptions.describe(config, checkpoint.model_config, classes, examples=0)


def check_unused(path: epath.Path) -> None:
    """Raises `CheckpointError` if something is there already."""
    if path.exists() and (path.is_file() or any(path.iterdir())):
        raise CheckpointError(f"{path} is not written: something is there already")


def write(checkpoint: LoadedCheckpoint, path: epath.PathLike) -> None:
    """Writes a directory for `predict`, `evaluate` and `init_from`; unnamed classes are numbers.

    Raises:
      CheckpointError: the directory holds something already, or cannot be written.
    """
    path = epath.Path(path)
    check_unused(path)
    if saved := saved_objectives.find_saved(checkpoint):
        logging.warning(
            "%s: what the objective %s owns is not written, since a checkpoint of ours has it in a run's training "
            "state only: only the model is; to keep it, train from the source with --config.init_from",
            path, saved.kind.__name__,
        )  # fmt: skip
    config, description = described(checkpoint)
    imagenet.log_if_unnamed(
        checkpoint.classes, checkpoint.model_config.num_classes, "the checkpoint"
    )
    leaves = jax.tree.leaves((checkpoint.params, checkpoint.variables))
    largest = max(math.prod(leaf.shape) for leaf in leaves)
    # One large array at a time is under way, and no compressed copy of it; Orbax refuses what is
    # larger than its buffer.
    writing = {"save_concurrent_gb": largest * 4 // 10**9 + 1, "use_compression": False}
    checkpoints = saving.Checkpoints(path, config.checkpoint, **writing)
    host, marks = jax.local_devices(backend="cpu")[0], []

    def hold(leaf) -> jax.Array:
        array = np.asarray(leaf)
        marks.append(digests.host_mark(array))
        # Orbax would copy NumPy arrays before it writes them.
        return jax.device_put(array, host)

    try:
        parts, saved_marks = {}, {}
        trees = (checkpoint.params, checkpoint.variables)
        for name, tree in zip(descriptions.parts_to_use(description), trees, strict=True):
            if jax.tree.leaves(tree):
                parts[name] = jax.tree.map(hold, tree)
                saved_marks[name], marks = np.stack(marks), []
        unnamed = (
            () if checkpoint.classes or not checkpoint.model_config.num_classes else ("classes",)
        )
        assumed = list(dict.fromkeys((*checkpoint.assumed, *unnamed)))
        description |= {"seconds": 0.0, LAYOUT: checkpoint.layout, ASSUMED: assumed}
        checkpoints.save_now(0, parts, description, saved_marks)
    finally:
        checkpoints.close()
