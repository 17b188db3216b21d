"""VTAB by command: of a task that is there, its rate is chosen and it is judged; of the others it is said."""

import json
import statistics

import pytest

import vit_jax
from tests.integration.conftest import TINY
from vit_jax.base.errors import ConfigError
from vit_jax.data.record import DataAbsent
from vit_jax.data.sources.known_sets import VTAB
from vit_jax.studies import vtab as vtab_module

# Digits under the name and with the splits of a task.
DIGITS = """
import dataclasses
from vit_jax.data import sources
from vit_jax.data.sources.digits import open_digits

def opened(config_data):
    digits = open_digits(config_data)
    splits = {"train800": "train[:800]", "val200": "train[800:1000]"}
    return dataclasses.replace(digits, aliases={**digits.aliases, **splits})

sources.register("vtab/dtd", opened)
"""


@pytest.mark.slow  # of its own only what the next tests have too; the rest is a sweep
def test_a_task_s_rate_is_chosen_and_absent_tasks_are_named(
    command, tmp_path, monkeypatch, compilation_cache
):
    monkeypatch.setenv("HOME", str(tmp_path))  # where TFDS would keep its data
    (tmp_path / "mine.py").write_text(DIGITS)
    config = vit_jax.load_config("configs/digits.py")
    changes = {"compilation_cache": compilation_cache, "duration": "1 steps"}
    config.update_from_flattened_dict(TINY | changes)
    vit_jax.train(config, tmp_path / "trained")
    flags = {
        "data.image_size": 32, "batch_size": 32, "accumulate": 1, "duration": "4 steps",
        "optim.warmup": "1 steps", "model.dtype": "float32", "compilation_cache": compilation_cache,
    }  # fmt: skip
    arguments = [
        "vtab", f"--checkpoint={tmp_path}/trained", f"--workdir={tmp_path}/runs", "--json",
        "--rates=0.001,0.03", f"--register={tmp_path}/mine.py",
        *(f"--config.{name}={value}" for name, value in flags.items()),
    ]  # fmt: skip
    code, out, err = command(*arguments)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert set(found["tasks"]) == {"vtab/dtd"} and set(found["absent"]) == set(VTAB) - {"vtab/dtd"}
    assert found["mean"] is None and found["groups"]["natural"] is None
    sweep = json.loads((tmp_path / "runs" / "dtd" / "sweep.json").read_text())
    assert (sweep["train"], sweep["select"], sweep["all"]) == (
        "train800",
        "val200",
        "train800+val200",
    )
    assert found["tasks"]["vtab/dtd"] == {
        "accuracy": sweep["seeds"][0]["accuracy"], "lr": sweep["chosen"]["optim.lr"],
    }  # fmt: skip
    assert "| dtd | " in vtab_module.text(found) and "| sun397 | absent" in vtab_module.text(found)


def test_the_mean_is_that_of_tasks_not_of_groups(tmp_path, monkeypatch):
    accuracy = {task: 0.05 * number for number, task in enumerate(VTAB, start=1)}

    def sweep(task, place, grid, *, select, seeds):
        assert (grid, select, seeds) == ({"optim.lr": [0.01]}, "val200", 1)
        return {"accuracy": {"mean": accuracy[task]}, "chosen": {"optim.lr": 0.01}}

    monkeypatch.setattr(vtab_module, "sweep", sweep)
    found = vtab_module.vtab(lambda task: task, tmp_path, rates=[0.01])
    assert found["mean"] == pytest.approx(statistics.fmean(accuracy.values()))
    sizes = {name: len(tasks) for name, tasks in vtab_module.GROUPS.items()}
    assert sizes == {"natural": 7, "specialized": 4, "structured": 8}
    assert found["groups"]["specialized"] == pytest.approx(0.05 * 9.5)
    assert json.loads((tmp_path / "vtab.json").read_text()) == found


def test_without_any_task_it_is_an_error(tmp_path, monkeypatch):
    def sweep(*_, **__):
        raise DataAbsent("not prepared")

    monkeypatch.setattr(vtab_module, "sweep", sweep)
    with pytest.raises(ConfigError, match="no task of VTAB is there: not prepared"):
        vtab_module.vtab(lambda task: task, tmp_path)
