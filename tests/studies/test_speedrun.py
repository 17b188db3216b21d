"""`vit_jax report --speedrun` on runs made up with known times."""

import json

import pytest

from tests.studies.test_report import made_up
from vit_jax.base.errors import ConfigError
from vit_jax.studies import speedrun
from vit_jax.studies.report import report


def reached(folder, seconds, *, seed=0, entry="adamw", rate=1e-3, **extra):
    """A run's folder whose target of 60 % was reached after `seconds`."""
    fields = {"eval.target": 0.6, "eval.every": "1 epochs", "seed": seed, "optim.lr": rate}
    made_up(folder, fields, 0.61)
    result = json.loads((folder / "result.json").read_text())
    command = (
        f"vit_jax train --config=configs/speedrun.py:cifar10,{entry} --workdir={folder} "
        f"--config.seed={seed} --config.data.name=tar --config.data.path='/a b/cifar10.tar'"
    )
    result["reached"] = {
        "metric": "accuracy", "value": 0.61, "step": 20, "target": 0.6, "seconds": seconds,
        "restarted": False, "command": command, "commit": "abc1234", "hardware": "2 cores of X", **extra,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_entries_are_ranked_by_the_mean_over_their_seeds(tmp_path):
    for seed, seconds in enumerate((100.0, 110.0, 120.0)):
        reached(tmp_path / "E" / f"a{seed}", seconds, seed=seed)
        reached(tmp_path / "E" / f"b{seed}", seconds / 2, seed=seed, entry="muon")
    slow, fast = speedrun.rank([tmp_path / "E"])["entries"]
    assert (slow["seconds"], slow["low"], slow["high"]) == (110.0, 100.0, 120.0)
    assert slow["seeds"] == [0, 1, 2] and fast["seconds"] == 55.0
    assert fast["command"] == (
        "vit_jax train --config=configs/speedrun.py:cifar10,muon --config.data.name=tar"
    )
    table = speedrun.text(speedrun.rank([tmp_path / "E"]))
    row = next(line for line in table.splitlines() if "muon" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["55.0", "50.0 … 60.0", "0, 1, 2", "accuracy 60.00 %", "61.00 %"]
    assert cells[5:7] == ["2 cores of X", "abc1234"]


def test_a_report_of_runs_with_a_target_has_their_steps_to_it(tmp_path):
    for name, rate in (("a", 0.01), ("b", 0.001)):
        for seed in (0, 1, 2):
            folder = reached(tmp_path / "E" / f"{name}{seed}", 9.0, seed=seed, rate=rate)
            result = json.loads((folder / "result.json").read_text())
            result["reached"]["step"] = 1_000 + 100 * seed
            if (name, seed) == ("b", 2):
                del result["reached"]
            (folder / "result.json").write_text(json.dumps(result))
    found = report([tmp_path / "E"], tmp_path / "R")
    assert [one["steps_to_target"] for one in found["settings"]] == [
        [1000, 1100],
        [1000, 1100, 1200],
    ]
    text = (tmp_path / "R" / "report.md").read_text()
    assert "| steps to accuracy 60.00 % " in text and "![Steps to the target](steps_to" in text
    assert "| 1,050 (1,000 … 1,100), 1 did not |" in text and "| 1,100 (1,000 … 1,200) " in text


def test_other_hardware_or_another_commit_is_another_entry(tmp_path):
    reached(tmp_path / "E" / "a", 9.0)
    reached(tmp_path / "E" / "b", 3.0, hardware="8 x TPU v5 lite")
    reached(tmp_path / "E" / "c", 6.0, commit="abc1235-dirty")
    found = speedrun.rank([tmp_path / "E"])["entries"]
    assert [one["seconds"] for one in found] == [9.0, 6.0, 3.0]


def test_runs_without_a_time_are_notes(tmp_path):
    reached(tmp_path / "E" / "a", 9.0)
    reached(tmp_path / "E" / "b", 3.0, restarted=True)
    made_up(tmp_path / "E" / "c", {"eval.target": 0.6, "eval.every": "1 epochs"}, 0.5)
    result = speedrun.rank([tmp_path / "E"])
    assert len(result["entries"]) == 1 and result["notes"] == [
        "b was restarted, so that its time is not that of one process.",
        "c has not reached its target (done, accuracy 50.00 %).",
    ]


def test_runs_without_a_target_are_refused(tmp_path):
    made_up(tmp_path / "E" / "a", {}, 0.5)
    with pytest.raises(ConfigError, match="--config.eval.target=0.6"):
        speedrun.rank([tmp_path / "E"])
