"""Our own checkpoint directories as one format among others, written as step 0 of a run."""

import dataclasses
import math

import jax
import numpy as np
from etils import epath

from vit_jax.base import patterns, schema
from vit_jax.checkpoints import reading, saving
from vit_jax.checkpoints.reading import CheckpointError
from vit_jax.config import config_class, default_config
from vit_jax.interchange.formats import Foreign, Preprocessing, configure, model_name
from vit_jax.interchange.rules import Lazy
from vit_jax.models import registry

NAME = "orbax"
CANNOT_TELL = ()
# Where a description keeps what is needed to write the format that the weights came from.
LAYOUT = "layout"


def recognises(path) -> bool:
    """Whether it is a run's workdir, its checkpoints folder or one checkpoint."""
    path = epath.Path(path)
    folders = [folder for folder in (path, path / reading.FOLDER) if folder.is_dir()]
    entries = [entry.name for folder in folders for entry in folder.iterdir()]
    return any(name == "description" or name.isdigit() for name in entries)


def read(path, **overrides) -> Foreign:
    """See `formats.read`; the averaged parameters, if the run kept an average."""
    folder = reading.find(path)
    description = reading.read_description(folder)
    stored = reading.stored_model_config(description)
    config = configure(type(stored), dataclasses.asdict(stored), overrides)
    like = registry.abstract(config)[1]
    if like != registry.abstract(stored)[1]:
        raise CheckpointError(
            f"{path} holds another model than one with {overrides}: it is {stored}"
        )

    params = patterns.map_named(
        lambda name, leaf: Lazy(
            leaf.shape,
            np.dtype(leaf.dtype),
            lambda: reading.load_param(folder, description, like, name),
        ),
        like,
    )
    data = description["config"]["data"]
    preprocessing = {field.name: data[field.name] for field in dataclasses.fields(Preprocessing)}
    return Foreign(
        config,
        params,
        tuple(description["classes"]),
        Preprocessing(**preprocessing),
        description.get(LAYOUT, {}),
    )


def write(foreign: Foreign, path) -> None:
    """Writes a directory for `predict`, `evaluate` and `init_from`; unnamed classes are numbers.

    Raises:
      CheckpointError: the directory holds something already, or cannot be written.
    """
    path = epath.Path(path)
    if path.exists() and (path.is_file() or any(path.iterdir())):
        raise CheckpointError(f"{path} is not written: something is there already")
    config = default_config()
    config.model.name = model_name(foreign.model_config)
    if foreign.preprocessing:
        config.data.update(dataclasses.asdict(foreign.preprocessing))
    config.data.image_size = foreign.model_config.image_size
    config = schema.typed(config_class(), config)
    classes = foreign.classes or tuple(map(str, range(foreign.model_config.num_classes)))
    description = reading.describe(config, foreign.model_config, classes, examples=0)
    largest = max(math.prod(leaf.shape) for leaf in jax.tree.leaves(foreign.params))
    # One large array at a time is under way, and no compressed copy of it; Orbax refuses what is
    # larger than its buffer.
    writing = {"save_concurrent_gb": largest * 4 // 10**9 + 1, "use_compression": False}
    checkpoints = saving.Checkpoints(path, config.checkpoint, **writing)
    host, marks = jax.local_devices(backend="cpu")[0], []

    def hold(leaf) -> jax.Array:
        array = np.asarray(leaf)
        marks.append(reading.host_mark(array))
        # Of NumPy's own arrays Orbax makes copies before it writes.
        return jax.device_put(array, host)

    try:
        parts = {"params": jax.tree.map(hold, foreign.params)}
        description |= {"seconds": 0.0, LAYOUT: foreign.layout}
        checkpoints.save_now(0, parts, description, {"params": np.asarray(marks)})
    finally:
        checkpoints.close()
