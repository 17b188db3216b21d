"""Checkpoints of a run: Orbax directories that explain themselves.

WORKDIR/checkpoints/STEP holds `state` (the whole training state) and `description` (JSON: config,
model, label names, preprocessing, versions), so that evaluating, predicting and fine-tuning need
nothing but the directory. Here they are found and read; `saving` writes them, other people's formats
are in `interchange`.

    the path given          the checkpoint that is read
    a checkpoint itself     this one
    WORKDIR[/checkpoints]   the newest that was saved whole
    WORKDIR/best            the best: as the newest readable description says, or WORKDIR/best.json if that was
                            found out after the newest was saved
    WORKDIR/last            the newest that was saved whole
    WORKDIR@STEP            the one of this step

    which one is damaged    what happens
    one that is read here   a `CheckpointError`: weights of another step are not what was asked for
    a run's newest          `saving.restore_latest` puts it aside; the run resumes from the previous one,
                            or from a newer state on local disks (`tiers`)
"""

import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from vit_jax import objectives
from vit_jax.base import buckets, limits, patterns, places, schema
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import descriptions, fingerprints, handlers, lora, storage
from vit_jax.checkpoints.objective_weights import (
    ObjectiveModules,
    abstract_modules,
    module_parts,
    trained_networks,
)
from vit_jax.compute import digests
from vit_jax.config import default_config
from vit_jax.devices import processes
from vit_jax.models import classifier, registry
from vit_jax.models.registry import Weights
from vit_jax.recipes import user_files

FOLDER = "checkpoints"
BEST = "best"
LAST = "last"
BEST_RECORD = "best.json"
_AT_STEP = re.compile(r"(.+)@(\d+)")
RECIPE = "config.py"  # the config of a run, beside its checkpoints
_LEFT_BY_RUNS = (".lock", "metrics.jsonl")
# In a bucket Orbax writes this when all else of a checkpoint is there.
COMMITTED = "commit_success.txt"


def find_checkpoint(path: epath.PathLike) -> epath.Path:
    """The directory of one checkpoint: `path` itself, or the newest below a run's workdir or its
    `checkpoints`, or the one that `resolve_name` finds.

    Raises:
      CheckpointError: there is none.
    """
    path = resolve_name(places.locate(path))
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    for folder in (path, path / FOLDER):
        if (folder / "description").exists():
            return folder
        if steps := saved_steps(folder):
            return folder / str(steps[-1])
    if has_begun(path):
        raise CheckpointError(no_checkpoint_yet(path))
    raise CheckpointError(
        f"{path} holds no checkpoint: give a run's workdir, its '{FOLDER}' folder, or one step below it"
    )


def resolve_name(path: epath.Path) -> epath.Path:
    """The checkpoint that WORKDIR/best, WORKDIR/last or WORKDIR@STEP names; any other path, and one that is there, as
    it is.

    Raises:
      CheckpointError: the run has no such checkpoint.
    """
    if path.exists():
        return path
    if path.name == BEST and path.parent.exists():
        return _best_checkpoint(path.parent)
    if path.name == LAST and has_begun(path.parent):
        return find_checkpoint(path.parent)
    match = _AT_STEP.fullmatch(path.name)
    if not match:
        return path
    workdir = path.with_name(match[1])
    if not has_begun(workdir):
        return path
    return _checkpoint_at(workdir, int(match[2]), f"{path} names")


def _best_checkpoint(workdir: epath.Path) -> epath.Path:
    """The checkpoint of a run's best evaluation."""
    best = best_evaluation(workdir)
    if not best:
        raise CheckpointError(
            f"{workdir} has no best checkpoint: it is kept with --config.checkpoint.best=True"
        )
    why = "it is kept with --config.checkpoint.best=True; the best evaluation was"
    return _checkpoint_at(workdir, best["step"], why)


def best_evaluation(workdir: epath.Path) -> dict | None:
    """The best evaluation of a run so far, as `Goals.best` has it; `None` before the first."""
    steps = saved_steps(workdir / FOLDER)
    # A later checkpoint was saved after this file was written, and names the best itself.
    record = places.read_json(workdir / BEST_RECORD)
    if record and steps and record["step"] == steps[-1]:
        return record
    return (newest_description(workdir) or {}).get("best")


def _checkpoint_at(workdir: epath.Path, step: int, why: str) -> epath.Path:
    """The checkpoint of a step. Raises `CheckpointError` if it is not there; `why` ends before 'step'."""
    folder = workdir / FOLDER
    steps = saved_steps(folder)
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(
            f"{workdir} has no checkpoint of step {step} ({why} step {step}); its steps are: {known}"
        )
    return folder / str(step)


def has_begun(path: epath.Path) -> bool:
    """Whether `path` is the workdir of a run, whatever it has saved."""
    return any((path / name).exists() for name in _LEFT_BY_RUNS)


def no_checkpoint_yet(workdir: epath.Path) -> str:
    """What to do about a run that has saved nothing so far."""
    return (
        f"{workdir} is a run that has no checkpoint yet: wait for its first (its log says when, as "
        "config.checkpoint.every sets), or stop it with SIGTERM or Ctrl-C, which saves"
    )


