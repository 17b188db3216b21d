"""Runs that go from four real processes, each standing for a host, to two and back."""

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

RUNS = {
    # By the same crops, flips and partners; the number of images varies by step.
    "native sizes with a budget": (
        "naflex.py:smoke",
        {
            "data.native_tokens": 16, "data.native_lengths": "((8,2),16)", "data.native_budget": 256,
            "data.native_multiple": 16, "augment.erasing": 0,
        },
    ),
    # By the same captions.
    "images and texts": ("image_text.py:smoke", {"augment.mixup": 0.0}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_goes_from_four_processes_to_two_and_back(hosts, tmp_path, kind):
    """The same images in the same order, and nearly the same parameters."""
    recipe, flags = RUNS[kind]
    flags = flags | {"audit.every": 0, "eval.evaluators": "()"}
    flags = [f"--config.{name}={value}" for name, value in flags.items()]
    one, moved = tmp_path / "one", tmp_path / "moved"
    whole = hosts(one, *flags, processes=1, config=recipe)
    assert whole.codes(900) == [0], whole.log(0)
    config = resolve(vit_jax.load_run(one).config)
    source = sources.open_train(config.data)
    order = order_of(source, config.seed, "uniform")
    ends = [views.images_before(config, step) for step in range(STEPS + 1)]
    assert len(set(np.diff(ends).tolist())) == (2 if config.data.native_budget else 1)
    steps = [order(np.arange(*pair)) for pair in itertools.pairwise(ends)]
    first = 0
    for processes, until in ((4, 3), (2, 7), (4, STEPS)):
        run = hosts(moved, *flags, *FSDP, processes=processes, seconds=0.01, config=recipe)
        if until < STEPS:
            run.until(lambda until=until: steps_done(moved) >= until)
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
