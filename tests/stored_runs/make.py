"""Stores runs, made by the code that this is run with: `python -m tests.stored_runs.make GENERATION` writes
GENERATION/KIND.tar.xz and GENERATION/expected.json into this folder, for all kinds in `runs.py`.

Each run is stopped by SIGTERM after half of its steps. What is expected of the others is what a second run gave, of the
same config, that nothing stopped. A generation that is there is never written over: see README.md.
"""

import json
import os
import pathlib
import shutil
import signal
import sys
import tarfile
import tempfile

# Sets the devices and the flags of XLA that tests have: before JAX is imported.
import tests.conftest  # noqa: F401
import vit_jax
from tests.stored_runs.runs import EXPECTED, FOLDER, RUNS, train
from vit_jax.training.upkeep.preemption import Interrupted

STOPPED_AFTER = 4  # steps, of the eight


def make(kind: str, folder: pathlib.Path) -> dict:
    """Leaves an unfinished run in `folder`/`kind`, and returns what is expected of it.

    Raises:
      SystemExit: it does not end where it should, or does not resume to the losses of the whole run.
    """
    whole = train(kind, folder / "whole")
    unfinished = folder / kind
    stop_half_way(kind, unfinished)
    resumed_workdir = shutil.copytree(unfinished, folder / "resumed")
    resumed = train(kind, resumed_workdir)
    second_half = {step: loss for step, loss in whole.losses.items() if step > STOPPED_AFTER}
    if resumed.losses != second_half:
        raise SystemExit(f"{kind}: the losses are {resumed.losses} if resumed, else {second_half}")
    run = vit_jax.load_run(resumed_workdir if RUNS[kind].has_base else unfinished)
    expected = {
        "losses": second_half,
        "evaluated_step": run.step,
        "evaluation": run.evaluate(),
    }
    shutil.rmtree(folder / "whole")
    shutil.rmtree(resumed_workdir)
    return expected


def stop_half_way(kind: str, workdir: pathlib.Path) -> None:
    """Trains a run that gets SIGTERM after half of its steps, as users and schedulers stop one."""

    def terminate(step: int, metrics: dict[str, float]) -> None:
        if step == STOPPED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(kind, workdir, callbacks=[terminate])
    except Interrupted as stopped:
        print(f"{kind}: {stopped}")
    else:
        raise SystemExit(f"{kind}: the run went on to its end")


def pack(workdir: pathlib.Path, archive: pathlib.Path) -> None:
    """Writes the archive of a run's folder, without the owner of its files."""

    def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = 0
        member.gid = 0
        member.uname = ""
        member.gname = ""
        return member

    with tarfile.open(archive, "w:xz", preset=9) as file:
        file.add(workdir, arcname=workdir.name, filter=without_owner)


def main(generation: str) -> None:
    """Makes and stores a run of every kind."""
    target = FOLDER / generation
    target.mkdir()  # It fails if the generation is there.
    expected = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for kind in RUNS:
            expected[kind] = make(kind, folder)
            pack(folder / kind, target / f"{kind}.tar.xz")
    (target / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
