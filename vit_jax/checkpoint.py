"""Checkpoints of a run: Orbax directories that explain themselves.

WORKDIR/checkpoints/STEP holds `state` (the whole training state) and `description` (JSON: config,
model, label names, preprocessing, versions), so that evaluating, predicting and fine-tuning need
nothing but the directory. Other people's formats are in `interchange`.
"""

import dataclasses
import importlib.metadata
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import parallel, patterns, schema
from vit_jax.config import default_config
from vit_jax.errors import UserError
from vit_jax.models import registry

FOLDER = "checkpoints"
DAMAGED = "damaged"
_FORMAT = 1


class CheckpointError(UserError):
    """A checkpoint cannot be found, read or written."""


@dataclasses.dataclass
class Run:
    """A trained model and what is needed to use it.

    Attributes:
      model: with its parameters loaded (the averaged ones, if the run kept an average).
      model_config: the family's config.
      config: the run's.
      classes: label names, in the order of the logits.
      step: steps trained.
      directory: of the checkpoint.
    """

    model: nnx.Module
    model_config: object
    config: ConfigDict
    classes: tuple[str, ...]
    step: int
    directory: epath.Path


class Checkpoints:
    """Saves a run's states asynchronously and finds the last good one again."""

    def __init__(self, workdir, config: ConfigDict):
        """config: the section `checkpoint`."""
        self._folder = epath.Path(workdir) / FOLDER
        self._config = config
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._config.keep,
            keep_period=self._config.keep_every or None,
            enable_async_checkpointing=True,
        )
        return ocp.CheckpointManager(
            self._folder, options=options, item_names=("state", "description")
        )

    def steps(self) -> list[int]:
        """The steps that have a committed checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state, description: dict) -> None:
        """Starts to save; the write goes on beside training. Raises `CheckpointError` if an earlier
        write failed.
        """
        if step in self.steps():
            return
        try:
            self._manager.check_for_errors()
            tree = _fields(state)
            tree |= {"fingerprint": fingerprint(tree)}
            items = ocp.args.Composite(
                state=ocp.args.PyTreeSave(tree), description=ocp.args.JsonSave(description)
            )
            self._manager.save(step, args=items, force=True)
        except (OSError, ValueError) as error:
            raise self._write_error(error) from error

    def wait(self) -> None:
        """Returns when everything is on disk. Raises `CheckpointError` if it could not be written."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except (OSError, ValueError) as error:
            raise self._write_error(error) from error

    def close(self) -> None:
        """Ends the threads that write."""
        self._manager.close()

    def description(self, step: int) -> dict:
        """The description of the checkpoint of `step`."""
        return read_description(self._folder / str(step))

    def restore_latest(self, like, before_restore=lambda description: None):
        """The newest state that can be read whole.

        A damaged checkpoint is reported, moved to WORKDIR/checkpoints/damaged-STEP, and the one
        before is tried.

        Args:
          like: shapes, dtypes and shardings of the state.
          before_restore: called with the description of each candidate; what it raises goes
            through.

        Returns:
          (step, state), or `None` where there is no checkpoint at all.

        Raises:
          CheckpointError: there are checkpoints, and none is good. They stay where they are.
        """
        reasons = {}
        for step in reversed(self.steps()):
            folder = self._folder / str(step)
            try:
                description = read_description(folder)
            except CheckpointError as error:
                reasons[step] = error
                continue
            before_restore(description)
            try:
                state = like.replace(**_read(folder, _fields(like)))
            except CheckpointError as error:
                reasons[step] = error
                continue
            self._set_aside(reasons, step)
            return step, state
        if reasons:
            told = "\n".join(f"  step {step}: {reason}" for step, reason in reasons.items())
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be read; nothing was changed there:\n{told}"
            )
        return None

    def _set_aside(self, reasons: dict[int, Exception], good: int) -> None:
        for step, reason in reasons.items():
            aside = self._folder.parent / f"{DAMAGED}_{FOLDER}" / f"{step}-{int(time.time())}"
            logging.warning(
                "checkpoint of step %d is damaged (%s); going back to step %d, moved it to %s",
                step,
                reason,
                good,
                aside,
            )
            if jax.process_index() == 0:
                aside.parent.mkdir(exist_ok=True)
                (self._folder / str(step)).rename(aside)
        if reasons:
            self._manager.close()
            self._manager = self._open()

    def _write_error(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"cannot write a checkpoint to {self._folder}: {error}. "
            "Free or enlarge the disk and start again: the last good checkpoint is kept"
        )


