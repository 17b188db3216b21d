"""Checkpoints of a run: Orbax directories that explain themselves.

WORKDIR/checkpoints/STEP holds `state` (the whole training state) and `description` (JSON: config,
model, label names, preprocessing, versions), so that evaluating, predicting and fine-tuning need
nothing but the directory. Other people's formats are in `interchange`.
"""

import dataclasses
import importlib.metadata
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import distributed, parallel, paths, patterns, schema
from vit_jax.config import default_config
from vit_jax.errors import UserError
from vit_jax.models import registry

FOLDER = "checkpoints"
DAMAGED = "damaged"
_FORMAT = 1
_RETRY_SECONDS = 5
# In a bucket Orbax writes this when all else of a checkpoint is there.
_COMMITTED = "commit_success.txt"


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
    """Saves a run's states beside training and finds the last good one again.

    All processes of a run call the same methods in the same order, and all of them are told the
    same. A state is there when its directory has got its name, which Orbax gives it when everything
    is written.
    """

    def __init__(
        self,
        workdir,
        config: ConfigDict,
        wait_minutes: float = distributed.WAIT_MINUTES,
        **writing,
    ):
        """Args: config: the section `checkpoint`; wait_minutes: how long processes wait for each
        other's writes; writing: options of Orbax's handler of the state.
        """
        self._folder = paths.locate(workdir) / FOLDER
        self._config, self._wait = config, wait_minutes
        self._newest: int | None = None  # step of the newest state that is or is being saved
        self._writing = False
        self._failures = 0
        # Said in full, so that Orbax waits by the coordination service, whose waits end.
        everyone = set(range(distributed.count())) if distributed.count() > 1 else None
        hosts = ocp.options.MultiprocessingOptions(active_processes=everyone)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                composite_options=ocp.CompositeOptions(multiprocessing_options=hosts),
                state=ocp.PyTreeCheckpointHandler(multiprocessing_options=hosts, **writing),
                description=ocp.JsonCheckpointHandler(multiprocessing_options=hosts),
            ),
            async_options=ocp.options.AsyncOptions(timeout_secs=round(wait_minutes * 60)),
            multiprocessing_options=hosts,
        )
        if distributed.index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._delete(self._unfinished)

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, oldest first."""
        told = json.dumps(_steps(self._folder)) if _first() else ""
        return json.loads(distributed.agree("steps", told, self._wait))

    def save(self, step: int, state, description: dict, marks: dict | None = None) -> None:
        """Starts to save; the write goes on beside training.

        A save that fails is said, and the next one tried as if nothing had happened; the last good
        checkpoint stays.

        Args: marks: the state's `fingerprint`, where it is known already.

        Raises:
          CheckpointError: `config.max_failures` saves in a row have failed.
        """
        if step == self._newest:
            return
        self._settle()
        self._newest, self._writing = step, True
        tree = _fields(state)
        tree |= {"fingerprint": marks or fingerprint(tree)}
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(tree), description=ocp.args.JsonSave(description)
        )
        failure = _failure_of(
            lambda: self._orbax.save(self._folder / str(step), args=items, force=True)
        )
        failures = distributed.gather("start of a save", failure, self._wait)
        if any(failures):
            self._end_of_save(failures)

    def save_now(self, step: int, state, description: dict, marks: dict | None = None) -> None:
        """Saves and returns when everything is on disk; a save that fails is tried again.

        Raises:
          CheckpointError: see `save`.
        """
        while True:
            self.save(step, state, description, marks)
            self._settle()
            if self._newest == step:
                return
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Ends the threads that write, when they have written."""
        # An error that ends a run of several processes may leave a write that others never finish.
        if distributed.count() == 1 or not self._writing:
            _failure_of(self._orbax.close)

    def restore_latest(self, like, before_restore=lambda description: None):
        """The newest state that can be read whole.

        A damaged checkpoint is reported, moved to WORKDIR/damaged_checkpoints/STEP-TIME, and the
        one before is tried.

        Args:
          like: shapes, dtypes and shardings of the state.
          before_restore: called with the description of each candidate; what it raises goes
            through.

        Returns:
          (step, state), or `None` where there is no checkpoint at all.

        Raises:
          CheckpointError: there are checkpoints, and none is good. They stay where they are.
        """
        self._settle()
        reasons = {}
        for step in reversed(self.steps()):
            folder = self._folder / str(step)
            try:
                before_restore(_everywhere(lambda folder=folder: read_description(folder)))
                state = like.replace(**_read(folder, _fields(like)))
            except CheckpointError as error:
                reasons[step] = error
                continue
            self._set_aside(reasons, step)
            self._newest = step
            return step, state
        if reasons:
            told = "\n".join(f"  step {step}: {reason}" for step, reason in reasons.items())
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be read; nothing was changed there:\n{told}"
            )
        return None

    def _settle(self) -> None:
        """Waits for the write under way and finds out how it ended."""
        if self._writing:
            failure = _failure_of(self._orbax.wait_until_finished)
            self._end_of_save(distributed.gather("end of a save", failure, self._wait))

    def _end_of_save(self, failures: list[str]) -> None:
        """Args: what went wrong in each process, '' for nothing."""
        step, self._writing = self._newest, False
        if not any(failures):
            self._failures = 0
            if _first():
                self._delete(self._superfluous)
            return
        self._newest, self._failures = None, self._failures + 1
        _failure_of(self._orbax.wait_until_finished)  # of the processes where all seemed well
        distributed.barrier("failed save", self._wait)
        if _first():
            self._delete(self._unfinished)
        several = len(failures) > 1
        told = "; ".join(
            f"process {process}: {failure}" if several else failure
            for process, failure in enumerate(failures)
            if failure
        )
        told = f"cannot write the checkpoint of step {step} to {self._folder}: {told}"
        most = self._config.max_failures
        if self._failures >= most:
            raise CheckpointError(
                f"{told}. These were {most} failures in a row (config.checkpoint.max_failures). "
                "Free or enlarge the disk and start again: the last good checkpoint is kept"
            )
        if _first():
            logging.error(
                "%s. Training goes on, the last good checkpoint is kept, and the next save is tried: "
                "failure %d of %d in a row", told, self._failures, most,
            )  # fmt: skip

    def _superfluous(self) -> list[epath.Path]:
        steps, keep_every = _steps(self._folder), self._config.keep_every
        old = steps[: -self._config.keep]
        old = [step for step in old if not keep_every or step % keep_every]
        return [self._folder / str(step) for step in old]

    def _unfinished(self) -> list[epath.Path]:
        if not self._folder.is_dir():  # In a bucket a folder exists when something is in it.
            return []
        whole = {str(step) for step in _steps(self._folder)}
        return [
            path
            for path in self._folder.iterdir()
            if ocp.path.step.TMP_DIR_SUFFIX in path.name
            or (path.name.isdigit() and path.name not in whole)
        ]

    def _delete(self, find: Callable[[], list[epath.Path]]) -> None:
        failure = _failure_of(lambda: [folder.rmtree() for folder in find()])
        if failure:
            logging.warning("cannot delete old checkpoints in %s: %s", self._folder, failure)

    def _set_aside(self, reasons: dict[int, Exception], good: int) -> None:
        for step, reason in reasons.items() if _first() else ():
            folder = self._folder / str(step)
            aside = self._folder.parent / f"{DAMAGED}_{FOLDER}" / f"{step}-{int(time.time())}"
            in_bucket = paths.in_bucket(folder)
            done = "marked it as unfinished" if in_bucket else f"moved it to {aside}"
            told = "checkpoint of step %d is damaged (%s); going back to step %d, %s"
            logging.warning(told, step, reason, good, done)
            if in_bucket:  # A folder cannot be renamed there, only each of its files.
                (folder / _COMMITTED).unlink()
            else:
                aside.parent.mkdir(exist_ok=True)
                folder.rename(aside)
        distributed.barrier("damaged checkpoints", self._wait)


