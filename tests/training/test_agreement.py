"""What the processes of a run must have in common is compared, and a difference is named."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

import vit_jax
from tests.services.ports import free_port
from tests.waiting import PATIENCE
from vit_jax.base import schema
from vit_jax.config import config_class
from vit_jax.data import sources
from vit_jax.devices import agreement as comparison
from vit_jax.training import agreement, normal_forms
from vit_jax.training.assembly import resolve

OTHER = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value + 0.5,
         str: lambda value: f"{value}x", tuple: lambda value: (*value, 1)}  # fmt: skip


@pytest.fixture(scope="module")
def config():
    return resolve(vit_jax.load_config("digits"))


def with_value(config, name: str, value):
    """The config with another value of the field with this dotted name."""
    section, _, rest = name.partition(".")
    if rest:
        value = with_value(getattr(config, section), rest, value)
    return dataclasses.replace(config, **{section: value})


def value_of(config, name: str):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_every_field_is_compared_or_on_the_list_of_those_that_may_differ(config):
    fields = agreement.describe_config(config)
    names = [name for name, _ in schema.walk(type(config))]
    assert len(names) > 200
    for name in names:
        value = value_of(config, name)
        kind = type(value)
        other = OTHER[kind](value) if kind in OTHER else "another"
        if name in normal_forms.forms(type(config)):
            other = "77 steps" if kind is str else 77
        if name == "data.mixture":
            other = (("a", 1.0),)
        changed = agreement.describe_config(with_value(config, name, other))
        difference = comparison.find_difference(fields, changed)
        if name in agreement.MAY_DIFFER:
            assert difference == {}, name
        else:
            assert difference["field"] == f"config.{name}" and not difference["more"], name


def test_the_list_of_what_may_differ_names_fields_that_exist():
    names = {name for name, _ in schema.walk(config_class())}
    assert set(agreement.MAY_DIFFER) <= names


def test_equal_copies_of_a_checkpoint_agree_wherever_they_lie_and_other_weights_do_not(
    config, tmp_path
):
    for folder, content in (
        ("a", b"w" * 3_000_000),
        ("b", b"w" * 3_000_000),
        ("c", b"v" * 3_000_000),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "weights.npz").write_bytes(content)
    one, copy, other = (
        agreement.describe_config(
            dataclasses.replace(config, init_from=str(tmp_path / folder / "weights.npz"))
        )
        for folder in ("a", "b", "c")
    )
    assert comparison.find_difference(one, copy) == {}
    assert comparison.find_difference(one, other)["field"] == "config.init_from"


def test_a_run_of_a_folder_agrees_with_its_copy(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "checkpoints").mkdir(parents=True)
        (tmp_path / folder / "checkpoints" / "description").write_text("of the same run")
    digests = {agreement.digest_of_path(tmp_path / folder) for folder in ("a", "b")}
    (tmp_path / "b" / "checkpoints" / "description").write_text("of another run!")
    assert len(digests) == 1
    assert agreement.digest_of_path(tmp_path / "b") not in digests


def test_classes_in_another_order_are_named_by_the_first_that_differs():
    first = {"the classes": ["disc", "ring", "star"]}
    own = {"the classes": ["disc", "star", "ring"]}
    difference = comparison.find_difference(first, own)
    assert difference == {
        "field": "the classes, number 1",
        "first": "'ring'",
        "own": "'star'",
        "more": [],
    }
    sentence = comparison.describe_differences({3: difference | {"host": "node3"}}, "node0")
    assert "process 3 on node3 has 'star', and process 0 on node0 has 'ring'" in sentence


@pytest.mark.parametrize("name, value", [("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"), ("NCCL_ALGO", "Ring"),
                                         ("LIBTPU_INIT_ARGS", "--x=1")])  # fmt: skip
def test_variables_that_change_programs_are_compared(monkeypatch, name, value):
    before = agreement.describe_program()
    monkeypatch.setenv(name, value)
    assert comparison.find_difference(before, agreement.describe_program())["field"] == name


def test_variables_of_jax_are_compared_but_for_caches_and_verbosity():
    code = "import json; from vit_jax.training import agreement; print(json.dumps(agreement.describe_program()))"
    described = {}
    for name, value in {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest", "JAX_ENABLE_X64": "1", "JAX_COMPILATION_CACHE_DIR": "/nowhere",
        "JAX_LOG_COMPILES": "1", "": "",
    }.items():  # fmt: skip
        environment = {"PATH": "/usr/bin", "JAX_PLATFORMS": "cpu"} | ({name: value} if name else {})
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        described[name] = json.loads(done.stdout)
    usual = described.pop("")
    differing = {
        name: comparison.find_difference(usual, fields).get("field")
        for name, fields in described.items()
    }
    assert differing == {
        "JAX_DEFAULT_MATMUL_PRECISION": "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64": "JAX_ENABLE_X64",
        "JAX_COMPILATION_CACHE_DIR": None, "JAX_LOG_COMPILES": None,
    }  # fmt: skip


def test_data_of_another_size_are_named(config):
    whole = sources.open_train(config.data)
    fewer = sources.open_train(dataclasses.replace(config.data, train_split="train[:90%]"))
    described = [
        agreement.describe_data("the training images", source) for source in (whole, fewer)
    ]
    assert comparison.find_difference(*described)["field"] == "the number of the training images"


COMPARED = """
import json, sys
from etils import epath
from vit_jax.base.errors import ConfigError
from vit_jax.devices import agreement, processes
from vit_jax.training.agreement import check_workdir_is_shared
address, index, fields, workdir = sys.argv[1:]
processes.initialize(address, 3, int(index))
try:
    agreement.check_agreement("test", json.loads(fields))
    check_workdir_is_shared(epath.Path(workdir), 1, most_seconds=1)
    print("agreed")
