"""The actions beside the steps of a run. Each has a file, which is imported when the config asks for the action."""

import inspect
from collections.abc import Callable

from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.training.actions.contract import Action
from vit_jax.training.run import Run

# The loop calls them in this order before and after each step.
ACTIONS: LazyTable[Callable[[Run], Action]] = LazyTable(
    {
        "profile": "vit_jax.training.actions.profile:Profile",
        # A state that a device has damaged is not logged, evaluated or saved.
        "check_devices": "vit_jax.training.actions.check_devices:CheckDevices",
        # It checks that steps were good, so that all later actions see good steps only.
        "log_metrics": "vit_jax.training.actions.log_metrics:LogMetrics",
        "compare_hosts": "vit_jax.training.actions.compare_hosts:CompareHosts",
        "take_snapshots": "vit_jax.training.actions.take_snapshots:TakeSnapshots",
        # The exit does not wait for an evaluation: the next start makes it first.
        "stop_on_signal": "vit_jax.training.actions.stop_on_signal:StopOnSignal",
        # A checkpoint knows the evaluation of its step, and callbacks have its metrics.
        "evaluate": "vit_jax.training.actions.evaluate:Evaluate",
        "compare_with_curve": "vit_jax.training.actions.compare_with_curve:CompareWithCurve",
        "end_by_callback": "vit_jax.training.actions.end_by_callback:EndByCallback",
        "save_locally": "vit_jax.training.actions.save_locally:SaveLocally",
        "save": "vit_jax.training.actions.save:Save",
    }
)
_OF_THE_PACKAGE = frozenset(ACTIONS)


def register(name: str, make: Callable[[Run], Action]) -> None:
    """Adds an action from outside the package. The loop calls it after the actions of the package.

    Args:
      name: the name of the action, under which checkpoints keep its state. An action of that name is replaced; the
        replacement of an action of the package has to keep the same state, so extend its class.
      make: makes the action of a run; often its class.
    """
    ACTIONS[name] = make


def make_actions(run: Run) -> list[Action]:
    """The actions that a run needs. No other is imported.

    Raises:
      ConfigError: an action from outside the package has a method with other parameters than `Action`.
    """
    actions = []
    needed = [name for name in ACTIONS if is_needed(name, run)]
    for name in needed:
        action = ACTIONS[name](run)
        if name not in _OF_THE_PACKAGE:
            _check_methods(name, action)
            action.kept_as = name
        actions.append(action)
    return actions


def _check_methods(name: str, action: Action) -> None:
    """Finds faults before the first step that would otherwise appear at the first save."""
    for method, function in vars(Action).items():
        if not inspect.isfunction(function):
            continue
        parameters = list(inspect.signature(function).parameters)[1:]
        try:
            inspect.signature(getattr(action, method)).bind(*parameters)
        except TypeError as error:
            raise ConfigError(
                f"the action {name!r}: its method {method} is called with ({', '.join(parameters)}): {error}"
            ) from error


def is_needed(name: str, run: Run) -> bool:
    """Whether a run has this action."""
    log = run.config.log
    if name == "compare_with_curve":
        return bool(run.config.reference.curve)
    if name == "profile":
        return bool(log.profile)
    if name == "take_snapshots":
        return any(map(run.assembly.to_steps, (log.images, log.histograms)))
    if name == "save_locally":
        return run.tier is not None
    if name == "end_by_callback":
        return bool(run.callbacks.functions)
    return True
