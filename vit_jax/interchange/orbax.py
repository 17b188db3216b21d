"""Our own checkpoint directories as one format among others, written as step 0 of a run."""

import dataclasses
import functools

import jax
import numpy as np
from etils import epath

from vit_jax import checkpoint, patterns
from vit_jax.checkpoint import CheckpointError
from vit_jax.config import default_config
from vit_jax.interchange.formats import Foreign, Preprocessing, configure, model_name
from vit_jax.interchange.rules import Lazy
from vit_jax.models import registry

NAME = "orbax"
CANNOT_TELL = ()
# Where a description keeps what is needed to write the format that the weights came from.
LAYOUT = "layout"


@dataclasses.dataclass
class _State:
    """As much of a training state as a model is."""

    params: dict


def recognises(path) -> bool:
    """Whether it is a run's workdir, its checkpoints folder or one checkpoint."""
    path = epath.Path(path)
    folders = [folder for folder in (path, path / checkpoint.FOLDER) if folder.is_dir()]
    entries = [entry.name for folder in folders for entry in folder.iterdir()]
    return any(name == "description" or name.isdigit() for name in entries)


def read(path, **overrides) -> Foreign:
    """See `formats.read`; the averaged parameters, if the run kept an average."""
    description = checkpoint.read_description(checkpoint.find(path))
    stored = checkpoint.stored_model_config(description)
    config = configure(type(stored), dataclasses.asdict(stored), overrides)
    like = registry.abstract(config)[1]
    if like != registry.abstract(stored)[1]:
        raise CheckpointError(
            f"{path} holds another model than one with {overrides}: it is {stored}"
        )

    @functools.cache
    def whole() -> dict:
        # At once, since that is what the fingerprints prove whole.
        params, _ = checkpoint.load_params(path)
        return dict(zip(patterns.names(params), jax.tree.leaves(params), strict=True))

    params = patterns.map_named(
        lambda n, x: Lazy(x.shape, np.dtype(x.dtype), lambda: whole()[n]), like
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
    classes = foreign.classes or tuple(map(str, range(foreign.model_config.num_classes)))
    description = checkpoint.describe(config, foreign.model_config, classes, examples=0)
    checkpoints = checkpoint.Checkpoints(path, config.checkpoint)
    try:
        state = _State(jax.tree.map(np.asarray, foreign.params))
        checkpoints.save_now(0, state, description | {"seconds": 0.0, LAYOUT: foreign.layout})
    finally:
        checkpoints.close()
