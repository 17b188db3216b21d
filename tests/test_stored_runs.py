"""Runs that earlier versions left unfinished resume and are evaluated as they were; see `stored_runs/README.md`."""

import functools

import pytest

import vit_jax
from tests.stored_runs import runs

STORED = [
    pytest.param(
        generation,
        kind,
        id=f"{kind}-{generation}",
        marks=[pytest.mark.slow] if runs.RUNS[kind].slow else [],
    )
    for generation in runs.generations()
    for kind in runs.read_expected(generation)
]
SAME_LOSS = 1e-4  # relative: XLA's kernels for other processors add in another order


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, compilation_cache):
    """`resumed(generation, kind)`: the workdir of a stored run, resumed to its end, and what that gave."""

    @functools.cache
    def resume(generation, kind):
        workdir = runs.unpack(generation, kind, tmp_path_factory.mktemp(kind))
        return workdir, runs.train(kind, workdir, compilation_cache=compilation_cache)

    return resume


def test_a_run_of_each_kind_is_stored_and_small():
    kinds = {
        "digits", "deit3", "native_sizes", "size_schedule", "lora", "muon", "gram", "segmentation",
        "segmentation_queries", "sum",
    }  # fmt: skip
    assert set(runs.RUNS) == kinds
    assert runs.generations()
    for generation in runs.generations():
        archives = list((runs.FOLDER / generation).glob("*.tar.xz"))
        names = {path.name.removesuffix(".tar.xz") for path in archives}
        assert names == set(runs.read_expected(generation)) == kinds
        assert sum(path.stat().st_size for path in archives) < 2_000_000


@pytest.mark.parametrize(("generation", "kind"), STORED)
def test_a_stored_run_resumes_where_it_was_stopped_and_learns_what_it_would_have(
    resumed, generation, kind
):
    _, trained = resumed(generation, kind)
    expected = runs.read_expected(generation)[kind]["losses"]
    assert list(trained.losses) == [int(step) for step in expected] == [5, 6, 7, 8]
    assert list(trained.losses.values()) == pytest.approx(list(expected.values()), rel=SAME_LOSS)
    assert trained.result["step"] == 8


@pytest.mark.parametrize(("generation", "kind"), STORED)
def test_a_stored_run_has_the_metrics_that_it_had(resumed, generation, kind, tmp_path):
    expected = runs.read_expected(generation)[kind]
    if runs.RUNS[kind].has_base:
        workdir, _ = resumed(generation, kind)
    else:
        workdir = runs.unpack(generation, kind, tmp_path)
    run = vit_jax.load_run(workdir)
    assert run.step == expected["evaluated_step"]
    metrics = run.evaluate()
    assert metrics == pytest.approx(expected["evaluation"], abs=runs.RUNS[kind].tolerance)
    if "loss" in expected["evaluation"]:
        assert metrics["loss"] == pytest.approx(expected["evaluation"]["loss"], rel=SAME_LOSS)
