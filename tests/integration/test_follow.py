"""`evaluate --follow`: beside a run that trains, killed and started again, and asked for what cannot be."""

import concurrent.futures
import json
import re
import shutil
import signal
import threading

import pytest
from etils import epath

import vit_jax
from tests.waiting import PATIENCE, until
from vit_jax.base import lock
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.checkpoints import descriptions, pins, reading
from vit_jax.evaluation.run import evaluate_run
from vit_jax.prediction.overrides import load_to_evaluate
from vit_jax.training.upkeep import follow as module
from vit_jax.training.upkeep.follow import What, follow


@pytest.fixture(scope="module")
def finished(finished_run):
    """The workdir of a run of 12 steps with checkpoints 4, 8 and 12."""
    return finished_run.workdir


@pytest.fixture
def under_way(finished, tmp_path):
    """`under_way(*steps)`: a workdir with these checkpoints of that run, which is not done; again for
    further ones.
    """
    workdir = tmp_path / "run"

    def make(*steps: int):
        (workdir / "checkpoints").mkdir(parents=True, exist_ok=True)
        shutil.copy(finished / "config.py", workdir)
        for step in steps:
            # As a checkpoint is saved: under another name, until it is whole.
            new = workdir / "new"
            shutil.copytree(finished / "checkpoints" / str(step), new)
            new.rename(workdir / "checkpoints" / str(step))
        return workdir

    return make


def lines(workdir, name: str = "accuracy") -> list[dict]:
    path = workdir / "evaluations" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_checkpoint_is_evaluated_once_as_evaluate_does(finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "4")
    result = follow(workdir, What())
    assert result["steps"] == [8, 12] and result["skipped"] == {}
    for line in lines(workdir, "evaluation"):
        run, config = load_to_evaluate(workdir / "checkpoints" / str(line["step"]), [])
        expected, _ = evaluate_run(run, config)
        assert {n: line[f"eval/{n}"] for n in expected} == expected
    (events,) = (workdir / "tensorboard" / "evaluation").glob("events*")
    assert scalars(events)["eval/accuracy"] == [
        (line["step"], pytest.approx(line["eval/accuracy"]))
        for line in lines(workdir, "evaluation")
    ]
    assert follow(workdir, What())["steps"] == []

    # A kill in the middle of a line: this checkpoint is evaluated again, and no other.
    path = workdir / "evaluations" / "evaluation.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert follow(workdir, What())["steps"] == [12]
    assert [line["step"] for line in lines(workdir, "evaluation")] == [8, 12]


def scalars(path) -> dict[str, list[tuple[int, float]]]:
    """What is in a file of TensorBoard's events."""
    # Here, not above: the run before has imported it without PyTorch, which takes seconds.
    from tensorboardX.proto import event_pb2

    content, found = path.read_bytes(), {}
    while content:
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        content = content[16 + length :]
    return found


