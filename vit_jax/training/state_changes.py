"""Whether a run can continue from a checkpoint with a changed config: whether the checkpoint holds the state that the
run has now. Arrays that are missing because of a change are not damaged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading

# Fields that decide about the arrays of a part of a state, by the beginning of the part's name; the first match wins.
_FIELDS = (
    ("ema", ("config.optim.ema", "config.optim.name")),
    ("teacher", ("config.objective.",)),
    ("params_objective", ("config.objective.",)),
    ("objective_variables", ("config.objective.",)),
    ("params", ("config.model.", "config.lora.", "config.objective.", "config.data.", "classes")),
    ("opt_state", ("config.optim.",)),
)
_NAMED = 3  # arrays in a message


def check_state(folder: epath.Path, parts: Mapping[str, Any], changed: Sequence[str]) -> None:
    """Checks that a checkpoint holds each part of a run's state, with the same arrays.

    Args:
      folder: of the checkpoint.
      parts: shapes and dtypes of the run's state, see `TrainState.parts`.
      changed: the differences of the configs, as `guards.changed_fields` gives them; not empty.

    Raises:
      ConfigError: it does not, because of these differences.
      CheckpointError: the checkpoint cannot be read.
    """
    saved = reading.abstract_parts(folder, parts)
    for part in _in_order(parts):
        before = _arrays(saved[part])
        now = _arrays(parts[part])
        if before != now:
            raise ConfigError(_message(folder, part, before, now, changed))


def _in_order(parts: Mapping[str, Any]) -> list[str]:
    """The names of the parts; parameters first, because their changes change other parts."""
    return sorted(parts, key=lambda name: not name.startswith("params"))


def _arrays(tree: Any) -> dict[str, tuple]:
    """Shape and dtype of each array, by name."""
    arrays = patterns.named(tree)
    return {name: (tuple(x.shape), str(x.dtype)) for name, x in arrays.items()}


def _message(
    folder: epath.Path,
    part: str,
    before: Mapping[str, tuple],
    now: Mapping[str, tuple],
    changed: Sequence[str],
) -> str:
    if not before:
        difference = f"has no {part}"
    elif missing := [name for name in now if name not in before]:
        difference = f"has no {_listed(part, missing)}"
    elif other := [name for name, array in now.items() if before[name] != array]:
        difference = f"has {_listed(part, other)} in other shapes or types"
    else:
        more = [name for name in before if name not in now]
        difference = f"has {_listed(part, more)}, which the run has no more"
    causes = _causes(part, changed)
    back = " and ".join(cause.partition(":")[0] for cause in causes)
    workdir = folder.parent.parent
    return (
        f"the run cannot continue with {'; '.join(causes)}: its checkpoint {folder} {difference}, so that the state of "
        f"now does not follow from it, even with config.checkpoint.on_config_change=allow. Put {back} back, or set a "
        f"new --workdir and --config.init_from={workdir}"
    )


def _listed(part: str, names: Sequence[str]) -> str:
    listed = ", ".join(f"{part}/{name}" for name in names[:_NAMED])
    rest = len(names) - _NAMED
    return f"{listed} and {rest} more" if rest > 0 else listed


def _causes(part: str, changed: Sequence[str]) -> list[str]:
    """The changes that affect a part; all changes, if none is known to affect it."""
    for prefix, fields in _FIELDS:
        if part.startswith(prefix):
            causes = [change for change in changed if change.startswith(fields)]
            return causes or list(changed)
    return list(changed)
