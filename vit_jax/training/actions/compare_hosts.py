"""Names a slow host, for which all hosts wait."""

from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run
from vit_jax.training.upkeep.stragglers import Stragglers


class CompareHosts(Action):
    """Compares the times of hosts between steps, whenever metrics are logged."""

    def __init__(self, run: Run):
        self._run = run
        self._stragglers = Stragglers(run.clock)

    def after_step(self, progress: Progress) -> None:
        """Posts the times of this process; process 0 compares them."""
        if self._run.is_logged(progress.step):
            self._stragglers.log(progress.step)
