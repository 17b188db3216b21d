"""What `train` would run, without running it: the resolved config as a recipe, the model, the data
and the number of steps. Nothing is written, and no device is used.
"""

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax import evaluation
from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.record import DataError
from vit_jax.models import naming, registry
from vit_jax.planning.plan import known_data
from vit_jax.training import announce
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.loop import subject_of


def dry_run(config: ConfigDict, workdir: epath.PathLike | None) -> tuple[dict, str]:
    """The run in numbers, and the text of a recipe that trains the same.

    If the data is not here, its size is taken from a catalog that has it, and the recipe says so.

    Args:
      config: the run's.
      workdir: where it would run, perhaps goes on; `None` if that is not said.

    Raises:
      ConfigError, CheckpointError: as `training.loop.train` before it uses devices.
    """
    # Whatever devices there are, other programs may have them.
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    config = resolve(config, workdir)
    source, multi_label, missing = None, False, ""
    try:
        source = sources.open_train(config.data)
        classes, examples, multi_label = len(source.classes), len(source), source.multi_label
    except (ConfigError, DataError) as error:
        classes, examples = known_data(config.data)
        missing = str(error)
        if examples is None:
            raise
    assembly = assemble(
        config, num_classes=classes, examples_per_epoch=examples, multi_label=multi_label
    )
    suite = source and evaluation.make(config.eval.evaluators, subject_of(assembly, source))
    lines = announce.lines(assembly, examples, suite)
    if missing:
        lines.append(f"the data was not read, its size is from a catalog: {missing}")
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
    }
    return result, announce.recipe(assembly, lines, suite)
