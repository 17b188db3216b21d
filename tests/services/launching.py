"""`vit_jax launch` in the process of the tests, with the training command's dry run in it too."""

import contextlib
import io
import sys

import pytest
from absl import flags

# What a real plan says, of which the command reads these; `test_checking` makes a real one.
PLAN = {
    "fits": True,
    "chips": 64,
    "hosts": 16,
    "memory": {"peak": 2**33, "capacity": 2**34},
    "run": {"hours": [1.0, 2.0, 3.0], "chip_hours": [64.0, 128.0, 192.0], "cost": [1.0, 2.0, 3.0]},
}


def forget_flags() -> None:
    """What a command of ours defined must not be there for the next one."""
    for name in list(flags.FLAGS):
        if flags.FLAGS.find_module_defining_flag(name).startswith("vit_jax."):
            delattr(flags.FLAGS, name)


def run_here(*words: str) -> tuple[int, str, str]:
    """`checking.run_vit_jax` without another process, where JAX would be imported again."""
    from vit_jax.commands.main import run

    out, err, code = io.StringIO(), io.StringIO(), 0
    arguments, sys.argv = sys.argv, ["vit_jax", *words]
    forget_flags()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = arguments
        forget_flags()
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def quick_check(monkeypatch):
    """The training command is checked in this process, and not compiled for TPUs."""
    from launch import checking
    from vit_jax.planning import elsewhere

    monkeypatch.setattr(checking, "run_vit_jax", run_here)
    monkeypatch.setattr(elsewhere, "make_plan", lambda *_, **__: PLAN)


@pytest.fixture
def launch(command, quick_check):
    """`launch(*words)`: exit code, standard output, standard error."""
    return lambda *words: command("launch", *words)
