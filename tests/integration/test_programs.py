"""A restart of several processes on machines that have no compiled programs of their own."""

import jax
import numpy as np
import pytest
from etils import epath

from tests.integration.test_reliability import all_bits, steps_done
from vit_jax.training.upkeep import programs

ARGUMENTS = (
    "--config.compilation_cache=auto",
    "--config.checkpoint.every=4 steps",
    "--config.eval.evaluators=()",
)


def stored(workdir) -> list:
    return list((workdir / programs.FOLDER).glob("*/jit_train_step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_compiled_is_loaded_by_new_machines_unless_it_is_damaged(
    hosts, tmp_path, monkeypatch, damaged
):
    monkeypatch.setenv("JAX_EXPLAIN_CACHE_MISSES", "1")
    workdir, logs = tmp_path / "run", {}
    for home in ("first", "second"):
        monkeypatch.setenv("HOME", str(tmp_path / home))
        run = hosts(workdir, *ARGUMENTS, seconds=0.012 if home == "first" else 0)
        if home == "first":
            run.until(lambda: steps_done(workdir) >= 6 and stored(workdir))
            run.kill()
            (program,) = stored(workdir)
            assert program.parent.parent.stat().st_mode & 0o077 == 0
            if damaged:
                content = bytearray(program.read_bytes())
                content[len(content) // 2] ^= 1
                program.write_bytes(content)
        else:
            assert run.codes() == [0, 0], run.log(0)
        logs[home] = [run.log(process) for process in range(2)]
    missed = [
        ["CACHE MISS for 'jit_train_step'" in log for log in logs[home]]
        for home in ("first", "second")
    ]
    assert missed == [[True, True], [damaged, True]], "on CPUs only process 0 has what it needs"
    assert [f"{program} is damaged" in log for log in logs["second"]] == [damaged, damaged]
    whole = hosts(tmp_path / "whole", "--config.eval.evaluators=()")
    assert whole.codes() == [0, 0], whole.log(0)
    expected, got = all_bits(tmp_path / "whole"), all_bits(workdir)
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(name)`: the home of another machine, without programs."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
    before = {name: getattr(jax.config, name) for name in names}
    yield lambda name: monkeypatch.setenv("HOME", str(tmp_path / name))
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_in_a_bucket_come_to_another_machine_unless_they_are_damaged(
    bucket, machine, caplog, monkeypatch
):
    monkeypatch.setattr(
        jax, "local_device_count", lambda: 1
    )  # of several simulated ones none are kept
    workdir = epath.Path(bucket) / "runs" / "tiny"
    contents = {"jit_a-0-cache": b"a program", "jit_b-1-cache": b"another one" * 1000}
    machine("first")
    first = programs.Programs(programs.AUTO, workdir)
    first.fetch()
    for name, content in contents.items():
        (first._local / name).write_bytes(content)
    first.keep()
    first.close()
    assert not caplog.text
    (bad,) = workdir.glob("compiled/*/jit_b-1-cache")
    bad.write_bytes(contents["jit_b-1-cache"][:-1])

    machine("second")
    second = programs.Programs(programs.AUTO, workdir)
    second.fetch()
    found = {path.name: path.read_bytes() for path in second._local.iterdir()}
    assert found == {"jit_a-0-cache": b"a program"}
    assert "jit_b-1-cache is damaged: the program is compiled again" in caplog.text
    (second._local / "jit_b-1-cache").write_bytes(contents["jit_b-1-cache"])
    second.keep()
    second.close()
    assert bad.read_bytes() == contents["jit_b-1-cache"]


@pytest.mark.slow
def test_a_run_in_a_bucket_is_resumed_by_a_new_machine_without_compiling(
    run_cli, bucket, bucket_environment, tmp_path
):
    options = ("--config.compilation_cache=auto", "--config.eval.evaluators=()")
    for home, steps in (("first", 8), ("second", 12)):
        environment = bucket_environment | {
            "HOME": str(tmp_path / home),
            "JAX_EXPLAIN_CACHE_MISSES": "1",
        }
        code, _, log = run_cli(
            "train", "--config=configs/digits.py", f"--workdir={bucket}/run", *options,
            f"--config.duration={steps} steps", "--config.optim.schedule=constant",
            "--config.checkpoint.on_config_change=allow", tiny=True, env=environment,
        )  # fmt: skip
        assert code == 0, log
        assert ("CACHE MISS for 'jit_train_step'" in log) == (home == "first"), log


def test_programs_that_others_could_have_written_are_not_loaded(tmp_path, caplog):
    (tmp_path / programs.FOLDER).mkdir()
    assert programs._is_ours(tmp_path / programs.FOLDER)
    (tmp_path / programs.FOLDER).chmod(0o770)
    assert not programs._is_ours(tmp_path / programs.FOLDER)
    assert "could run code" in caplog.text


def test_simulated_devices_keep_no_programs(tmp_path):
    """XLA would not order the collectives in their loops."""
    assert jax.local_device_count() > 1
    before = jax.config.jax_compilation_cache_dir
    programs.Programs(programs.AUTO, epath.Path(tmp_path))
    assert jax.config.jax_compilation_cache_dir == before
