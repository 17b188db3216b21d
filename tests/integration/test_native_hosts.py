"""Images at sizes of their own in several real processes, each standing for a host."""

import itertools
import signal

import numpy as np
import pytest

import vit_jax
from tests.integration.test_hosts import FSDP, STEPS, assert_close, newest
from tests.integration.test_reliability import losses, steps_done
from vit_jax.data import sources, views
from vit_jax.data.batches import order_of
from vit_jax.training.assembly import resolve


@pytest.mark.slow
def test_native_sizes_with_a_budget_go_from_four_processes_to_two_and_back(hosts, tmp_path):
    """The same images in the same order, and by the same crops, flips and partners nearly the same parameters."""
    flags = {
        "data.native_tokens": 16, "data.native_lengths": "((8,2),16)", "data.native_budget": 256,
        "data.native_multiple": 16, "augment.erasing": 0, "audit.every": 0, "eval.evaluators": "()",
    }  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in flags.items()]
    one, moved = tmp_path / "one", tmp_path / "moved"
    whole = hosts(one, *flags, processes=1, config="naflex.py:smoke")
    assert whole.codes(900) == [0], whole.log(0)
    config = resolve(vit_jax.load_run(one).config)
    source = sources.open_train(config.data)
    order = order_of(source, config.seed, "uniform")
    ends = [views.images_before(config, step) for step in range(STEPS + 1)]
    assert len(set(np.diff(ends).tolist())) == 2
    steps = [order(np.arange(*pair)) for pair in itertools.pairwise(ends)]
    first = 0
    for processes, until in ((4, 3), (2, 7), (4, STEPS)):
        run = hosts(
            moved, *flags, *FSDP, processes=processes, seconds=0.01, config="naflex.py:smoke"
        )
        if until < STEPS:
            run.until(lambda until=until: steps_done(moved) >= until, seconds=900)
            run.processes[1].send_signal(signal.SIGTERM)
        assert run.codes(900) == [42 if until < STEPS else 0] * processes, run.log(0)
        stop = newest(moved)
        for process in range(processes):
            read = np.loadtxt(run.folder / f"reads-{process}.txt", np.int64)[not first :]
            parts = [np.split(step, processes)[process] for step in steps[first:]]
            assert len(read) >= sum(map(len, parts[: stop - first]))  # and what was read ahead
            np.testing.assert_array_equal(read, np.concatenate(parts)[: len(read)])
        first = stop
    assert first == STEPS and losses(moved) == pytest.approx(losses(one), rel=1e-4)
    assert_close(one, moved)
