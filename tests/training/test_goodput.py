"""Where the time of a run goes, over its restarts."""

import json
import time

import pytest
from etils import epath

from vit_jax.training.goodput import KINDS, Ledger


def test_every_second_counts_once_as_what_it_was_spent_on(tmp_path):
    began = time.monotonic()
    ledger = Ledger(epath.Path(tmp_path), write=True)
    ledger.training()
    with ledger.during("evaluate"):
        time.sleep(0.05)
    for _ in ledger.each(iter([1]), "input"):
        time.sleep(0.02)
    shares = ledger.shares()
    assert set(shares) == set(KINDS) and sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert ledger.seconds["evaluate"] == pytest.approx(0.05, abs=0.03)
    assert ledger.seconds["steps"] >= 0.02
    assert sum(ledger.seconds.values()) <= time.monotonic() - began


def test_what_a_restart_repeats_is_lost_and_the_time_between_is_told(tmp_path):
    seconds = dict.fromkeys(KINDS, 1.0) | {"steps": 100.0, "input": 10.0}
    entry = {"seconds": seconds, "written": time.time() - 7}
    (tmp_path / "goodput.json").write_text(json.dumps(entry))
    ledger = Ledger(epath.Path(tmp_path), write=True)
    ledger.resumed_from({"steps": 60.0, "input": 8.0})
    assert (ledger.seconds["steps"], ledger.seconds["input"]) == (60.0, 8.0)
    assert ledger.seconds["lost"] == 1 + 40 + 2
    assert ledger.seconds["down"] == pytest.approx(8, abs=0.5)
    ledger.write()
    assert json.loads((tmp_path / "goodput.json").read_text())["seconds"]["lost"] == 43
