"""The command line of vit_jax in a process that ends itself at a step.

`python -m tests.integration.ended COMMAND …` is `python -m vit_jax COMMAND …`, except that the process gets a signal
just before it computes a step, which the environment variable ENDED names as JSON: `step`, counted from 1 over all runs
of the process, and `signal`, a number.
"""

import json
import os

from vit_jax.commands.main import run
from vit_jax.training.step_programs import StepPrograms

_SAID = json.loads(os.environ["ENDED"])
_steps = 0  # that were asked for in this process
_compute = StepPrograms.__call__


def compute_or_end(self, step, state, batch):
    """A step, before one of which the signal comes."""
    global _steps
    _steps += 1
    if _steps == _SAID["step"]:
        os.kill(os.getpid(), _SAID["signal"])
    return _compute(self, step, state, batch)


if __name__ == "__main__":
    StepPrograms.__call__ = compute_or_end  # of the class: whichever module makes its programs
    run()