def describe(config: ConfigDict, model_config, classes: tuple[str, ...], examples: int) -> dict:
    """What a checkpoint says of itself, as JSON."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "vit_jax")
    return {
        "format": _FORMAT,
        "config": config.to_dict(),
        "model": {"name": config.model.name, **dataclasses.asdict(model_config)},
        "classes": list(classes),
        "training_examples": examples,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def find(path) -> epath.Path:
    """The directory of one checkpoint: `path` itself, or the newest below a run's workdir or its
    `checkpoints`.

    Raises:
      CheckpointError: there is none.
    """
    path = epath.Path(path).expanduser().resolve()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    for folder in (path, path / FOLDER):
        if (folder / "description").exists():
            return folder
        steps = (
            [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
        )
        if steps:
            return folder / str(max(steps))
    raise CheckpointError(
        f"{path} holds no checkpoint: give a run's workdir, its '{FOLDER}' folder, or one step below it"
    )


def read_description(folder: epath.Path) -> dict:
    """The JSON that a checkpoint says of itself."""
    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
            return checkpointer.restore(epath.Path(folder) / "description")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is damaged or no checkpoint: its description cannot be read ({error})"
        ) from error


def load_params(path, like: dict | None = None) -> tuple[dict, dict]:
    """Parameters of a run (the averaged ones, if it kept an average) and the checkpoint's
    description.

    Args:
      path: see `find`.
      like: shapes, dtypes and shardings to restore to; by default whole NumPy arrays.
    """
    folder = find(path)
    description = read_description(folder)
    if like is None:
        like = registry.abstract(stored_model_config(description))[1]
    field = "ema" if description["config"]["optim"]["ema"] else "params"
    return _read(folder, {field: like})[field], description


def load_run(path, mesh: jax.sharding.Mesh | None = None) -> Run:
    """A trained model from its directory alone.

    Args:
      path: a run's workdir, its checkpoints folder, or one checkpoint.
      mesh: where the parameters go; by default whole on every device.
    """
    directory = find(path)
    description = read_description(directory)
    model_config = stored_model_config(description)
    definition, like = registry.abstract(model_config)
    mesh = mesh or parallel.replica_mesh()
    whole = parallel.replicated(mesh)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), like)
    params, _ = load_params(directory, like)
    return Run(
        model=nnx.merge(definition, params),
        model_config=model_config,
        config=schema.fill(default_config(), description["config"]),
        classes=tuple(description["classes"]),
        step=int(directory.name),
        directory=directory,
    )


def begun(workdir) -> dict | None:
    """The description of a run's newest checkpoint that has one to read; `None` where no run was
    begun.
    """
    folder = epath.Path(workdir).expanduser() / FOLDER
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    for step in sorted(steps, reverse=True):
        try:
            return read_description(folder / str(step))
        except CheckpointError as error:
            logging.warning("%s", error)
    return None


def stored_model_config(description: dict):
    """The family's config of the model that a checkpoint holds."""
    fields = dict(description["model"])
    return registry.model_config(fields.pop("name"), **fields)


@jax.jit
def fingerprint(parts: dict) -> dict[str, jax.Array]:
    """For each part of a state, uint32 (arrays,): the sum of each array's bits modulo 2³², which
    neither sharding nor devices change. One program, so that it costs one pass and one start.
    """

    def of(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32)

    return {name: jnp.stack([of(x) for x in jax.tree.leaves(part)]) for name, part in parts.items()}


def _fields(state) -> dict:
    """The parts of a state that hold arrays, by name."""
    parts = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


def _read(folder: epath.Path, like: dict) -> dict:
    """Some parts of a saved state, proven equal to what was saved.

    Raises:
      CheckpointError: a file is missing or cut short, an array has another shape, or its bits have
        changed.
    """
    marks = {
        name: jax.ShapeDtypeStruct((len(jax.tree.leaves(part)),), jnp.uint32)
        for name, part in like.items()
    }
    tree = like | {"fingerprint": marks}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            args = ocp.args.PyTreeRestore(
                item=tree, restore_args=jax.tree.map(_restore_args, tree), partial_restore=True
            )
            restored = checkpointer.restore(folder / "state", args=args)
    # Orbax and TensorStore report damage by exceptions of any type, Exception itself among them.
    except Exception as error:
        raise CheckpointError(f"{folder} is damaged: {str(error).splitlines()[0]}") from error
    found = jax.device_get(fingerprint({name: restored[name] for name in like}))
    for name in like:
        changed = found[name] != np.asarray(restored["fingerprint"][name])
        if changed.any():
            bad = [n for n, c in zip(patterns.names(restored[name]), changed, strict=True) if c]
            raise CheckpointError(
                f"{folder} is damaged: the bits of {name}/{bad[0]} are not those that were saved"
            )
    return {name: restored[name] for name in like}


def _restore_args(like) -> ocp.RestoreArgs:
    if like.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=like.sharding, global_shape=like.shape, dtype=like.dtype)
