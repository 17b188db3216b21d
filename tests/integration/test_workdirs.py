"""What lies in a run's folder: damaged, cut short, locked, not writable for a moment."""

import errno
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from etils import epath

import vit_jax
from tests.repeats import slow_unless
from tests.waiting import PATIENCE, until
from vit_jax.base import buckets, lock
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.checkpoints import committing, descriptions, reading
from vit_jax.devices import processes
from vit_jax.interchange import formats
from vit_jax.training import guards
from vit_jax.training.upkeep.preemption import Interrupted
from vit_jax.training.upkeep.writers import JsonLinesWriter


def flip(file: pathlib.Path, seed: int) -> None:
    content = bytearray(file.read_bytes())
    bit = random.Random(seed).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.parametrize("seed", slow_unless([0], range(6)))
def test_a_flipped_bit_in_a_description_falls_back_to_the_checkpoint_before(
    finished_run, seed, tmp_path, caplog
):
    workdir, result, config = finished_run
    copy = tmp_path / "run"
    shutil.copytree(workdir, copy)
    flip(copy / "checkpoints" / "12" / "description" / "metadata", seed)
    again = vit_jax.train(config, copy)
    assert again["accuracy"] == result["accuracy"] and again["step"] == 12
    assert "checkpoint of step 12 is damaged" in caplog.text


def test_a_description_with_another_value_is_not_the_one_that_was_saved():
    said = {"config": {"seed": 1}, "model": {}, "classes": ["a"], "training_data": "0123"}
    sealed = descriptions.sealed(said)
    assert descriptions.unsealed(sealed) == said
    for change in ({"config": {"seed": 3}}, {"classes": ["b"]}, {"more": 0}):
        assert descriptions.unsealed(sealed | change) is None


def test_a_description_of_an_earlier_version_needs_no_seal(finished_run, tmp_path):
    workdir = finished_run.workdir
    file = workdir / "checkpoints" / "12" / "description" / "metadata"
    description = json.loads(file.read_text())
    del description["sha256"], description["training_data"]
    (tmp_path / "description").mkdir()
    (tmp_path / "description" / "metadata").write_text(json.dumps(description))
    assert reading.read_description(tmp_path)["classes"] == list("0123456789")
    del description["classes"]
    (tmp_path / "description" / "metadata").write_text(json.dumps(description))
    with pytest.raises(reading.CheckpointError, match="is not the one that was saved"):
        reading.read_description(tmp_path)


# All are read by one function.
@pytest.mark.parametrize(
    ("name", "text"),
    slow_unless(
        [("left_out.json", ""), ("result.json", '{"seco')],
        [
            *itertools.product(
                ("goodput.json", "left_out.json", "result.json"), ("", '{"seco', "[1]")
            )
        ],
    ),
)
def test_a_small_file_that_is_cut_short_does_not_end_a_restart(finished_run, tmp_path, name, text):
    finished, result, config = finished_run
    workdir = shutil.copytree(finished, tmp_path / "run")
    (workdir / name).write_text(text)
    assert vit_jax.train(config, workdir)["accuracy"] == result["accuracy"]


def test_two_runs_in_one_folder_are_refused_and_a_dead_one_holds_no_lock(cli, tmp_path):
    longer = "--config.duration=100000 steps"
    first = cli("train", "--config=configs/digits.py", longer, f"--workdir={tmp_path}", tiny=True)
    until((tmp_path / "metrics.jsonl").exists, first)
    with pytest.raises(lock.Locked, match=f"another run trains in .*process {first.pid}"):
        lock.Lock(epath.Path(tmp_path), patience=0.1).__enter__()
    first.send_signal(signal.SIGKILL)
    first.wait()
    with lock.Lock(epath.Path(tmp_path), patience=PATIENCE):
        pass


@pytest.fixture
def in_bucket(bucket, monkeypatch):
    """A folder in a bucket, where locks are renewed often, and stale only where a test says after how long."""
    monkeypatch.setattr(lock, "_STALE_SECONDS", PATIENCE)
    monkeypatch.setattr(lock, "_RENEW_SECONDS", 0.2)
    return epath.Path(bucket) / "run"


