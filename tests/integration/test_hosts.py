"""Several real processes on this machine, each standing for a host: the same run as one process, and
an end together, whatever happens to one of them.
"""

import json
import signal
import sys
import time

import numpy as np
import pytest

import vit_jax
from tests.integration.conftest import HOSTS, Hosts
from tests.integration.test_reliability import all_bits, bits, losses, steps_done
from vit_jax.data import sources
from vit_jax.data.order import batch_indices

BATCH, STEPS = 32, 12
FSDP = ("--config.mesh.data=1", "--config.mesh.fsdp=-1", "--config.mesh.fsdp_min_size=0")


def assert_read_in_order(
    run, processes: int, first: int, config: str = "digits.py", last: int = STEPS
) -> None:
    """The steps from `first` up to `last` got the examples of the global order, each process its part,
    in order and none twice but the first of all.
    """
    read = [np.loadtxt(run.folder / f"reads-{i}.txt", np.int64) for i in range(processes)]
    size = len(sources.open_train(vit_jax.load_config(f"configs/{config}").data))
    steps = [batch_indices(0, step, BATCH, size) for step in range(first, last)]
    looked_at = [] if first else steps[0][:1]  # before a new run begins, by every process
    for part, expected in zip(read, np.split(np.stack(steps), processes, axis=1), strict=True):
        np.testing.assert_array_equal(part, [*looked_at, *expected.reshape(-1)])


def assert_close(workdir, other) -> None:
    """All parameters within 1e-5, except the biases of keys: softmax does not depend on them, so
    their gradient is rounding noise, which Adam divides by its own size.
    """
    expected, got = bits(workdir), bits(other)
    assert expected.keys() == got.keys()
    for name in expected:
        if name.endswith("qkv/bias"):
            expected[name], got[name] = expected[name][:, ::2], got[name][:, ::2]
        np.testing.assert_allclose(got[name], expected[name], atol=1e-5, err_msg=name)


def newest(workdir) -> int:
    return max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, compilation_cache):
    """The workdir of the same run by one process, this one, with eight devices."""
    config = vit_jax.load_config("configs/digits.py")
    # Audits, which several processes make, change no bit.
    changes = {"compilation_cache": compilation_cache, "audit.every": 0}
    config.update_from_flattened_dict(HOSTS | changes)
    workdir = tmp_path_factory.mktemp("one_process")
    vit_jax.train(config, workdir)
    return workdir