def test_a_follower_waits_is_stopped_goes_on_and_ends_with_the_run(cli, command, under_way, caplog):
    workdir = under_way()
    arguments = ("evaluate", "--follow", f"--checkpoint={workdir}", "--evaluators=accuracy")

    def end_run():
        """Once step 8 is evaluated, step 4 is deleted, as a run does with old ones, and the last is saved."""
        until(lambda: "waiting for a checkpoint after step 8" in caplog.text)
        shutil.rmtree(workdir / "checkpoints" / "4")
        under_way(12)

    process = cli(*arguments)
    until(lambda: "waiting for the first checkpoint" in process.stderr.readline(), process)
    under_way(4)
    until(lambda: len(lines(workdir)) == 1, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 42 and "stopped by SIGTERM" in err, err
    assert "Traceback" not in err

    under_way(8)
    with concurrent.futures.ThreadPoolExecutor() as threads, caplog.at_level("INFO"):
        run = threads.submit(end_run)
        code, out, err = command(*arguments, "--json")
        run.result()
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["steps"] == [8, 12] and result["skipped"] == {}
    assert [line["step"] for line in lines(workdir)] == [4, 8, 12]
    assert "has steps 4 already" in caplog.text
    assert len(list((workdir / "tensorboard" / "accuracy").iterdir())) == 2  # a file for each start


def test_a_checkpoint_that_is_removed_before_its_turn_is_skipped_with_a_sentence(
    under_way, finished, caplog
):
    workdir = under_way(4, 8)

    def watch(batches):
        """While step 4 is evaluated, the run saves its last checkpoint and deletes one."""
        if not (workdir / "checkpoints" / "12").exists():
            shutil.rmtree(workdir / "checkpoints" / "8")
            under_way(12)
        return batches

    with caplog.at_level("WARNING"):
        result = follow(workdir, What(), watch)
    assert result["steps"] == [4, 12] and list(result["skipped"]) == ["8"]
    assert "checkpoint 8 of" in caplog.text and "was removed before" in caplog.text


@pytest.mark.slow
def test_a_run_keeps_what_a_slower_follower_has_not_read(tiny_config, tmp_path):
    config = tiny_config(
        duration="8 steps", checkpoint__every="1 steps", checkpoint__keep=1, checkpoint__best=False
    )
    workdir, evaluated = tmp_path / "run", threading.Event()

    def watch(batches):
        """The run ends before the first evaluation does."""
        run.result()
        evaluated.set()
        return batches

    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(follow, workdir, What(), watch)
        until((workdir / "evaluations" / ".evaluation.pin").exists)
        run = threads.submit(vit_jax.train, config, workdir)
        result = waiting.result()
    assert evaluated.is_set() and result["steps"] == [*range(1, 9)] and result["skipped"] == {}
    # Without a follower: what a pin left behind asks for does not count.
    (workdir / "evaluations" / ".evaluation.pin").write_text('{"from": 0}')
    saved = reading.saved_steps(epath.Path(workdir / "checkpoints"))
    assert saved == [*range(1, 9)]
    assert pins.pinned(epath.Path(workdir), saved, most=10) == set()


def test_followers_hold_no_more_than_the_run_allows(tmp_path):
    workdir = epath.Path(tmp_path)
    (workdir / pins.FOLDER).mkdir()
    for name, first in (("a", 4), ("b", 7)):
        pins.Pin(workdir, name).keep_from(first)
    with lock.Lock(workdir / pins.FOLDER, name=pins.lock_name("a")):
        assert pins.pinned(workdir, [*range(10)], most=3) == {4, 5, 6}
        with lock.Lock(workdir / pins.FOLDER, name=pins.lock_name("b")):
            assert pins.pinned(workdir, [*range(10)], most=2) == {4, 5, 7, 8}
            assert pins.pinned(workdir, [*range(10)], most=0) == set()


def test_a_checkpoint_that_is_removed_while_it_is_read_is_skipped_too(
    under_way, monkeypatch, caplog
):
    """In a bucket its folder is there in one answer and not in the next."""
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.01)
    workdir, load_to_evaluate = under_way(4, 8), module.load_to_evaluate

    def load(folder, *arguments, **options):
        if folder.name == "8":
            shutil.rmtree(folder)
            under_way(12)
            list(folder.iterdir())
        return load_to_evaluate(folder, *arguments, **options)

    monkeypatch.setattr(module, "load_to_evaluate", load)
    with caplog.at_level("WARNING"):
        result = follow(workdir, What())
    assert result["steps"] == [4, 12] and "was removed before" in result["skipped"]["8"]
    assert "checkpoint 8 cannot be read: [Errno 2]" in caplog.text


def test_storage_that_fails_for_a_while_is_tried_again(under_way, finished, monkeypatch, caplog):
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.01)
    workdir, saved_steps, looks = under_way(12), reading.saved_steps, []

    def failing(folder):
        looks.append(folder)
        if len(looks) < 4:
            raise OSError("503 Service Unavailable")
        return saved_steps(folder)

    monkeypatch.setattr(module.reading, "saved_steps", failing)
    with caplog.at_level("WARNING"):
        assert follow(workdir, What())["steps"] == [12]
    assert caplog.text.count("cannot be read (503 Service Unavailable): trying again") == 3


def test_a_damaged_checkpoint_is_skipped_after_some_tries(under_way, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.01)
    workdir = under_way(8, 12)
    shutil.rmtree(workdir / "checkpoints" / "8" / "state" / "d")
    result = follow(workdir, What())
    assert result["steps"] == [12] and "damaged" in result["skipped"]["8"]


def test_a_run_that_still_trains_is_followed_on_although_an_earlier_one_was_done(
    finished, tmp_path, monkeypatch
):
    """As one that is made longer: its result.json and last checkpoint are those of the shorter one."""
    workdir, waited = shutil.copytree(finished, tmp_path / "run"), []

    def wait(pause, newest):
        waited.append(newest)
        held.__exit__()

    monkeypatch.setattr(module._Pause, "wait", wait)
    held = module.lock.Lock(reading.places.locate(workdir)).__enter__()
    assert follow(workdir, What())["steps"] == [4, 8, 12] and waited == [12]