def leave_a_lock(folder, **entry):
    """The lock of a run that does nothing more."""
    held = {"holder": "elsewhere", "unique": "1", "renewed": time.time()}
    (folder / lock.NAME).write_text(json.dumps(held | entry))


def test_in_a_bucket_a_lock_that_nobody_renews_is_nobodys(in_bucket, monkeypatch):
    with lock.Lock(in_bucket), pytest.raises(lock.Locked, match="another run trains"):
        lock.Lock(in_bucket, patience=0.1).__enter__()
    leave_a_lock(in_bucket)
    assert lock.is_held(in_bucket)
    monkeypatch.setattr(lock, "_STALE_SECONDS", 2.0)
    with lock.Lock(in_bucket, patience=0.1):  # less than a lock takes to become stale
        monkeypatch.setattr(lock, "_STALE_SECONDS", PATIENCE)
        assert lock.is_held(in_bucket)
    assert not lock.is_held(in_bucket) and not in_bucket.exists()


@pytest.mark.parametrize(
    ("kind", "hours"),
    [pytest.param("bucket", -3, marks=pytest.mark.slow), ("bucket", 3), ("s3_bucket", 3)],
)
def test_the_clock_of_the_host_that_holds_a_lock_in_a_bucket_does_not_matter(
    request, monkeypatch, kind, hours
):
    monkeypatch.setattr(lock, "_STALE_SECONDS", PATIENCE)
    folder = epath.Path(request.getfixturevalue(kind)) / "run"
    leave_a_lock(folder, renewed=time.time() + hours * 3600)
    assert lock.is_held(folder)
    monkeypatch.setattr(lock, "_STALE_SECONDS", 1.0)
    time.sleep(2.1)  # S3 gives times in whole seconds
    assert not lock.is_held(folder)


def test_in_a_bucket_the_lock_of_a_dead_process_of_this_machine_is_free_at_once(in_bucket):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    leave_a_lock(in_bucket, machine=lock._machine(), process=dead.pid)
    assert not lock.is_held(in_bucket)
    leave_a_lock(in_bucket, machine=lock._machine(), process=os.getpid())
    assert lock.is_held(in_bucket)


def test_in_a_bucket_a_run_whose_lock_was_taken_over_ends(in_bucket):
    ended = []
    with lock.Lock(in_bucket, on_lost=ended.append):
        leave_a_lock(in_bucket)
        until(lambda: ended)
    assert "elsewhere took it over" in ended[0]
    assert lock.is_held(in_bucket)  # by the other


def test_a_folder_that_is_not_writable_for_a_moment_is_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(guards, "_RETRY_SECONDS", (0.01, 0.01))
    failures = [OSError(errno.ENOSPC, "No space left on device")] * 2
    write = epath.Path.write_bytes

    def full(path, content):
        if failures:
            raise failures.pop()
        return write(path, content)

    monkeypatch.setattr(type(epath.Path(tmp_path)), "write_bytes", full)
    guards.make_workdir(epath.Path(tmp_path))
    assert caplog.text.count("No space left on device; trying again") == 2
    failures[:] = [OSError(errno.ENOSPC, "No space left on device")] * 3
    with pytest.raises(UserError, match="No space left") as raised:
        guards.make_workdir(epath.Path(tmp_path))
    assert raised.value.exit_code == 42


def test_a_folder_that_can_never_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to --workdir=.*file/run") as raised:
        guards.make_workdir(epath.Path(tmp_path / "file" / "run"))
    assert raised.value.exit_code == 2


def test_metrics_are_not_appended_to_a_line_that_was_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    writer = JsonLinesWriter(path)
    writer.write_scalars(3, {})
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    path.write_text('{"ste')
    writer = JsonLinesWriter(path)
    writer.close()
    assert path.read_text() == ""


def test_a_compilation_cache_that_others_can_write_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(guards.jax.config, "update", lambda *_: None)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    guards.use_compilation_cache(str(tmp_path / "cache"))
    assert "can be written by others" in caplog.text
    (tmp_path / "file").write_text("")
    guards.use_compilation_cache(str(tmp_path / "file" / "cache"))
    assert "compiled programs are not kept" in caplog.text


