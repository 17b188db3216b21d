"""Runs that stop after a step of a test's choice."""

from collections.abc import Callable

import pytest

from vit_jax.training.actions.contract import Progress
from vit_jax.training.actions.stop_on_signal import StopOnSignal


@pytest.fixture
def stop_after(monkeypatch) -> Callable[..., None]:
    """`stop_after(step)`: from now on runs of this process stop after it, as by a signal; with `saving=False` without
    a checkpoint of that step.
    """

    def stop_after(step: int, *, saving: bool = True) -> None:
        def after_step(action: StopOnSignal, progress: Progress) -> None:
            progress.is_stopped = progress.step == step

        monkeypatch.setattr(StopOnSignal, "after_step", after_step)
        if not saving:
            monkeypatch.setattr(Progress, "save_now", lambda progress: None)

    return stop_after
