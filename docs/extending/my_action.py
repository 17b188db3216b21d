"""my_action.py: how much memory the process has used, among the metrics."""

import resource

from vit_jax.extend import Action, Progress, Run, load_config, register_action

KIB_PER_GIB = 2**20


class LogMemory(Action):
    """Writes the most memory that the process has held, where metrics are logged."""

    def __init__(self, run: Run):
        self.run = run

    def after_step(self, progress: Progress) -> None:
        if not self.run.is_logged(progress.step):
            return
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB on Linux
        self.run.writers.write_scalars(progress.step, {"memory/most_gib": used / KIB_PER_GIB})


register_action("memory", LogMemory)


def get_config():
    return load_config("digits")