def read_description(folder: epath.Path) -> dict:
    """The JSON that a checkpoint says of itself."""
    handler = ocp.JsonCheckpointHandler()
    args = ocp.args.JsonRestore()
    try:
        description = handler.restore(epath.Path(folder) / "description", args=args)
    except Exception as error:
        if failure := storage.failure(folder, error):
            raise failure from error
        if not isinstance(error, OSError | ValueError):
            raise
        raise CheckpointError(
            f"{folder} is damaged or no checkpoint: its description cannot be read ({error})"
        ) from error
    description = descriptions.unsealed(description)
    if description is None:
        raise CheckpointError(f"{folder} is damaged: its description is not the one that was saved")
    _check_registered(description, folder)
    return description


def _check_registered(description: dict, folder: epath.Path) -> None:
    """Raises `ConfigError` if the model or the objective of a checkpoint is from a file of the user's that
    was not given with --register.
    """
    model = description["model"]["name"]
    objective = description["config"].get("objective", {}).get("name", "supervised")
    known = {
        f"the model {model!r}": registry.is_known(model),
        f"the objective {objective!r}": objective in objectives.OBJECTIVES,
    }
    missing = " and ".join(what for what, is_known in known.items() if not is_known)
    if not missing:
        return
    recipe = folder.parent.parent / RECIPE
    files = user_files.registered_by(recipe)
    flags = " ".join(f"--register={file}" for file in files) or "--register=FILE"
    where = f"as {recipe} does" if files else "the Python file that adds it"
    raise ConfigError(f"{folder} needs {missing}, which this package has not: add {flags}, {where}")


def read_weights(path: epath.PathLike, like: Weights | None = None) -> Weights:
    """The arrays of a run's model (the averaged ones, if it kept an average).

    Args:
      path: see `find_checkpoint`.
      like: shapes, dtypes and shardings to restore to; by default whole NumPy arrays.
    """
    folder = find_checkpoint(path)
    description = read_description(folder)
    if like is None:
        like = registry.abstract_weights(descriptions.stored_model_config(description))[1]
    names = descriptions.parts_to_use(description)
    wanted = {name: part for name, part in zip(names, like, strict=True) if part}
    read = read_parts(folder, wanted, description)
    return Weights(*(read.get(name, {}) for name in names))


def abstract_parts(folder: epath.Path, names: Collection[str]) -> dict[str, dict]:
    """Shapes and dtypes of some parts of a saved state, as they were saved; {} of one that was not.

    Args:
      folder: of a checkpoint.
      names: of the parts.
    """
    try:
        saved = ocp.PyTreeCheckpointHandler().metadata(storage.readable(folder / "state")).tree
    # As in `_restore`.
    except Exception as error:
        if storage.is_unavailable(folder, error):
            raise buckets.failure(str(folder), storage.why(error)) from error
        raise CheckpointError(f"{folder} is damaged: {storage.why(error)}") from error
    return {name: _abstract(saved.get(name, {})) for name in names}


def _abstract(tree: Any) -> Any:
    """Shapes and dtypes of metadata; places in a list are numbers again, so that they sort as those of the model."""
    if isinstance(tree, dict):
        return {int(key) if key.isdigit() else key: _abstract(value) for key, value in tree.items()}
    as_struct = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)  # noqa: E731
    return jax.tree.map(as_struct, tree)


def read_array(folder: epath.Path, part: str, like: dict, name: str) -> np.ndarray:
    """One array of a saved part, read alone.

    Args:
      folder: of a checkpoint.
      part: its name in the saved state, such as those that `parts_to_use` gives.
      like: shapes and dtypes of all its arrays.
      name: as in `patterns.names(like)`.
    """
    index = patterns.names(like).index(name)
    tree = jax.tree.leaves(like)[index]
    for key in reversed(name.split("/")):
        tree = {key: tree}
    described = read_description(folder).get(fingerprints.FIELD)
    sums = {} if described else {fingerprints.PART: fingerprints.like({part: like})}
    restored = _restore(folder, {part: tree} | sums)
    (array,) = jax.tree.leaves(restored[part])
    saved = fingerprints.saved_marks(part, described, restored.get(fingerprints.PART))
    mark = digests.host_mark(array)[None]
    if fingerprints.differ(mark, saved[index : index + 1]).any():
        raise _changed(folder, f"{part}/{name}")
    return array


def weights_mark(folder: epath.Path) -> str:
    """A text that other weights would most likely not have, read without them.

    Args:
      folder: of a checkpoint.
    """
    description = read_description(folder)
    like = lora.saved_like(
        description, registry.abstract_weights(descriptions.stored_model_config(description))[1]
    )
    parts = {
        name: part
        for name, part in zip(descriptions.parts_to_use(description), like, strict=True)
        if jax.tree.leaves(part)
    }
    if described := description.get(fingerprints.FIELD):
        return fingerprints.of_parts(described, parts)
    saved = _restore(folder, {fingerprints.PART: fingerprints.like(parts)})
    return fingerprints.of_sums(saved[fingerprints.PART])


