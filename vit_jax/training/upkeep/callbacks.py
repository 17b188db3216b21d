"""Functions of the user's that a run calls with its metrics, and that may end it."""

from collections.abc import Callable, Mapping, Sequence

import jax
from absl import logging

from vit_jax.base.errors import ConfigError, UserError
from vit_jax.devices import processes
from vit_jax.training.upkeep.writers import MetricWriter

# Of a step and its metrics; a true answer ends the run.
Callback = Callable[[int, dict[str, float]], object]
_FAILED = "failed: "


def check_callbacks(functions: Sequence[Callback]) -> None:
    """Raises `ConfigError` unless these are functions."""
    if callable(functions):
        raise ConfigError("callbacks is one function: pass a list, callbacks=[function]")
    for number, function in enumerate(functions):
        if not callable(function):
            raise ConfigError(
                f"callbacks[{number}] is of the type {type(function).__name__}: pass a function of (step, metrics)"
            )


class Callbacks(MetricWriter):
    """Calls the functions wherever metrics are written: in the first process.

    Attributes:
      functions: the callbacks.
      ended: the name of the function that ended the run; '' if none did, or if one failed: then it can be continued.
      error: the exception that a function raised; `raise_error` raises it when the run is saved. In other processes a
        `UserError` that reports it.
    """

    def __init__(self, functions: Sequence[Callback]):
        self.functions = functions
        self._verdict = ""
        self.ended = ""
        self.error: Exception | None = None

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.error or jax.process_index():
            return
        for function in self.functions:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            try:
                stop = function(step, dict(scalars))
            except Exception as error:  # noqa: BLE001  raised when the run is saved
                logging.error("the callback %s failed at step %d: the run ends", name, step)
                self._verdict = (
                    f"{_FAILED}the callback {name} failed at step {step} in the first process"
                )
                self.error = error
                return
            if stop:
                self._verdict = f"stopped by the callback {name}"

    def end_the_run(self) -> bool:
        """Whether the run is to end, the same in all processes; each asks at the same steps."""
        verdict = (
            processes.broadcast_from_first("callbacks", self._verdict) if self.functions else ""
        )
        if verdict.startswith(_FAILED):
            self.error = self.error or UserError(verdict.removeprefix(_FAILED))
        elif verdict:
            self.ended = verdict
            logging.info("%s", verdict)
        return bool(verdict)

    def raise_error(self) -> None:
        """Raises the exception of a function that failed, if one did."""
        if self.error:
            raise self.error

    def flush(self) -> None:
        """Nothing is kept back."""

    close = flush
