"""Functions of the user's that a run calls with its metrics, and that may end it."""

from collections.abc import Callable, Mapping, Sequence

import jax
from absl import logging

from vit_jax.devices import processes
from vit_jax.training.writers import MetricWriter

# Of a step and its metrics; a true answer ends the run.
Callback = Callable[[int, dict[str, float]], object]


class Callbacks(MetricWriter):
    """Calls the functions wherever metrics are written: in the first process.

    Attributes:
      error: what a function raised; `raise_error` raises it when the run is saved.
    """

    def __init__(self, functions: Sequence[Callback]):
        self._functions = functions
        self._ended = ""
        self.error: Exception | None = None

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.error or jax.process_index():
            return
        for function in self._functions:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            try:
                stop = function(step, dict(scalars))
            except Exception as error:  # noqa: BLE001  raised when the run is saved
                logging.error("the callback %s failed at step %d: the run ends", name, step)
                self._ended, self.error = f"the callback {name} failed", error
                return
            if stop:
                self._ended = f"stopped by the callback {name}"

    def ended(self) -> str:
        """Why the run is to end, the same in all processes; '': it goes on. Each asks at the same steps."""
        if not self._functions:
            return ""
        return processes.agree("callbacks", self._ended)

    def raise_error(self) -> None:
        """Raises what a function raised, if one did."""
        if self.error:
            raise self.error

    def flush(self) -> None:
        """Nothing is kept back."""

    close = flush
