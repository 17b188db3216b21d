"""Whole runs beside the curve of another: as users type it."""

import json
import re

import pytest

from tests.integration.conftest import TINY

# So few images that an epoch has five steps.
CHANGES = TINY | {
    "model.depth": 1,
    "log.tensorboard": False,
    "data.train_split": "train[:12%]",
    "duration": "6 epochs",
    "eval.every": "1 epochs",
    "checkpoint.every": "1000 steps",
}
RUN = (
    "--config=configs/digits.py",
    *(f"--config.{name}={value}" for name, value in CHANGES.items()),
)


@pytest.mark.slow
def test_a_run_becomes_a_reference_beside_which_others_stand_and_a_wrong_one_is_ended(
    command, caplog, tmp_path
):
    first, second, wrong = (str(tmp_path / name) for name in ("first", "second", "wrong"))
    code, _, err = command("train", *RUN, f"--workdir={first}")
    assert code == 0, err
    code, out, err = command("report", first, "--as_reference")
    assert code == 0 and f"--config.reference.curve={first}/reference.json" in out, err
    beside = f"--config.reference.curve={first}/reference.json"
    strict = "--config.reference.stop_below=1"

    code, _, err = command("train", *RUN, f"--workdir={second}", beside, strict)
    assert code == 0 and re.search(r"epoch 2\.\d*: .*; first had ", caplog.text), err
    # It is the very same run.
    lines = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").open()]
    differences = [line["reference/difference"] for line in lines if "reference/difference" in line]
    assert len(differences) >= 5 and not any(abs(d) > 1e-9 for d in differences)
    code, _, err = command("report", second, f"--out={tmp_path / 'report'}")
    text = (tmp_path / "report" / "report.md").read_text()
    assert code == 0 and "## Beside reference curves" in text and "+0.00" in text, err
    assert (tmp_path / "report" / "reference_0.png").stat().st_size > 1000

    slow = "--config.optim.lr=1e-9"
    code, _, err = command("train", *RUN, f"--workdir={wrong}", beside, strict, slow)
    last = err.splitlines()[-1]
    assert code == 1 and "worse on average, more than config.reference.stop_below = 1" in last, err
    assert "optim.lr is 1e-09 (0.003)" in last and "Traceback" not in err
    assert not (tmp_path / "wrong" / "result.json").exists()
    code, _, err = command("train", *RUN, f"--workdir={wrong}", beside, slow)
    assert code == 0 and (tmp_path / "wrong" / "result.json").exists(), err
