"""Bits that flip while a run trains are found by the next audit, named, and undone."""

import json
import re
import sys

import numpy as np
import pytest

import vit_jax
from tests.integration.conftest import HOSTS, TINY, Hosts
from tests.integration.test_reliability import all_bits
from tests.training.flips import Flips
from vit_jax.training.upkeep.audit import Audit, CordonHost

SMALL = {
    "model__depth": 1, "log__tensorboard": False, "mesh__fsdp_min_size": 64, "eval__evaluators": (),
}  # fmt: skip


def assert_same_bits(workdir, other) -> None:
    expected, got = all_bits(workdir), all_bits(other)
    assert expected.keys() == got.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def found(log: str) -> list[tuple[int, str, int]]:
    """(step, array, device) of what audits reported."""
    pattern = (
        r"audit after step (\d+): device (\d+) of process \d+ on \S+ holds wrong bits in ([^(]+) \("
    )
    return [
        (int(step), array, int(device))
        for step, device, arrays in re.findall(pattern, log)
        for array in arrays.split(", ")
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """`undisturbed(config)`: the workdir of a run without faults, made once for each config."""
    made = {}

    def of(config):
        key = config.to_json()
        if key not in made:
            made[key] = tmp_path_factory.mktemp("undisturbed")
            vit_jax.train(config, made[key])
        return made[key]

    return of


def test_flips_between_steps_are_named_and_undone(
    tiny_config, undisturbed, tmp_path, monkeypatch, caplog
):
    config = tiny_config(
        **SMALL, duration="7 steps", audit__every=1, audit__most=100, mesh__data=4, mesh__fsdp=2
    )
    expected = undisturbed(config)
    flips = Flips(range(1, 7), seed=3)
    flips.install(monkeypatch.setattr)
    with caplog.at_level("ERROR", logger="absl"):
        vit_jax.train(config, tmp_path)
    assert len(flips.made) == 6 and sorted(found(caplog.text)) == sorted(flips.made)
    assert "A good copy's bits took their place, and the run continues" in caplog.text
    assert "Going back to the checkpoint of step" in caplog.text
    assert_same_bits(expected, tmp_path)


@pytest.mark.slow
def test_a_host_that_is_at_fault_too_often_is_to_be_cordoned(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(**SMALL, audit__every=1, audit__most=2)
    Flips((2, 6), only="params/position").install(monkeypatch.setattr)
    with pytest.raises(CordonHost, match=r"the host \S+ was at fault 2 times .*cordon it") as error:
        vit_jax.train(config, tmp_path)
    assert error.value.exit_code == 42
    assert vit_jax.train(config, tmp_path)["step"] == 12


LONG = {
    "duration": "81 steps", "checkpoint.every": "5 steps", "audit.every": 1, "audit.most": 1000,
    "log.every": "20 steps", "log.tensorboard": False, "mesh.fsdp_min_size": 64,
}  # fmt: skip
DINO = {"objective.prototypes": 16, "objective.head_hidden": 16, "optim.ema": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, options",
    [
        ("digits.py", TINY | LONG | {"model.depth": 1, "mesh.data": 8}),
        ("dino.py:smoke", LONG | DINO | {"batch_size": 16, "mesh.data": 4, "mesh.fsdp": 2}),
    ],
    ids=["average, 1 x 8", "teacher, 4 x 2"],
)
def test_seventy_flips_are_named_and_undone(
    recipe, options, tmp_path, compilation_cache, monkeypatch, caplog
):
    config = vit_jax.load_config(f"configs/{recipe}")
    config.update_from_flattened_dict(options | {"compilation_cache": compilation_cache})
    vit_jax.train(config, tmp_path / "undisturbed")
    flips = Flips(range(1, 71), seed=7)
    flips.install(monkeypatch.setattr)
    with caplog.at_level("ERROR", logger="absl"):
        vit_jax.train(config, tmp_path / "run")
    assert len(flips.made) == 70 and sorted(found(caplog.text)) == sorted(flips.made)
    assert_same_bits(tmp_path / "undisturbed", tmp_path / "run")
    kinds = {name.split("/")[0] for _, name, _ in flips.made}
    assert kinds >= {"params", "opt_state", "teacher" if "dino" in recipe else "ema"}


@pytest.mark.slow
def test_what_steps_computed_with_is_undone_by_going_back(
    tiny_config, tmp_path, monkeypatch, caplog
):
    """Bits that flip within a step stay different where nothing is sharded: the audit that is due next
    finds them.
    """
    config = tiny_config(audit__every=4, model__depth=1, log__tensorboard=False)
    vit_jax.train(config, tmp_path / "undisturbed")
    flips = Flips((2, 7), only="params/", after_use=True)
    flips.install(monkeypatch.setattr)
    with caplog.at_level("ERROR", logger="absl"):
        vit_jax.train(config, tmp_path / "run")
    # The average has followed what was wrong.
    of_params = [fault for fault in found(caplog.text) if not fault[1].startswith("ema/")]
    assert of_params == [(step + -step % 4, *rest) for step, *rest in flips.made]
    assert "Steps may have computed with them. Going back to" in caplog.text
    assert_same_bits(tmp_path / "undisturbed", tmp_path / "run")


PROCESSES = """
import json, sys, vit_jax
from tests.training.flips import Flips
from vit_jax.devices import processes

workdir, options, last = sys.argv[1:]
processes.initialize()
config = vit_jax.load_config("digits")
config.update_from_flattened_dict(json.loads(options))
flips = Flips(range(1, int(last)), seed=9)
flips.install()
vit_jax.train(config, workdir)
print(json.dumps(flips.made))
"""


@pytest.mark.slow
def test_seventy_flips_in_four_processes_are_named_and_undone(tmp_path, compilation_cache):
    options = HOSTS | LONG | {"compilation_cache": compilation_cache, "log.every": "20 steps"}
    logs = []
    for name, last in (("undisturbed", 1), ("run", 71)):
        arguments = str(tmp_path / name), json.dumps(options), str(last)
        run = Hosts(tmp_path / f"logs {name}", [sys.executable, "-c", PROCESSES, *arguments], 4, 1)
        try:
            assert run.codes(1200) == [0] * 4, run.log(0)
        finally:
            run.kill()
        logs.append(run.log(0))
    made = [tuple(one) for one in json.loads(logs[1].splitlines()[-1])]
    assert len(made) == 70 and sorted(found(logs[1])) == sorted(made)
    assert "A good copy's bits took their place" in logs[1]
    assert_same_bits(tmp_path / "undisturbed", tmp_path / "run")


KINDS = {
    "data": ("digits.py", TINY),
    "fsdp": ("digits.py", TINY | {"mesh.data": 2, "mesh.fsdp": 4, "accumulate": 2}),
    "tensor": ("digits.py", TINY | {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}),
    "matrices": ("digits.py", TINY | {"optim.name": "adamuon", "model.dropout": 0.1}),
    "mae": ("mae.py:smoke", {"objective.depth": 1, "batch_size": 32}),
    "dino": ("dino.py:smoke", DINO | {"batch_size": 16}),
    "batch norm": ("localvit.py:smoke", {"batch_size": 32}),
    "sharpness": ("gsam.py:smoke", {"batch_size": 32}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_undisturbed_runs_raise_no_alarm(kind, tmp_path, compilation_cache, monkeypatch, caplog):
    recipe, options = KINDS[kind]
    config = vit_jax.load_config(f"configs/{recipe}")
    config.update_from_flattened_dict(
        options
        | LONG
        | {"duration": "126 steps", "checkpoint.every": "0 steps", "audit.replay_every": 25}
        | {"compilation_cache": compilation_cache}
    )
    audits, verify = [], Audit.verify

    def counted(audit, step, state):
        audits.append(step)
        return verify(audit, step, state)

    monkeypatch.setattr(Audit, "verify", counted)
    with caplog.at_level("ERROR", logger="absl"):
        vit_jax.train(config, tmp_path)
    assert len(audits) >= 125
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
