"""How a run hears that it should stop: SIGTERM, as schedulers and spot machines send it, or SIGINT."""

import os
import signal

from jax.experimental import multihost_utils

from vit_jax.devices import processes


class StopRequest:
    """Asked after every step whether to stop there.

    One process stops after the step under way at the first signal; the second signal works as it
    always did. Of several, any one may get the signal: JAX's pre-emption service, which then owns
    SIGTERM, tells the others and finds a step that none of them has passed.

    Attributes:
      name: of the signal.
    """

    name = "SIGTERM"

    def __init__(self):
        self._heard = False
        self._asked = 0
        self._several = processes.count() > 1

    def __enter__(self) -> "StopRequest":
        signals = (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM)
        self._before = {s: signal.signal(s, self._hear) for s in signals}
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def after_step(self) -> bool:
        """Whether to stop now, the same in all processes; each calls it once after every step."""
        if not self._several:
            return self._heard
        self._asked += 1  # and not the step, which a rollback sets back
        return multihost_utils.reached_preemption_sync_point(self._asked)

    def _hear(self, number: int, _) -> None:
        self._heard, self.name = True, signal.Signals(number).name
        self._restore()
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