def test_a_workdir_that_disappears_ends_it_with_a_sentence_after_a_while(under_way, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(module, "_GONE_SECONDS", 0.05)
    workdir = under_way(4)

    def wait(pause, newest):
        shutil.rmtree(workdir)

    monkeypatch.setattr(module._Pause, "wait", wait)
    with pytest.raises(UserError, match=r"could not be read for \d+ s: .* does not exist any more"):
        follow(workdir, What())


def test_a_run_in_a_bucket_is_followed_there(finished, bucket):
    workdir = epath.Path(bucket) / "run"
    for path in finished.rglob("*"):
        if path.is_file():
            (workdir / path.relative_to(finished)).write_bytes(path.read_bytes())
    for step in (4, 8, 12):
        (workdir / "checkpoints" / str(step) / reading.COMMITTED).write_text("")
    assert follow(workdir, What())["steps"] == [4, 8, 12]
    assert follow(workdir, What())["steps"] == []
    names = {path.name for path in (workdir / "evaluations").iterdir()}
    assert names == {"evaluation.jsonl"} and len(lines(workdir, "evaluation")) == 3
    tags = [scalars(file) for file in (workdir / "tensorboard" / "evaluation").iterdir()]
    assert sorted(len(found.get("eval/accuracy", ())) for found in tags) == [0, 3] or len(tags) == 1


def test_two_processes_do_not_write_one_series(finished, tmp_path, monkeypatch):
    workdir = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr(
        module.lock.Lock.__init__,
        "__kwdefaults__",
        {**module.lock.Lock.__init__.__kwdefaults__, "patience": 0.1},
    )
    (workdir / "evaluations").mkdir()
    with module.lock.Lock(reading.places.locate(workdir / "evaluations"), name=".evaluation.lock"):
        with pytest.raises(
            module.lock.Locked, match="another process follows .* set another --name"
        ):
            follow(workdir, What())
        assert follow(workdir, What(name="second"))["steps"] == [4, 8, 12]


def test_two_series_need_two_names(finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "run")
    half = (("data.eval_split", "test[:50%]"),)
    follow(workdir, What())
    with pytest.raises(
        ConfigError, match=r"settings = \{\} \(now .*data.eval_split.* set --name=NAME"
    ):
        follow(workdir, What(half))
    assert follow(workdir, What(half, name="half"))["examples"] == 180
    faster = What((*half, ("eval.batch_size", "16")), name="half")
    assert follow(workdir, faster)["steps"] == []


@pytest.mark.parametrize(
    ("place", "arguments", "message"),
    [
        ("checkpoints", (), "set --checkpoint=WORKDIR"),
        ("checkpoints/8", (), "set --checkpoint=WORKDIR"),
        ("result.json", (), "result.json is a file"),
        ("checkpoints/8/state", (), "set --checkpoint=WORKDIR"),
        ("tensorboard", (), "is not a run's workdir"),
        ("nowhere/run", (), "there is no folder .*nowhere"),
        ("", ("--suite=imagnet",), "no such suite; did you mean 'imagenet'"),
        ("", ("--evaluators=acuracy",), "no evaluator 'acuracy'; did you mean 'accuracy'"),
        ("", ("--config.data.nam=x",), "config.data has no field 'nam'|data.nam"),
        ("", ("--config.optim.lr=1",), "evaluate cannot use config.optim.lr"),
        ("", ("--name=a/b",), "--name=a/b names a file"),
        ("", ("--model=heads=3",), "without --model"),
        ("", ("--budget=1",), "--budget"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(command, finished, place, arguments, message):
    before = sorted(finished.rglob("*"))
    code, _, err = command("evaluate", "--follow", f"--checkpoint={finished / place}", *arguments)
    assert code == 2 and "Traceback" not in err
    assert re.search(message, err), err
    assert [p for p in sorted(finished.rglob("*")) if p not in before] == []


def test_a_model_that_needs_a_file_to_register_is_reported_as_such(command, under_way):
    workdir = under_way(12)
    path = workdir / "checkpoints" / "12" / "description" / "metadata"
    description = json.loads(path.read_text())
    description.pop("sha256")
    description["model"]["name"] = description["config"]["model"]["name"] = "Guest-B/16"
    path.write_text(json.dumps(descriptions.sealed(description)))
    code, _, err = command("evaluate", "--follow", f"--checkpoint={workdir}")
    assert code == 2 and "Guest-B/16" in err and "--register" in err, err
