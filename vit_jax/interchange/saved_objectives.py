"""What a checkpoint of any format holds of the objective that its model was trained with: of a run in its training
state, of other people's files in tensors beside the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from etils import epath

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import tensors_by_name
from vit_jax.interchange.conversions.contract import NOTHING, Beside
from vit_jax.interchange.conversions.objective_table import (
    kinds_of_the_package,
    objective_conversions,
)
from vit_jax.interchange.formats import LoadedCheckpoint
from vit_jax.objectives.contract import Objective, SavedObjective


def find_saved(
    checkpoint: LoadedCheckpoint,
    kind: type[Objective] | None = None,
    hints: Mapping[str, Any] | None = None,
) -> SavedObjective | None:
    """What a checkpoint holds of an objective; `None`: nothing, or nothing that is known.

    Args:
      kind: the objective that it is looked for in other people's files; by default all of the package.
      hints: options of the objective that it is for, taken where a file leaves them open.
    """
    if checkpoint.objective or not checkpoint.extras:
        return checkpoint.objective
    for candidate in (kind,) if kind else kinds_of_the_package():
        for conversion in objective_conversions(candidate).values():
            saved = conversion.find(
                checkpoint.model_config, checkpoint.extras, checkpoint.layout, hints or {}
            )
            if saved:
                return saved
    return None


def with_found(checkpoint: LoadedCheckpoint) -> LoadedCheckpoint:
    """The checkpoint with its objective in place of the file's tensors, whose sizes are those of the file's images."""
    return dataclasses.replace(checkpoint, objective=find_saved(checkpoint), extras={})


def beside(checkpoint: LoadedCheckpoint, format: str, path: epath.PathLike) -> Beside:
    """What a file of a format gets of a checkpoint's objective; nothing if the format has no place for it.

    Raises:
      CheckpointError: the other code would compute the model with other numbers.
    """
    saved = find_saved(checkpoint)
    conversion = saved and objective_conversions(saved.kind).get(format)
    if not conversion:
        return NOTHING
    config = checkpoint.model_config
    tensors_by_name.refuse_other_conventions(
        config, conversion.conventions, f"the code of {saved.kind.__name__}'s authors", path
    )
    if reason := conversion.refusal(config):
        raise CheckpointError(f"{path} is not written: {reason}")
    return conversion.beside(config, saved)


def without(checkpoint: LoadedCheckpoint) -> LoadedCheckpoint:
    """The checkpoint without what only training uses."""
    kinds = kinds_of_the_package()
    keys = {conversion.key for kind in kinds for conversion in objective_conversions(kind).values()}
    layout = {name: value for name, value in checkpoint.layout.items() if name not in keys}
    return dataclasses.replace(checkpoint, extras={}, objective=None, layout=layout)
