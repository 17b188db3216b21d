"""Checks before a run may start, when nothing is at stake yet and a clear error costs nothing."""

import dataclasses
import errno
import json
import operator
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath
from jax._src import xla_bridge  # whether a device was used has no public name

from vit_jax import objectives
from vit_jax.base import buckets, outputs, places, schema
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.checkpoints import descriptions, reading, storage
from vit_jax.config import Config, config_class
from vit_jax.data import views
from vit_jax.data.augmentation import pipeline
from vit_jax.data.labels.masks import ClassTable
from vit_jax.data.options import Data
from vit_jax.data.sources import fingerprint
from vit_jax.devices import gpus, meshes
from vit_jax.devices.processes import START_AGAIN
from vit_jax.models import classifier
from vit_jax.objectives.contract import Objective
from vit_jax.training.normal_forms import forms, normal_value

_RETRY_SECONDS = (1.0, 3.0, 9.0)
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


class NotWritable(UserError):
    """The workdir cannot be written to for now."""

    exit_code = START_AGAIN


# Fields whose patterns name heads.
PATTERNS = ("config.init_reset", "config.lora.also", "config.optim.freeze")
_FEW = 0.05  # of the training images, lost and gained since a run was saved


def changed_fields(saved: dict, description: dict) -> list[str]:
    """The differences between two descriptions that would change the result, as 'field: old ->
    new'. A few training images that were lost or gained are not among them; see `few_other_images`.
    """
    classes = [config_class(described["config"]) for described in (saved, description)]
    may_change = {f"config.{name}" for cls in classes for name in schema.may_change(cls)}
    comparisons = _comparisons(description)
    few = few_other_images(saved, description)
    normal = forms(classes[0]) | forms(classes[1])
    changed = []
    for key in ("config", "classes", *([] if few else ["training_examples"])):
        old = schema.flat({key: _part(saved, key)})
        new = schema.flat({key: _part(description, key)})
        for name in sorted(old.keys() | new.keys()):
            before = old.get(name)
            now = new.get(name)
            same = comparisons.get(name, operator.eq)
            form = normal.get(name.removeprefix("config."))
            alike = same(normal_value(before, form), normal_value(now, form))
            if name not in may_change and not alike:
                changed.append(f"{name}: {before!r} -> {now!r}")
    if not few and not _same_images(saved, description):
        changed.append("the training images: their names, sizes, labels or order are not the same")
    return changed


def _comparisons(description: dict) -> dict[str, Callable]:
    """How the values of fields are compared that may differ in their spelling, by the name of the field."""
    comparisons = {"config.data.path": _same_place, "config.data.mixture": _same_mixture}
    comparisons |= dict.fromkeys(PATTERNS, _same_patterns)
    comparisons["config.objective.rest"] = _as_begun
    comparisons["config.objective.tokenizer_digest"] = lambda old, new: old in (None, "", new)
    if not description["model"].get("num_classes"):
        comparisons["config.init_reset"] = _same_without_head
    return comparisons


def _same_images(saved: dict, description: dict) -> bool:
    """Whether the training images are the same, as far as that is known: an earlier version did not look."""
    before = saved.get("training_data")
    now = description.get("training_data")
    return not (before and now) or fingerprint.same(before, now)


def few_other_images(saved: dict, description: dict) -> str:
    """A message for a run that continues with slightly different training images: at most two, or one in twenty, were
    lost or added since it was saved. '' if the images are the same, too many differ, or it is not known.
    """
    sketches = [described.get("training_sketch", "") for described in (saved, description)]
    before, now = (described["training_examples"] for described in (saved, description))
    marks = [described.get("training_data", "") for described in (saved, description)]
    if not all(sketches) or (
        before == now and sketches[0] == sketches[1] and fingerprint.same(*marks)
    ):
        return ""
    lost, gained = fingerprint.changes(sketches[0], before, sketches[1], now)
    if not lost + gained:  # too few for the sketches to show
        lost = gained = 1
    if lost + gained > max(2, _FEW * before):
        return ""
    return (
        f"the training images are not all those that this run was saved with: about {lost:,} of {before:,} are gone or "
        f"changed, and about {gained:,} are new. It continues with the {now:,} that there are; their order is another "
        "from here on, so that some are seen once more or less in this epoch, and epochs have another length"
    )


def data_as_begun(data: Data, workdir: epath.PathLike) -> Data:
    """`data` as the run in `workdir` holds out images: by name, if it does, such as one of an earlier version."""
    saved = reading.newest_description(workdir)
    if saved is None or saved["config"]["data"].get("examine"):
        return data
    logging.log_first_n(
        logging.WARNING,
        "%s: this run began with config.data.examine=False, or with a version without this option, and keeps to it: "
        "names decide what is held out, so that copies of training images may be among it",
        1, workdir,
    )  # fmt: skip
    return dataclasses.replace(data, examine=False)


