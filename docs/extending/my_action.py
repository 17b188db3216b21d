"""my_action.py: the most memory that the process has used, over all restarts, among the metrics."""

import resource

from vit_jax.extend import Action, Progress, Run, load_config, register_action

KIB_PER_GIB = 2**20


class LogMemory(Action):
    def __init__(self, run: Run):
        self.run = run
        self.most = 0.0

    def after_step(self, progress: Progress) -> None:
        if not self.run.is_logged(progress.step):
            return
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB on Linux
        self.most = max(self.most, used / KIB_PER_GIB)
        self.run.writers.write_scalars(progress.step, {"memory/most_gib": self.most})

    def state(self, progress: Progress) -> dict:
        return {"most": self.most}

    def load_state(self, saved: dict) -> None:
        self.most = saved["most"]


register_action("memory", LogMemory)


def get_config():
    return load_config("digits")