def test_a_save_without_a_folder_to_save_in_is_counted_at_once(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(checkpoint__max_failures=2, duration="30 steps")
    (tmp_path / "run").mkdir()
    made = committing.Committer._make_folder

    def replaced(self, folder, unfinished):
        if folder.parent.is_dir():
            folder.parent.rmtree()
            folder.parent.write_text("")
        made(self, folder, unfinished)

    monkeypatch.setattr(committing.Committer, "_make_folder", replaced)
    with pytest.raises(reading.CheckpointError, match="2 failures in a row"):
        vit_jax.train(config, tmp_path / "run")


def test_more_checkpoints_than_are_kept_are_deleted_at_the_next_start(finished_run, tmp_path):
    workdir = epath.Path(shutil.copytree(finished_run.workdir, tmp_path / "run"))
    assert reading.saved_steps(workdir / "checkpoints") == [4, 8, 12]
    config = finished_run.config.copy_and_resolve_references()
    config.checkpoint.keep = 1
    vit_jax.train(config, workdir)
    assert reading.saved_steps(workdir / "checkpoints") == [12]


def test_the_best_step_is_kept_for_ever_only_where_the_config_says_so(tiny_config, tmp_path):
    options = {"checkpoint__keep": 2, "checkpoint__best": False, "eval__every": "4 steps"}
    vit_jax.train(tiny_config(duration="8 steps", **options), tmp_path)
    assert reading.newest_description(tmp_path)["best"]["step"] == 4
    options["checkpoint__on_config_change"] = "allow"  # a longer run
    vit_jax.train(tiny_config(**options), tmp_path)
    assert reading.saved_steps(epath.Path(tmp_path) / "checkpoints") == [8, 12]


def test_the_best_is_that_of_the_result_where_the_last_evaluation_is_the_best(
    tiny_config, tmp_path, command
):
    options = {"checkpoint__keep": 1, "checkpoint__best": True, "eval__best": "loss"}
    config = tiny_config(duration="8 steps", eval__every="4 steps", **options)
    result = vit_jax.train(config, tmp_path / "run")
    assert result["best"]["step"] == 8
    assert reading.find_checkpoint(tmp_path / "run" / "best").name == "8"
    for name in ("run/best", "run/last", "run@8"):
        assert formats.read_checkpoint(tmp_path / name).run.folder.name == "8"
    for name in ("run", "run/best"):
        _, out, _ = command("show", str(tmp_path / name), "--json")
        assert json.loads(out)["step"] == json.loads(out)["best"]["step"] == 8
    with pytest.raises(reading.CheckpointError, match="no checkpoint of step 4 .*its steps are: 8"):
        formats.read_checkpoint(tmp_path / "run@4")
    # A later checkpoint says itself which was the best before it.
    (tmp_path / "run" / "best.json").write_text('{"step": 4}')
    with pytest.raises(reading.CheckpointError, match="no checkpoint of step 4"):
        reading.find_checkpoint(tmp_path / "run" / "best")


def test_a_run_that_is_made_longer_compares_with_what_was_its_last_evaluation(
    tiny_config, tmp_path
):
    options = {"eval__every": "4 steps", "eval__best": "loss", "checkpoint__best": True}
    first = vit_jax.train(tiny_config(duration="8 steps", **options), tmp_path)["best"]
    assert first["step"] == 8
    options |= {"checkpoint__on_config_change": "allow", "checkpoint__keep": 1}
    worse = tiny_config(duration="12 steps", optim__lr=1.0, **options)
    result = vit_jax.train(worse, tmp_path)
    assert result["loss"] > first["value"] and result["best"] == first | {"since": 1}
    assert reading.find_checkpoint(tmp_path / "best").name == "8"
    assert reading.saved_steps(epath.Path(tmp_path) / "checkpoints") == [8, 12]


def test_an_evaluation_that_is_due_where_a_stop_comes_is_made_first_by_the_next_start(
    tiny_config, tmp_path, caplog
):
    caplog.set_level("INFO")
    config = tiny_config(duration="12 steps", eval__every="4 steps", eval__patience=9)
    config.checkpoint.best = True

    def stop(step: int, metrics: dict) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        vit_jax.train(config, tmp_path, callbacks=[stop])
    config.eval.patience = 1
    config.eval.best = "examples:max"  # always the same
    assert vit_jax.train(config, tmp_path)["step"] == 8
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "eval/loss" in line] == [4, 8]
    assert vit_jax.train(config, tmp_path)["step"] == 8
    assert "ended after step 8 of 12: no better examples in 1" in caplog.text
    config.eval.patience = 3
    assert vit_jax.train(config, tmp_path)["step"] == 12


