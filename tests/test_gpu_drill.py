"""The drill for GPUs runs on a CPU, so that nothing but the figures is new on a GPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.benchmarks import gpu_drill
from tests.waiting import returns


def drill(out, *flags) -> tuple[int, dict]:
    command = [sys.executable, gpu_drill.__file__, "--rehearse", f"--out={out}", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    written = json.loads(out.read_text())
    assert written == {name: result for name, result in last.items() if name != "failed"}
    return done.returncode, last


def test_a_stage_writes_what_it_found(tmp_path):
    code, results = drill(tmp_path / "drill.json", "--stages=attention", "--budget=500")
    assert (code, results["failed"]) == (0, [])
    assert [row["passes"] for row in results["attention"]["rows"]] == [True, True]


def test_a_stage_that_hangs_is_stopped_with_its_rows_kept(monkeypatch, tmp_path):
    script = tmp_path / "stage.py"
    script.write_text(
        f"print('{gpu_drill.MARK}{{\"row\": 1}}', flush=True); open({str(tmp_path / 'fifo')!r}, 'w').close()\n"
        "import time; time.sleep(10_000)"
    )
    os.mkfifo(tmp_path / "fifo")
    start = subprocess.Popen

    def started_and_printed(command, **how):
        process = start(command, **how)
        assert returns((tmp_path / "fifo").read_text) == ""
        return process

    monkeypatch.setattr(subprocess, "Popen", started_and_printed)
    monkeypatch.setattr(gpu_drill, "_command", lambda *_: [sys.executable, str(script)])
    result = gpu_drill.run_stage("info", 2, True)
    assert result["rows"] == [{"row": 1}] and result["failed"]
    assert result["exit_code"] == "stopped after 2 s"


def test_a_row_with_an_error_or_a_bad_value_fails_its_stage(monkeypatch, tmp_path):
    def result(*rows):
        script = tmp_path / "stage.py"
        script.write_text("".join(f"print({gpu_drill.MARK + json.dumps(row)!r})\n" for row in rows))
        monkeypatch.setattr(gpu_drill, "_command", lambda *_: [sys.executable, str(script)])
        return gpu_drill.run_stage("info", 60, True)

    assert "failed" not in result({"passes": True}, {"seconds": 1})
    assert result({"passes": False})["failed"] and result({"error": "no memory"})["failed"]


@pytest.mark.parametrize("quick", [False, True])
def test_all_stages_fit_ten_minutes_and_what_one_leaves_is_for_the_next(
    monkeypatch, tmp_path, quick
):
    given, clock = {}, [0.0]

    def run_stage(name, seconds, rehearse):
        given[name] = seconds
        clock[0] += 5 if quick and name == "info" else seconds
        return {"rows": []}

    monkeypatch.setattr(gpu_drill, "run_stage", run_stage)
    monkeypatch.setattr(gpu_drill.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "argv", ["gpu_drill.py", f"--out={tmp_path / 'drill.json'}"])
    for name in ("PYTHONPATH", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "0.9")
    limits = {stage.__name__: seconds for stage, seconds in gpu_drill.STAGES.items()}
    assert gpu_drill.main() == 0 and clock[0] <= 600
    assert given == limits | ({"losses": limits["losses"] + limits["info"] - 5} if quick else {})


@pytest.mark.slow
def test_every_stage_is_rehearsed(tmp_path):
    code, results = drill(tmp_path / "drill.json", "--budget=3000")
    assert (code, results["failed"]) == (0, []), results
    assert list(results)[:-1] == [stage.__name__ for stage in gpu_drill.STAGES]
    bits = [row["same_bits"] for row in results["resume"]["rows"]]
    assert bits == [True, True, True] and results["resume"]["rows"][2]["stopped_with"] == 42
