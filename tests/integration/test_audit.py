"""Bits that flip while a run trains are found by the next audit, named, and undone."""

import re

import numpy as np
import pytest

import vit_jax
from tests.integration.test_reliability import all_bits
from tests.training.flips import Flips
from vit_jax.training.audit import CordonHost

SMALL = {"model__depth": 1, "log__tensorboard": False, "mesh__fsdp_min_size": 64}


def assert_same_bits(workdir, other) -> None:
    expected, got = all_bits(workdir), all_bits(other)
    assert expected.keys() == got.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def found(log: str) -> list[tuple[int, str, int]]:
    """(step, array, device) of what audits reported."""
    pattern = (
        r"audit after step (\d+): device (\d+) of process \d+ on \S+ holds wrong bits in (\S+) \("
    )
    return [(int(step), array, int(device)) for step, device, array in re.findall(pattern, log)]


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
    config = tiny_config(**SMALL, audit__every=1, audit__most=100, mesh__data=4, mesh__fsdp=2)
    expected = undisturbed(config)
    flips = Flips(range(1, 12), seed=3)
    flips.install(monkeypatch)
    with caplog.at_level("ERROR", logger="absl"):
        vit_jax.train(config, tmp_path)
    assert len(flips.made) == 11 and sorted(found(caplog.text)) == sorted(flips.made)
    assert "A good copy's bits took their place, and the run goes on" in caplog.text
    assert "Going back to the checkpoint of step" in caplog.text
    assert_same_bits(expected, tmp_path)


@pytest.mark.slow
def test_a_host_that_is_at_fault_too_often_is_to_be_cordoned(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(**SMALL, audit__every=1, audit__most=2)
    Flips((2, 6), only="params/position").install(monkeypatch)
    with pytest.raises(CordonHost, match=r"the host \S+ was at fault 2 times .*cordon it") as error:
        vit_jax.train(config, tmp_path)
    assert error.value.exit_code == 42
    assert vit_jax.train(config, tmp_path)["step"] == 12