def test_a_commit_without_the_shards_of_a_process_fails_and_a_whole_one_keeps_no_mark(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(processes, "count", lambda: 12)
    marks = tmp_path / "written"
    marks.mkdir()
    for process in (*range(2), *range(3, 10), 11):
        (marks / str(process)).touch()
    with pytest.raises(OSError, match="the shards of process 2, 10 are not there"):
        committing._check_parts(epath.Path(tmp_path))
    for process in (2, 10):
        (marks / str(process)).touch()
    committing._check_parts(epath.Path(tmp_path))
    assert list(tmp_path.iterdir()) == []


PRINTED = """
import sys
from vit_jax.commands import exit_codes
with exit_codes.report_errors():
    if sys.argv[1] == "saved":
        with exit_codes.printing_what_is_saved("RUN/result.json"):
            print("trained")
    else:
        print("shown")
"""


@pytest.mark.parametrize("kind, code", [("saved", 0), ("printed", 1)])
def test_a_full_disk_behind_the_output_fails_only_commands_whose_result_is_their_output(kind, code):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTED, kind], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("RUN/result.json" in done.stderr) == (kind == "saved")


def test_a_resume_with_another_batch_or_a_past_end_is_refused_even_if_changes_are_allowed(
    finished_run, tmp_path
):
    workdir = epath.Path(shutil.copytree(finished_run.workdir, tmp_path / "run"))
    config = finished_run.config.copy_and_resolve_references()
    config.checkpoint.on_config_change = "allow"
    size = config.batch_size
    config.batch_size = size // 2
    with pytest.raises(ConfigError, match=f"batch_size = {size // 2} differs from {size}, .* 12"):
        vit_jax.train(config, workdir)
    config.batch_size = size
    config.duration = "7 steps"
    with pytest.raises(ConfigError, match="at step 12, .* '7 steps' ends at step 7"):
        vit_jax.train(config, workdir)
    assert reading.saved_steps(workdir / "checkpoints") == [4, 8, 12]


_AS_NOBODY = """
import os, sys
from etils import epath
from vit_jax.base import lock
if os.getuid() == 0:
    os.setuid(65534)
folder = epath.Path(sys.argv[1])
try:
    lock.Lock(folder, patience=0.0).__enter__()
except lock.Unusable as error:
    print(f"exit code {error.exit_code}: {error}")
print(f"held: {lock.is_held(folder)}")
"""


def lock_as_nobody(folder):
    """What another user is told who takes the lock of a folder, and whether it is held to them."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _AS_NOBODY, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "held"), [(0o644, False), (0o600, True)])
def test_another_users_lock_is_said_to_be_theirs_and_counts_as_held_if_unreadable(mode, held):
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are its user's alone
        os.chmod(folder, 0o755)
        path = pathlib.Path(folder, lock.NAME)
        path.touch()
        path.chmod(mode)
        told = lock_as_nobody(folder)
    assert f"exit code 2: {path} cannot be opened by user" in told, told
    assert "the file is of user root" in told and f"held: {held}" in told, told


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_lock_in_another_users_folder_is_said_to_be_in_theirs():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        told = lock_as_nobody(folder)
    assert "its folder is of user root" in told and "held: False" in told, told


def test_a_lock_that_is_a_folder_is_refused_with_what_to_do(tmp_path):
    (tmp_path / lock.NAME).mkdir()
    with pytest.raises(
        lock.Unusable, match="is a folder, and a lock is a file: remove it"
    ) as raised:
        lock.Lock(epath.Path(tmp_path), patience=0.0).__enter__()
    assert buckets.is_failure(raised.value)  # what may continue without a lock does


def test_a_lock_on_a_read_only_file_system_is_refused_with_what_to_do(tmp_path, monkeypatch):
    def read_only(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))

    monkeypatch.setattr(lock.os, "open", read_only)
    with pytest.raises(lock.Unusable, match="its file system is read-only"):
        lock.Lock(epath.Path(tmp_path), patience=0.0).__enter__()
