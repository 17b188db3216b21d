"""A run that ends at its target, by the command line, and the table of such runs."""

import json
import time

from tests.integration.conftest import TINY


def test_a_run_ends_at_its_target_and_is_an_entry_of_the_speedrun(run_cli, command, tmp_path):
    flags = (
        "--config=configs/digits.py", f"--workdir={tmp_path}/run", "--config.eval.target=0.01",
        "--config.eval.every=4 steps", "--config.log.tensorboard=False",
    )  # fmt: skip
    began = time.monotonic()
    code, _, err = run_cli("train", *flags, tiny=True)
    elapsed = time.monotonic() - began
    assert code == 0 and "reaches config.eval.target = 0.01" in err, err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    reached = result["reached"]
    assert result["step"] == reached["step"] == 4 and not reached["restarted"]
    assert 0 < reached["seconds"] < elapsed
    assert "--config.eval.target=0.01" in reached["command"]

    tiny = (f"--config.{name}={value}" for name, value in TINY.items())
    code, _, err = command("train", *flags, *tiny)  # has ended: it is evaluated, and nothing else
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["reached"] == reached

    code, out, err = command("report", str(tmp_path), "--speedrun", "--json")
    assert code == 0, err
    (entry,) = json.loads(out.splitlines()[-1])["entries"]
    assert entry["seconds"] == reached["seconds"] and "--workdir" not in entry["command"]