@pytest.mark.slow
def test_two_processes_train_the_run_of_one(hosts, one_process, tmp_path):
    run = hosts(tmp_path, *FSDP)
    assert run.codes() == [0, 0], run.log(0) + run.log(1)
    assert_read_in_order(run, 2, 0)
    assert_close(one_process, tmp_path)
    expected, got = (json.loads((w / "result.json").read_text()) for w in (one_process, tmp_path))
    for name in ("accuracy", "top5_accuracy", "examples", "step"):
        assert got[name] == expected[name], name
    assert got["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert "[0] " in run.log(0) and "step 12  eval/accuracy" in run.log(0)
    assert "step 12" not in run.log(1) and "trained" not in run.log(1)


@pytest.mark.slow
@pytest.mark.parametrize("processes, devices", [(1, 1), (2, 2), (4, 1)])
def test_any_number_of_processes_trains_the_run_of_one(
    hosts, one_process, tmp_path, processes, devices
):
    run = hosts(tmp_path, *FSDP, processes=processes, devices=devices)
    assert run.codes() == [0] * processes, run.log(0)
    # With two devices in a process, a process has the rows of both.
    assert_read_in_order(run, processes, 0)
    assert_close(one_process, tmp_path)


CALLED_BACK = """
import json, sys, vit_jax
from vit_jax.devices import processes

def ending(step, metrics):
    print("called at", step, flush=True)
    return step == 3

def broken(step, metrics):
    if step == 2:
        raise RuntimeError("no space left for plots")

workdir, options, function = sys.argv[1:]
processes.initialize()
config = vit_jax.load_config("digits")
config.update_from_flattened_dict(json.loads(options))
try:
    print("ended at", vit_jax.train(config, workdir, callbacks=[globals()[function]])["step"])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_a_callback_of_the_first_process_ends_all_processes(tmp_path, compilation_cache):
    options = json.dumps(HOSTS | {"compilation_cache": compilation_cache})
    for function in ("broken", "ending"):  # which continues the run that was saved
        command = [sys.executable, "-c", CALLED_BACK, str(tmp_path / "run"), options, function]
        run = Hosts(tmp_path / function, command, 2, 1)
        try:
            assert run.codes() == [0, 0], run.log(0) + run.log(1)
        finally:
            run.kill()
        logs = run.log(0), run.log(1)
        if function == "broken":
            assert "RuntimeError: no space left for plots" in logs[0]
            assert "UserError: the callback broken failed at step 2 in the first" in logs[1]
            assert newest(tmp_path / "run") == 2
    assert "called at 3" in logs[0] and "called at" not in logs[1]
    assert all("ended at 3" in log for log in logs)


_SMALL_HEAD = (
    "--config.objective.prototypes=16",
    "--config.objective.head_hidden=16",
    "--config.objective.frozen_prototypes=2 steps",
)
# Of methods without labels: their config, and flags that make it small.
UNLABELLED = {
    "mae": ("mae.py:smoke", ("--config.objective.depth=1",)),
    "dino, centre": (
        "dino.py:smoke",
        _SMALL_HEAD,
    ),
    "dino, sinkhorn": (
        "dino.py:smoke",
        (*_SMALL_HEAD, "--config.objective.centering=sinkhorn", "--config.objective.two_heads=True",
         "--config.accumulate=2"),
    ),
    # The texts of every process meet the images of all.
    "images and texts, sigmoid": ("image_text.py:smoke", ()),
    "images and texts, softmax": (
        "image_text.py:smoke",
        ("--config.objective.loss=softmax", "--config.objective.text=clip", "--config.objective.embed=16"),
    ),
    "a sum with masked patches": ("sum.py:smoke", ()),
    "texts for a frozen tower": (
        "image_text.py:smoke",
        ("--config.objective.image_blocks=1", "--config.model.pool=token",
         "--config.optim.freeze=('(?!objective/).*',)"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", UNLABELLED)
def test_four_processes_learn_without_labels_what_one_learns(hosts, tmp_path, method):
    """Views, masks, centres, Sinkhorn-Knopp and KoLeo are those of the whole batch: losses and all of
    the state but for rounding. Adam divides rounding errors by their own size where there is no
    gradient, unless its epsilon is larger.
    """
    config, flags = UNLABELLED[method]
    flags += (
        "--config.optim.eps=1e-4",
        "--config.eval.evaluators=()",
        "--config.augment.mixup=0.0",
    )
    state, loss = {}, {}
    for processes in (1, 4):
        workdir = tmp_path / f"of_{processes}"
        cut = FSDP if processes > 1 else ()
        run = hosts(workdir, *cut, *flags, processes=processes, config=config)
        assert run.codes() == [0] * processes, run.log(0)
        assert_read_in_order(run, processes, 0, config)
        state[processes], loss[processes] = all_bits(workdir), losses(workdir)
    assert len(loss[1]) == STEPS and loss[4] == pytest.approx(loss[1], rel=1e-5)
    assert state[4].keys() == state[1].keys()
    for name, expected in state[1].items():
        if not name.startswith(("fingerprint", "opt_state")):
            np.testing.assert_allclose(state[4][name], expected, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_neighbours_and_few_shots_of_four_processes_are_those_of_one(hosts, tmp_path):
    entries = ("accuracy", ("knn", {"k": (3, 10)}), ("few_shot", {"shots": (2, 5)}))
    changes = [
        f"--config.eval.evaluators={entries}",
        "--config.optim.lr=0",
        "--config.duration=1 steps",
    ]
    for processes in (1, 4):
        run = hosts(tmp_path / f"of_{processes}", *changes, processes=processes)
        assert run.codes() == [0] * processes, run.log(0)
    one, four = (json.loads((tmp_path / f"of_{n}/result.json").read_text()) for n in (1, 4))
    names = [name for name in one if name.startswith(("knn", "few_shot"))]
    assert len(names) >= 4
    # Neighbours are counted; what is fitted by least squares may round otherwise.
    assert {n: one[n] for n in names} == pytest.approx({n: four[n] for n in names}, abs=1e-12)


@pytest.mark.slow
def test_four_processes_count_what_one_counts_where_batches_do_not_divide_the_set(
    one_process, tmp_path
):
    found, tables = {}, {}
    for processes in (1, 4):
        out = tmp_path / f"judged_{processes}"
        entries = ("accuracy", ("classification", {"out": str(out), "images": True}), "knn")
        run = Hosts(
            tmp_path / f"of_{processes}",
            [sys.executable, "-m", "vit_jax", "evaluate", f"--checkpoint={one_process}", "--json", "--coordinator=auto",
             f"--config.eval.evaluators={entries}", "--config.batch_size=24"],
            processes, devices=1,
        )  # fmt: skip
        try:
            assert run.codes() == [0] * processes, run.log(0)
        finally:
            run.kill()
        results = [line for line in run.log(0).splitlines() if line.startswith("{")]
        found[processes] = json.loads(results[-1])
        assert not any("{" in run.log(i) for i in range(1, processes))
        tables[processes] = {
            name: (out / f"{name}.csv").read_text() for name in ("confusion", "images")
        }
    one, four = found[1], found[4]
    assert (
        one["examples"] == one["classification/examples"] == one["knn/examples"] == 359
    )  # 14 x 24 + 23
    for name in one:
        if name.endswith(("accuracy", "examples", "precision", "recall", "f1")):
            assert four[name] == one[name], name
    assert four == pytest.approx(one, abs=1e-5)
    assert tables[4]["confusion"] == tables[1]["confusion"]
    rows = [[line.split(",")[:3] for line in tables[n]["images"].splitlines()] for n in (1, 4)]
    assert rows[0] == rows[1] and len(rows[0]) == 360


@pytest.mark.slow
def test_four_processes_go_on_where_one_was_stopped(hosts, one_process, tmp_path):
    one = hosts(tmp_path, processes=1, devices=2, seconds=0.012)
    one.until(lambda: steps_done(tmp_path) >= 3)
    one.processes[0].send_signal(signal.SIGINT)
    assert one.codes() == [42], one.log(0)
    stopped = newest(tmp_path)
    four = hosts(tmp_path, *FSDP, processes=4)
    assert four.codes() == [0] * 4, four.log(0)
    assert_read_in_order(four, 4, stopped)
    assert_close(one_process, tmp_path)


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_its_message_and_code(hosts, tmp_path):
    run = hosts(tmp_path, *FSDP, process=1, example=48, action="fail")
    assert run.codes() == [1, 1], run.log(0) + run.log(1)
    assert "vit_jax[1]: the disk of process 1 has crashed" in run.log(1)
    assert "process 1 ended the run: the disk of process 1 has crashed" in run.log(0)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0], ids=["worker", "coordinator"])
def test_when_one_process_is_killed_the_others_end_soon(hosts, tmp_path, killed):
    run = hosts(tmp_path, *FSDP, "--config.hosts.heartbeat_seconds=10", seconds=0.024)
    run.until(lambda: steps_done(tmp_path) >= 5)
    run.processes[killed].kill()
    began = time.monotonic()
    codes = run.codes(60)
    assert time.monotonic() - began < 40
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] in (42, -signal.SIGABRT), run.log(1 - killed)


@pytest.mark.slow
def test_a_process_that_is_stuck_is_found_and_every_stack_told(hosts, tmp_path):
    run = hosts(
        tmp_path, *FSDP, "--config.hosts.step_minutes=0.05", process=1, example=96, action="block"
    )  # fmt: skip
    assert run.codes() == [42, 42], run.log(0) + run.log(1)
    for process in range(2):
        assert "nothing has moved for 0.05 minutes" in run.log(process)
    assert "observed.py" in run.log(1).split("Thread ", 1)[1], "the stack of the reading thread"
    assert "/fifo" in run.log(1).split("opened last:")[1], "the file it waits for"
    assert newest(tmp_path) == 4


@pytest.mark.slow
def test_a_run_killed_after_a_rollback_goes_on_with_the_same_data(hosts, tmp_path):
    examples = len(sources.open_train(vit_jax.load_config("configs/digits.py").data))
    bad, options = (
        6,
        (
            "--config.nonfinite=rollback",
            "--config.spike.factor=1.5",
            "--config.spike.memory=4",
            "--config.objective.loss=sigmoid",
            "--config.model.head_bias=-6.0",
        ),
    )
    spoiled = [int(i) for i in batch_indices(0, bad, BATCH, examples)]
    whole = hosts(tmp_path / "whole", *FSDP, *options, spoiled=spoiled)
    assert whole.codes() == [0, 0], whole.log(0)
    assert f"on without the data of steps {bad} to {bad}" in whole.log(0)

    run = hosts(tmp_path / "run", *FSDP, *options, spoiled=spoiled, seconds=0.018)
    run.until((tmp_path / "run" / "left_out.json").exists)
    run.processes[1].kill()
    run.codes()
    rest = hosts(tmp_path / "run", *FSDP, *options, spoiled=spoiled)
    assert rest.codes() == [0, 0], rest.log(0)
    assert "Going back" not in rest.log(0)
    expected, got = bits(tmp_path / "whole"), bits(tmp_path / "run")
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def assert_named(run, slow: int) -> None:
    """The first process names one that is slow, once, and no other process does."""
    named = [line for line in run.log(0).splitlines() if "holds up all others" in line]
    assert len(named) == 1 and f"Process {slow} on " in named[0], run.log(0)
    assert not any("holds up" in run.log(process) for process in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("slow", [2, 0])
def test_the_host_that_holds_up_the_others_is_named(hosts, tmp_path, slow):
    options = (
        "--config.batch_size=33",
        "--config.eval.batch_size=33",
        "--config.log.every=2 steps",
        "--config.checkpoint.every=0 steps",
        "--config.duration=20 steps",
        "--config.eval.evaluators=()",
        "--config.audit.every=0",
        "--config.augment.mixup=0.0",
    )
    run = hosts(tmp_path, *options, processes=3, slow=slow, seconds=0.06)
    assert run.codes() == [0, 0, 0], run.log(0)
    assert_named(run, slow)


@pytest.mark.slow
def test_hosts_that_are_equally_slow_are_not_named(hosts, tmp_path):
    run = hosts(tmp_path, "--config.log.every=2 steps", seconds=0.06)
    assert run.codes() == [0, 0], run.log(0)
    assert "holds up" not in run.log(0)


@pytest.mark.slow
def test_when_one_process_is_frozen_the_others_end_after_the_heartbeat(hosts, tmp_path):
    run = hosts(tmp_path, *FSDP, "--config.hosts.heartbeat_seconds=10", seconds=0.024)
    run.until(lambda: steps_done(tmp_path) >= 5)
    run.processes[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert run.processes[0].wait(60) in (42, -signal.SIGABRT), run.log(0)
    assert time.monotonic() - began < 50


@pytest.mark.slow
def test_four_processes_count_the_pixels_and_things_that_one_counts(hosts, tmp_path):
    """Mean IoU and panoptic quality are of integers, summed over processes; 22 scenes do not divide among them."""
    flags = (
        "--config.init_from=", "--config.augment.mixup=0.0",
        "--config.model.name=ViT-mu/8", "--config.data.mean=(0.5,)",
        "--config.data.std=(0.5,)", "--config.data.interpolation=bilinear", "--config.optim.name=adamw",
        "--config.data.name=digit_things", "--config.data.eval_split=test[:22]", "--config.optim.lr=0",
        "--config.optim.warmup=0 steps", "--config.duration=1 steps", "--config.objective.segments=4",
        "--config.objective.queries=5", "--config.objective.blocks=1",
        "--config.eval.evaluators=(('segmentation',{'score':0.0,'overlap':0.0}),)",
    )  # fmt: skip
    for processes in (1, 4):
        run = hosts(
            tmp_path / f"of_{processes}",
            *flags,
            processes=processes,
            config="segmentation.py:smoke,panoptic",
        )
        assert run.codes() == [0] * processes, run.log(0)
    one, four = (json.loads((tmp_path / f"of_{n}/result.json").read_text()) for n in (1, 4))
    names = [n for n in one if n.startswith(("mean_iou", "iou/", "pq", "sq", "rq", "images"))]
    assert {"mean_iou", "pq", "images"} <= set(names) and one["images"] == 22
    assert {n: four[n] for n in names} == {n: one[n] for n in names}