def read_modules(
    folder: epath.Path,
    description: dict,
    model_config: classifier.ClassifierConfig,
    sharding: jax.sharding.Sharding,
    *,
    judged: bool = False,
) -> ObjectiveModules | None:
    """What the objective of a run owns; `None` unless its model answers by that, or is `judged` by it.

    Args:
      folder, description: of the checkpoint.
      model_config: of its model.
      sharding: of all arrays.
    """
    objective = schema.fill(default_config(), description["config"]).objective
    kind, _ = objectives.find_objective(objective)
    if not (kind.predicts_with_modules or (judged and kind.evaluates_with_modules)):
        return None
    networks = trained_networks(description, model_config)
    parts = abstract_modules(networks, description)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), parts)
    read = read_parts(folder, like, description)
    weights = [read.get(name, {}) for name in module_parts(description)]
    return ObjectiveModules(networks, Weights(*weights))


def newest_description(workdir: epath.PathLike) -> dict | None:
    """The description of a run's newest checkpoint that has one to read; `None` if there is none."""
    folder = places.locate(workdir) / FOLDER
    for step in reversed(saved_steps(folder)):
        try:
            return read_description(folder / str(step))
        except CheckpointError as error:
            logging.warning("%s", error)
    return None


def saved_steps(folder: epath.Path) -> list[int]:
    """The steps saved whole, oldest first. In a bucket a folder is seen while it is written."""
    names = sorted((name for name in places.names_in(folder) if name.isdigit()), key=int)
    return [int(name) for name in names if _is_whole(folder / name)]


def _is_whole(checkpoint: epath.Path) -> bool:
    if not places.in_bucket(checkpoint):
        return checkpoint.is_dir()  # Orbax gives a folder this name once all is in it.
    try:
        places.read_bytes(checkpoint / COMMITTED)  # one request, where looking for it takes three
    except FileNotFoundError:
        return False
    return True


def read_parts(folder: epath.Path, like: dict, description: dict | None = None) -> dict:
    """Some parts of a saved state, verified to equal what was saved.

    Args:
      folder: of a checkpoint.
      like: shapes, dtypes and shardings of the parts, by name.
      description: of the checkpoint, where it is known already.

    Raises:
      CheckpointError: a file is missing or cut short, an array has another shape, or its bits have
        changed.
    """
    if description is None:
        description = everywhere(lambda: read_description(folder))
    described = description.get(fingerprints.FIELD)
    sums = {} if described else {fingerprints.PART: fingerprints.like(like)}
    restored = everywhere(lambda: _restore(folder, like | sums))
    parts = {name: restored[name] for name in like}
    if changed := fingerprints.find_changed(parts, described, restored.get(fingerprints.PART)):
        raise _changed(folder, changed)
    return parts


def _restore(folder: epath.Path, tree: dict) -> dict:
    """What is saved under the names of `tree`, not compared with its fingerprint.

    Raises:
      CheckpointError: something of it is missing or damaged.
    """
    args = ocp.args.PyTreeRestore(
        item=tree, restore_args=jax.tree.map(_restore_args, tree), partial_restore=True
    )
    try:
        restored = ocp.PyTreeCheckpointHandler(type_handler_registry=handlers.READING).restore(
            storage.readable(folder / "state"), args=args
        )
    # Orbax and TensorStore report damage by exceptions of any type, Exception itself among them.
    except Exception as error:
        if failure := storage.failure(folder, error):
            raise failure from error
        raise CheckpointError(f"{folder} is damaged: {storage.why(error)}") from error
    # What Orbax does not find it leaves as it was asked for.
    for name, leaf in patterns.named(restored).items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckpointError(f"{folder} is damaged: its state has no {name}")
    return restored


def _changed(folder: epath.Path, name: str) -> CheckpointError:
    return CheckpointError(f"{folder} is damaged: the bits of {name} are not those that were saved")


def everywhere(read: Callable[[], dict]) -> dict:
    """What `read` gives in each process, once it has succeeded in all: no process may continue to
    compute with others whose part is damaged.

    Raises:
      CheckpointError: it failed somewhere; the same in all processes.
      ConfigError, buckets.Unreachable: somewhere storage did not answer; the same in all processes.
      limits.MachineError: somewhere there were no descriptors or was no memory; the same in all processes.
    """
    passing = (buckets.Unreachable, limits.MachineError)
    kinds = {kind.__name__: kind for kind in (*passing, ConfigError, CheckpointError)}
    result = {}
    failure = ""
    try:
        result = read()
    except tuple(kinds.values()) as error:
        failure = f"{type(error).__name__}:{error}"
    failures = [message for message in processes.gather("read a checkpoint", failure) if message]
    # What may pass decides: others may have read damage through it.
    for name, kind in kinds.items():
        for message in failures:
            if message.startswith(f"{name}:"):
                raise kind(message.removeprefix(f"{name}:"))
    return result


def _restore_args(like) -> ocp.RestoreArgs:
    if like.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=like.sharding, global_shape=like.shape, dtype=like.dtype)