except ConfigError as error:
    print(error.exit_code, error)
"""


def compared(fields: list[dict], workdirs: list) -> list[str]:
    """The line that each of three real processes prints."""
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMPARED, address, str(i), json.dumps(fields[i]), str(workdirs[i])],
            stdout=subprocess.PIPE, text=True,
        )
        for i in range(3)
    ]  # fmt: skip
    return [process.communicate(timeout=PATIENCE)[0].strip() for process in started]


def test_three_processes_that_agree_go_on_and_leave_no_file(tmp_path):
    assert compared([{"lr": 1}] * 3, [tmp_path] * 3) == ["agreed"] * 3
    assert list(tmp_path.iterdir()) == []


def test_all_processes_end_with_the_same_sentence_where_one_differs(tmp_path):
    lines = compared([{"lr": 1}, {"lr": 1}, {"lr": 2}], [tmp_path] * 3)
    assert len(set(lines)) == 1
    assert lines[0].startswith("2 the processes of this run do not agree on lr: process 2 on ")
    assert "has 2, and process 0" in lines[0]


def test_a_workdir_that_one_host_does_not_share_is_refused_by_all(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "shared").mkdir()
    lines = compared([{}] * 3, [tmp_path / "shared", tmp_path / "own", tmp_path / "shared"])
    assert len(set(lines)) == 1
    assert f"process 1 does not see in --workdir={tmp_path / 'own'}" in lines[0]
    assert list((tmp_path / "shared").iterdir()) == []


def test_another_spelling_of_a_duration_is_no_difference(config):
    described = [
        agreement.describe_config(dataclasses.replace(config, duration=duration))
        for duration in ("40 steps", "40steps")
    ]
    assert comparison.find_difference(*described) == {}


def test_the_logs_of_a_run_to_start_from_may_grow_and_its_weights_may_not_change(
    finished_run, tmp_path
):
    copy = shutil.copytree(finished_run.workdir, tmp_path / "run")
    before = agreement.digest_of_path(copy)
    assert before == agreement.digest_of_path(finished_run.workdir)
    with (copy / "metrics.jsonl").open("a") as metrics:
        metrics.write("{}\n")
    assert agreement.digest_of_path(copy) == before
    newest = max((copy / "checkpoints").iterdir(), key=lambda step: int(step.name))
    shutil.rmtree(newest)
    assert agreement.digest_of_path(copy) != before


def test_a_large_folder_is_not_read_whole(tmp_path):
    for number in range(300):
        (tmp_path / f"{number:03d}").write_text("a")
    before = agreement.digest_of_path(tmp_path)
    (tmp_path / "299").write_text("another")
    assert agreement.digest_of_path(tmp_path) == before
    (tmp_path / "000").write_text("another")
    assert agreement.digest_of_path(tmp_path) != before
