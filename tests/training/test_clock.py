"""Where the time of a run goes, over its restarts, and what ends one in which nothing moves."""

import json
import time

import jax
import pytest
from etils import epath

from vit_jax.config import Hosts
from vit_jax.training.upkeep.clock import KINDS, Clock
from vit_jax.training.upkeep.save_times import SaveTimes


def test_every_second_counts_once_as_what_it_was_spent_on(tmp_path):
    began = time.monotonic()
    clock = Clock(epath.Path(tmp_path), Hosts(), write=True)
    clock.training()
    before = time.monotonic()
    with clock.during("evaluate"):
        started = time.monotonic()
        time.sleep(0.05)
        inside = time.monotonic() - started
    around = time.monotonic() - before
    for _ in clock.each(iter([1]), "input"):
        time.sleep(0.02)
    shares = clock.shares()
    assert set(shares) == set(KINDS) and sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert inside <= clock.seconds["evaluate"] <= around
    assert clock.seconds["steps"] >= 0.02
    assert sum(clock.seconds.values()) <= time.monotonic() - began


def test_what_a_restart_repeats_is_lost_and_the_time_between_is_told(tmp_path):
    seconds = dict.fromkeys(KINDS, 1.0) | {"steps": 100.0, "input": 10.0}
    before = time.time()
    entry = {"seconds": seconds, "written": before - 7}
    (tmp_path / "goodput.json").write_text(json.dumps(entry))
    clock = Clock(epath.Path(tmp_path), Hosts(), write=True)
    clock.resumed_from({"steps": 60.0, "input": 8.0}, 0.0)
    assert (clock.seconds["steps"], clock.seconds["input"]) == (60.0, 8.0)
    assert clock.seconds["lost"] == 1 + 40 + 2
    assert 8 <= clock.seconds["down"] <= 8 + time.time() - before
    clock.write()
    assert json.loads((tmp_path / "goodput.json").read_text())["seconds"]["lost"] == 43


@pytest.mark.parametrize("text", ["", '{"seconds": {"st', "[]", '{"other": 1}'])
def test_a_file_that_cannot_be_read_is_no_reason_to_stop(tmp_path, text):
    (tmp_path / "goodput.json").write_text(text)
    clock = Clock(epath.Path(tmp_path), Hosts(), write=True)
    assert sum(clock.seconds.values()) == 0
    clock.write()
    assert json.loads((tmp_path / "goodput.json").read_text())["seconds"]["start"] > 0


def test_steps_that_the_devices_still_work_on_are_not_counted_as_what_comes_after(tmp_path):
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: y @ y / 1000, x))
    x = jax.numpy.ones((500, 500))
    jax.block_until_ready(work(x))
    clock = Clock(epath.Path(tmp_path), Hosts(), write=True)
    clock.training()
    with clock.during("evaluate", after=work(x)):
        pass
    assert clock.seconds["steps"] > 5 * clock.seconds["evaluate"]


def test_a_save_is_due_by_time_after_any_step_whatever_is_logged():
    at_once = SaveTimes(1e-9, 0)
    assert at_once.is_due(1) and at_once.is_due(2)
    at_once.saved(2)
    assert at_once.is_due(3)
    assert not SaveTimes(0.0, 0).is_due(1) and not SaveTimes(60.0, 0).is_due(1)


def test_several_processes_ask_again_at_half_of_the_time_that_is_left():
    times = SaveTimes(1.0, 100)
    assert times._steps_to_wait(140, 20.0) == 40  # 2 steps a second, and 80 steps are left
    assert times._steps_to_wait(101, 0.001) == 1  # one that was only dispatched
    assert times._steps_to_wait(210, 55.0) == 5
    assert times._steps_to_wait(220, 61.0) == 1
