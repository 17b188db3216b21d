"""What `train` would run, without running it: the resolved config as a recipe, the model, the data
and the number of steps. Nothing is written, and no device is used.
"""

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax import evaluation
from vit_jax.base import places
from vit_jax.base.buckets import Unreachable
from vit_jax.base.errors import ConfigError
from vit_jax.base.settings import with_fields
from vit_jax.checkpoints import reading, storage
from vit_jax.config import Config
from vit_jax.data import sources
from vit_jax.data.labels.masks import mask_table
from vit_jax.data.record import DataError, Source
from vit_jax.devices import local
from vit_jax.models import naming, registry
from vit_jax.planning import rough
from vit_jax.planning.elsewhere import Elsewhere, check_elsewhere, plan_lines
from vit_jax.planning.plan import known_data
from vit_jax.training import positions, preflight, starting
from vit_jax.training.assembly import Assembly, assemble, make_mesh, resolve
from vit_jax.training.guards import changed_fields, check_batch
from vit_jax.training.state_changes import check_state
from vit_jax.training.upkeep import announce
from vit_jax.training.with_data import describe_run, subject_of


def dry_run(
    config: ConfigDict,
    workdir: epath.PathLike | None,
    teachers: tuple[str, ...] = (),
    elsewhere: Elsewhere | None = None,
) -> tuple[dict, str]:
    """The run in numbers, and the text of a recipe that trains the same.

    If the data is not here, its size is taken from a catalog that has it, and the recipe says so. A run that trains
    elsewhere may have data and a workdir that cannot be read from here: what could not be checked for this reason is
    `unchecked` in the result, a sentence each.

    Args:
      config: the run's.
      workdir: where it would run, or resume; `None` if it is not known.
      teachers: names of runs that a `pseudo.teacher` or `init_from` may be.
      elsewhere: the devices that will train; `None`: those of this machine.

    Raises:
      ConfigError, CheckpointError: as `training.loop.train` before it uses devices.
    """
    on_cpu = local.platform() == "cpu"
    # Whatever devices there are, other programs may have them.
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    if config.init_from in teachers:  # not trained yet; the config describes its model
        config = with_fields(config, {"init_from": ""})
    unchecked: list[str] = []
    if workdir is not None:
        storage.check_can_save(workdir, "--workdir")
    if elsewhere and workdir is not None:
        try:
            places.locate(workdir, "--workdir")
        except (ConfigError, Unreachable) as error:
            workdir, unchecked = None, [f"whether another run is in the workdir: {error}"]
    config = resolve(config, workdir)
    source, multi_label, missing = None, False, ""
    absences = (ConfigError, DataError, *([Unreachable] if elsewhere else []))
    try:
        source = sources.open_train(config.data)
        classes, examples, multi_label = len(source.classes), len(source), source.multi_label
    except absences as error:
        missing = str(error)
        try:
            classes, examples = known_data(config.data)
        except absences:
            classes, examples = None, None
        if examples is None and not elsewhere:
            raise
        unchecked.append(f"the data: {missing}")
    if examples is None:
        unchecked.append("steps, memory, time and cost, which depend on the number of examples")
        result = {"unchecked": unchecked, "lines": [], "local": config.checkpoint.local}
        return result, "\n".join(_unchecked_lines(unchecked))
    assembly = assemble(
        config,
        num_classes=classes,
        examples_per_epoch=examples,
        multi_label=multi_label,
        masks=None if source is None else mask_table(source) or False,
    )
    suite = source and evaluation.make(config.eval.evaluators, subject_of(assembly, source))
    preflight.check_run(
        assembly, source, suite, workdir, teachers=teachers, elsewhere=elsewhere is not None
    )
    # What a teacher labels belongs to the examples of a run, and is not known here.
    if source is not None and workdir is not None and not config.pseudo.teacher:
        _check_same_run(assembly, source, workdir)
    lines = announce.lines(assembly, examples, suite)
    lines += announce.warnings(config, examples)
    params, _ = jax.eval_shape(assembly.networks.init, jax.random.key(0))
    lines += announce.unreached_options(assembly, params)
    estimate = rough.estimate(assembly, on_cpu=on_cpu and elsewhere is None)
    lines.append(rough.text(estimate))
    plan = None
    if elsewhere:
        plan = check_elsewhere(assembly, elsewhere)
        lines += plan_lines(plan) if plan else []
        unchecked += elsewhere.unchecked
    elif not on_cpu:
        lines.append("config.mesh is not checked: which devices will train is not known here")
    elif unfit := _unfit_mesh(config, missing):
        lines.append(unfit)
    if missing:
        reason = "" if elsewhere else f": {missing}"  # `unchecked` has the reason.
        lines.append(f"the data was not read, its size is from a catalog{reason}")
    result = {
        "model": naming.full_name(assembly.model_config, config.model.name),
        "parameters": registry.count_parameters(assembly.model_config),
        "image_size": config.data.image_size,
        "num_classes": assembly.num_classes,
        "data": config.data.name,
        "examples": examples,
        "batch_size": config.batch_size,
        "steps": assembly.total_steps,
        "data_error": missing,
        "estimate": estimate,
        "plan": plan,
        "unchecked": unchecked,
        "lines": lines,
        "local": config.checkpoint.local,
    }
    head = [*lines, *_unchecked_lines(unchecked)] if elsewhere else lines
    return result, announce.recipe(assembly, head, suite)


def _unchecked_lines(unchecked: list[str]) -> list[str]:
    """A line for each sentence of `unchecked`."""
    return [f"not checked: {sentence}" for sentence in unchecked]


def _check_same_run(assembly: Assembly, source: Source, workdir: epath.PathLike) -> None:
    """Raises `ConfigError` if another run is in the workdir."""
    saved = reading.newest_description(workdir)
    if saved is None:
        return
    description = describe_run(assembly, source)
    starting.check_same_run(assembly.config, saved, description)
    folder = places.locate(workdir, "--workdir") / reading.FOLDER
    steps = reading.saved_steps(folder)
    if not steps:
        return
    newest = max(steps)
    positions.check_position(newest, assembly.total_steps, saved, description, workdir)
    if changed := changed_fields(saved, description):
        state = jax.eval_shape(assembly.init, jax.random.key(0))
        check_state(folder / str(newest), state.parts(), changed)
    starting.warn_of_changes(saved, description)


def _unfit_mesh(config: Config, missing: str) -> str:
    """Why mesh or batch do not fit the CPU devices of this machine; '' if they do. Where the data is not here
    either, the run is meant for another machine.

    Raises:
      ConfigError: the data is here.
    """
    try:
        mesh = make_mesh(config, jax.devices("cpu"))
        check_batch(config, mesh)
    except ConfigError as error:
        if not missing:
            raise
        return f"{error} (on this machine; 'vit_jax plan --topology=…' checks it for another)"
    return ""