def sum_as_begun(objective: Any, workdir: epath.PathLike) -> Any:
    """The options of a sum. Its late terms rest if they do in the run in `workdir`. In a run of an earlier version
    they do not, and its saved state has no separate counts for them.

    Args:
      objective: `config.objective` of a run.
    """
    saved = reading.newest_description(workdir)
    if saved is None:
        return objective
    return dataclasses.replace(objective, rest=saved["config"]["objective"].get("rest", False))


def _same_place(before: str, now: str) -> bool:
    """Whether two paths lead to the same file or folder; `now` is absolute. An earlier version kept a path as it was
    typed, whatever the working folder: then the end of it has to agree.
    """
    if before == now or not before or places.in_bucket(before):
        return before == now
    before = os.path.expanduser(before)
    if os.path.isabs(before):
        return os.path.realpath(before) == os.path.realpath(now)
    here = os.path.realpath(before) == os.path.realpath(now)
    return here or now.endswith(f"/{os.path.normpath(before)}")


def _same_mixture(before: list, now: list) -> bool:
    """Whether two mixtures have the same paths or names with the same weights."""
    if len(before) != len(now):
        return False
    pairs = zip(before, now, strict=True)
    return all(old[1] == new[1] and _same_place(old[0], new[0]) for old, new in pairs)


def _as_begun(before: bool | None, now: bool | None) -> bool:
    """That both are the same: the run has the value that it began with, see `sum_as_begun`."""
    return True


def _same_patterns(before: list, now: list) -> bool:
    """Whether patterns select the same parameters; patterns of an earlier version are understood."""
    return classifier.without_exits(before) == classifier.without_exits(now)


def _same_without_head(before: list, now: list) -> bool:
    """Whether patterns reset the same of a model that has no head: a pattern of heads selects nothing of it."""
    return _same_patterns(*map(classifier.besides_heads, (before, now)))


def _part(description: dict, key: str):
    if key == "config":
        return descriptions.filled_config(description)
    return json.loads(json.dumps(description[key]))