def _first() -> bool:
    return distributed.index() == 0


def _failure_of(action: Callable[[], None]) -> str:
    """How an action on storage failed, in a line; '' if it did not."""
    try:
        action()
    # Storage fails as OSError, as TensorStore's ValueError, and as JAX's and Orbax's own errors of
    # a wait that has come to its end.
    except (OSError, ValueError, RuntimeError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return ""


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
    path = paths.locate(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    for folder in (path, path / FOLDER):
        if (folder / "description").exists():
            return folder
        if steps := _steps(folder):
            return folder / str(steps[-1])
    raise CheckpointError(
        f"{path} holds no checkpoint: give a run's workdir, its '{FOLDER}' folder, or one step below it"
    )


def read_description(folder: epath.Path) -> dict:
    """The JSON that a checkpoint says of itself."""
    handler, args = ocp.JsonCheckpointHandler(), ocp.args.JsonRestore()
    try:
        return handler.restore(epath.Path(folder) / "description", args=args)
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
    field = _field_to_use(description)
    return _read(folder, {field: like})[field], description


def load_param(folder: epath.Path, description: dict, like: dict, name: str) -> np.ndarray:
    """One parameter of those that `load_params` gives, read alone.

    Args:
      folder, description: of a checkpoint.
      like: shapes and dtypes of all its parameters.
      name: as in `patterns.names(like)`.
    """
    field, index = _field_to_use(description), patterns.names(like).index(name)
    part = jax.tree.leaves(like)[index]
    for key in reversed(name.split("/")):
        part = {key: part}
    marks = jax.ShapeDtypeStruct((len(jax.tree.leaves(like)),), jnp.uint32)
    restored = _restore(folder, {field: part, "fingerprint": {field: marks}})
    (array,) = jax.tree.leaves(restored[field])
    if host_mark(array) != restored["fingerprint"][field][index]:
        raise _changed(folder, field, name)
    return array


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
    folder = paths.locate(workdir) / FOLDER
    for step in reversed(_steps(folder)):
        try:
            return read_description(folder / str(step))
        except CheckpointError as error:
            logging.warning("%s", error)
    return None


def _steps(folder: epath.Path) -> list[int]:
    """The steps saved whole, oldest first. In a bucket a folder is seen while it is written."""
    if not folder.is_dir():
        return []
    entries = [entry for entry in folder.iterdir() if entry.name.isdigit()]
    return sorted(int(entry.name) for entry in entries if ocp.utils.is_checkpoint_finalized(entry))


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


def host_mark(array: np.ndarray) -> np.uint32:
    """An array's number in `fingerprint`, computed without a device."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = array.view(f"uint{8 * array.dtype.itemsize}")
    return np.sum(array, dtype=np.uint32)


def _field_to_use(description: dict) -> str:
    return "ema" if description["config"]["optim"]["ema"] else "params"


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
    restored = _everywhere(lambda: _restore(folder, like | {"fingerprint": marks}))
    found = jax.device_get(fingerprint({name: restored[name] for name in like}))
    for name in like:
        changed = found[name] != np.asarray(restored["fingerprint"][name])
        if changed.any():
            bad = [n for n, c in zip(patterns.names(restored[name]), changed, strict=True) if c]
            raise _changed(folder, name, bad[0])
    return {name: restored[name] for name in like}


def _restore(folder: epath.Path, tree: dict) -> dict:
    """What is saved under the names of `tree`, unproven."""
    args = ocp.args.PyTreeRestore(
        item=tree, restore_args=jax.tree.map(_restore_args, tree), partial_restore=True
    )
    try:
        return ocp.PyTreeCheckpointHandler().restore(folder / "state", args=args)
    # Orbax and TensorStore report damage by exceptions of any type, Exception itself among them.
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder} is damaged: {why}") from error


def _changed(folder: epath.Path, field: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is damaged: the bits of {field}/{name} are not those that were saved"
    )


def _everywhere(read: Callable[[], dict]) -> dict:
    """What `read` gives in each process, once it has succeeded in all: no process may go on to
    compute with others that met damage in their part.

    Raises:
      CheckpointError: it failed somewhere; the same in all processes.
    """
    result, failure = {}, ""
    try:
        result = read()
    except CheckpointError as error:
        failure = str(error)
    failures = [told for told in distributed.gather("read a checkpoint", failure) if told]
    if failures:
        raise CheckpointError(failures[0])
    return result


def _restore_args(like) -> ocp.RestoreArgs:
    if like.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=like.sharding, global_shape=like.shape, dtype=like.dtype)