def check_batch(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises `ConfigError` unless batches can be split evenly over the mesh."""
    replicas = meshes.batch_shards(mesh)
    sizes = [("eval.batch_size", config.eval.batch_size)]
    for variant in views.variants(config):
        name = "data.native_multiple: a batch" if config.data.native_budget else "batch_size"
        sizes.append((f"{name} / accumulate", variant.batch_size // config.accumulate))
    for name, size in sizes:
        if size % replicas:
            raise ConfigError(
                f"config.{name} = {size} cannot be spread over {replicas} devices (data x fsdp); "
                f"choose a multiple of {replicas}"
            )


def check_classes(path: str, named: Sequence[str] | None, classes: tuple[str, ...]) -> None:
    """Raises `ConfigError` if the teacher in a checkpoint means other classes by the same numbers: if it shares some
    class names with the data, but not all, or in another order. If it shares none, its names may be other words for
    the same classes.
    """
    if not named or set(named).isdisjoint(classes) or tuple(named) == tuple(classes):
        return
    number = next(
        i for i, pair in enumerate(zip(named, classes, strict=True)) if len(set(pair)) > 1
    )
    raise ConfigError(
        f"the teacher {path} knows other classes than the data, or in another order: number {number} is "
        f"{named[number]!r} to it, and {classes[number]!r} in the data"
    )


def check_masks(config: Config, objective: type[Objective], masks: ClassTable | bool) -> None:
    """Raises `ConfigError` unless the objective can learn from labels that are masks, or are none."""
    name = config.objective.name
    data = f"{config.data.name!r} ({config.data.path or 'no path'})"
    if config.data.mask_feature and not objective.needs_masks:
        raise ConfigError(
            f"config.data.mask_feature = {config.data.mask_feature!r}, but the objective {name!r} learns from no "
            "masks: set it to '', or --config.objective.name=segmentation"
        )
    if masks and objective.needs_labels:
        raise ConfigError(
            f"the objective {name!r} needs classes of images, and {data} has masks: set "
            "--config.objective.name=segmentation"
        )
    if not objective.needs_masks:
        return
    if not masks:
        raise ConfigError(
            f"the objective {name!r} needs masks, and {data} has none: set --config.data.name=masks and "
            "--config.data.path=FOLDER, or of a TFDS data set --config.data.mask_feature=auto"
        )
    pipeline.check_masks(config.augment)
    if config.data.permute != "none":
        raise ConfigError(
            f"config.data.permute = {config.data.permute!r}: pixels with masks are not permuted"
        )


def check_labels(config: Config, num_classes: int, multi_label: bool) -> None:
    """Raises `ConfigError` unless the objective, which needs labels, can learn from the labels of the data."""
    data = f"{config.data.name!r} ({config.data.path or 'no path'})"
    objective = f"the objective {config.objective.name!r}"
    if not num_classes:
        raise ConfigError(f"{objective} needs labels, and {data} has none")
    if num_classes == 1:
        raise ConfigError(f"{objective} needs two or more classes, and {data} has only one class")
    if multi_label and objectives.probabilities(config.objective) == "softmax":
        raise ConfigError(
            f"images of {data} have several labels, and the softmax loss is for one: set "
            "--config.objective.loss=sigmoid"
        )
    if config.eval.thresholds:
        from vit_jax.evaluation import decisions  # for a few runs alone

        decisions.class_thresholds(config, num_classes)


def check_teacher(
    path: str,
    teacher: classifier.ClassifierConfig,
    student: classifier.ClassifierConfig,
    *,
    gives: str = "logits",
) -> None:
    """Raises `ConfigError` unless both take the same images and, where the teacher gives 'logits', tell the same
    number of classes apart.
    """
    if gives == "logits" and not teacher.num_classes:
        raise ConfigError(
            f"the teacher {path} has no head, and so no classes to teach: fine-tune it, or learn its features with "
            "configs/distill.py:features"
        )
    if gives == "logits" and teacher.num_classes != student.num_classes:
        raise ConfigError(
            f"the teacher {path} tells {teacher.num_classes} classes apart, and the data has "
            f"{student.num_classes}: fine-tune it on these first, or take another"
        )
    if teacher.channels != student.channels:
        raise ConfigError(
            f"the teacher {path} sees images of {teacher.channels} channels, and the student of {student.channels}"
        )


def make_deterministic(config: Config) -> None:
    """Makes GPUs deterministic if `config.deterministic` asks for it; to be called before any device is used.

    Raises:
      ConfigError: a device was used already, or XLA_FLAGS contradict it.
    """
    if config.deterministic and gpus.wanted(os.environ) and gpus.on_node():
        gpus.make_deterministic(os.environ, too_late=xla_bridge.backends_are_initialized())
        logging.info(
            "deterministic: kernels add in a fixed order and are chosen without timing them; vit_jax benchmark step "
            "measures what that costs"
        )


def use_compilation_cache(directory: str) -> None:
    """Keeps compiled programs between runs, readable by their owner only: whoever can write them
    can run code in the job. Where they cannot be kept, the run continues without, and says so.
    """
    if not directory:
        return
    path = places.locate(directory, "config.compilation_cache")
    try:
        if not places.in_bucket(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
            _warn_of_others(path)
    except OSError as error:
        logging.warning(
            "config.compilation_cache = %s cannot be written to (%s): compiled programs are not kept",
            path, error.strerror or error,
        )  # fmt: skip
        return
    jax.config.update("jax_compilation_cache_dir", str(path))


def _warn_of_others(cache: epath.Path) -> None:
    mode = os.stat(cache).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) or os.stat(cache).st_uid not in (os.getuid(), 0):
        logging.warning(
            "config.compilation_cache = %s can be written by others, who can so run code in this job: "
            "chmod 700 it, or choose another", cache,
        )  # fmt: skip


def check_workdir(workdir: epath.PathLike, flag: str = "--workdir") -> None:
    """Checks that a local folder can be made and written to, without making it; see `make_workdir`. Of a bucket nothing
    is asked: `make_workdir` writes there.
    """
    storage.check_can_save(workdir, flag)
    place = epath.Path(places.absolute(os.fspath(workdir), flag))
    if not places.in_bucket(place):
        _try_until_writable(lambda: outputs.check_can_be_made(place), place, flag)


def make_workdir(workdir: epath.Path, flag: str = "--workdir") -> None:
    """Makes the folder that a flag names and checks that it can be written to, before any work is done. It tries
    again after a problem that may pass, such as a full disk or one that is being mounted.

    Raises:
      ConfigError: it cannot.
      NotWritable: it cannot for now; start again.
    """
    probe = workdir / f".writable-{jax.process_index()}"
    in_bucket = places.in_bucket(workdir)
    if in_bucket and jax.process_index() == 0:
        outputs.check_no_file(workdir, "--workdir")

    def write() -> None:
        if not in_bucket:
            workdir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()

    _try_until_writable(write, workdir, flag)


def _try_until_writable(write: Callable[[], None], workdir: epath.Path, flag: str) -> None:
    for seconds in (*_RETRY_SECONDS, None):
        try:
            write()
            return
        except Exception as error:
            if not buckets.is_failure(error):
                raise
            passing = getattr(error, "errno", None) in _PASSING
            if places.in_bucket(workdir):  # Its client has already tried again.
                passing = not buckets.is_denied(error)
                seconds = None
            if passing and seconds:
                logging.warning("%s=%s: %s; trying again in %g s", flag, workdir, error, seconds)
                time.sleep(seconds)
                continue
            failure = NotWritable if passing else ConfigError
            reason = buckets.reason(error)
            raise failure(f"cannot write to {flag}={workdir}: {reason}") from error


def is_of_run(path: str, workdir: epath.PathLike) -> bool:
    """Whether a checkpoint is one of the run in `workdir`."""
    workdir = os.path.realpath(os.path.expanduser(workdir))
    path = os.path.realpath(os.path.expanduser(path))
    is_best_or_newest = path in (workdir, f"{workdir}/best")
    return is_best_or_newest or path.startswith(f"{workdir}/checkpoints")
