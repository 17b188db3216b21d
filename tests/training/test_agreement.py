"""What the processes of a run must have in common is compared, and a difference is named."""

import ast
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import PIL.Image
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


@pytest.mark.slow
def test_one_path_on_two_disks_is_refused_by_all_hosts(tmp_path):
    """Process 1 has a mount namespace of its own, with another disk at the path of the workdir."""
    own_disk = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        'mount -t tmpfs none "$0" && exec "$@"',
        tmp_path,
    ]
    if subprocess.run([*own_disk, "true"]).returncode:
        pytest.skip(
            "this kernel lets nobody mount a disk in a namespace: the same path on two disks is not tested"
        )
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [*(own_disk if i == 1 else []), sys.executable, "-c", COMPARED, address, str(i), "{}", tmp_path],
            stdout=subprocess.PIPE, text=True,
        )
        for i in range(3)
    ]  # fmt: skip
    lines = [process.communicate(timeout=PATIENCE)[0].strip() for process in started]
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"2 process 1 does not see in --workdir={tmp_path}")


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


def changed(**fields):
    """A difference of the config: the fields of host 1 that are not those of host 0."""
    return lambda config, monkeypatch, folder: agreement.describe_config(
        functools.reduce(
            lambda changed, item: with_value(changed, *item),
            {name.replace("__", "."): value for name, value in fields.items()}.items(),
            config,
        )
    )


def variable(name: str, value: str):
    """A difference of the environment."""

    def describe(config, monkeypatch, folder):
        monkeypatch.setenv(name, value)
        return agreement.describe_program()

    return describe


def option_of_jax(name: str, value):
    """A difference of what JAX took from its own variables when it was imported."""

    def describe(config, monkeypatch, folder):
        usual = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            return agreement.describe_program()
        finally:
            jax.config.update(name, usual)

    return describe


def version_of(package: str, version: str):
    def describe(config, monkeypatch, folder):
        usual = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: version if name == package else usual(name)
        )
        return agreement.describe_program()

    return describe


def own_version(config, monkeypatch, folder):
    monkeypatch.setattr(vit_jax, "__version__", "0.1.7")
    return agreement.describe_program()


def own_files(config, monkeypatch, folder):
    package = shutil.copytree(
        pathlib.Path(vit_jax.__file__).parent, folder / "vit_jax", ignore=lambda *_: ["__pycache__"]
    )
    with (package / "config.py").open("a") as file:
        file.write("# edited on this host\n")
    monkeypatch.setattr(vit_jax, "__file__", str(package / "__init__.py"))
    return agreement.describe_program()


def registered_file(config, monkeypatch, folder):
    (folder / "family.py").write_text("")
    monkeypatch.setattr(agreement.user_files, "loaded_files", lambda: [folder / "family.py"])
    return agreement.describe_program()


def images(change=None, **fields):
    """A difference of the data: of a folder of two classes, changed on host 1, or of the fields that read it."""

    def describe(config, monkeypatch, folder):
        if change is not None:
            change(folder / "data")
        recipe = vit_jax.load_config("folder")
        recipe.data.path = str(folder / "data")
        recipe.data.update(fields)
        data = resolve(recipe).data
        return agreement.describe_data("images", sources.open_train(data))

    return describe


def add_image(data):
    shutil.copy(data / "train/disc/0.png", data / "train/disc/1000.png")


def remove_image(data):
    (data / "train/disc/0.png").unlink()


def replace_image(data):
    write_image(data / "train/disc/0.png", 31)


def rename_class(data):
    for split in ("train", "val"):
        (data / split / "disc").rename(data / split / "ring")


def move_image(data):
    (data / "train/disc/0.png").rename(data / "train/star/9.png")


def exchange_classes(data):
    (data / "train/disc").rename(data / "disc")
    (data / "train/star").rename(data / "train/disc")
    (data / "disc").rename(data / "train/star")


def write_image(file: pathlib.Path, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    colour = sum(map(ord, file.parent.name)) % 256
    PIL.Image.fromarray(np.full((size, size, 3), colour, np.uint8)).save(file)


# What differs on host 1: the field that the refusal names.
DIFFERENCES = {
    "learning rate": (changed(optim__lr=0.5), "config.optim.lr"),
    "batch size": (changed(batch_size=7), "config.batch_size"),
    "duration": (changed(duration="77 steps"), "config.duration"),
    "seed": (changed(seed=1), "config.seed"),
    "weight decay": (changed(optim__weight_decay=0.7), "config.optim.weight_decay"),
    "warm-up": (changed(optim__warmup="7 steps"), "config.optim.warmup"),
    "dropout": (changed(model__dropout=0.3), "config.model.dropout"),
    "width": (changed(model__width=48), "config.model.width"),
    "saves": (changed(checkpoint__every="7 steps"), "config.checkpoint.every"),
    "audits": (changed(audit__every=7), "config.audit.every"),
    "mixup": (changed(augment__mixup=0.9), "config.augment.mixup"),
    "frozen": (changed(optim__freeze=("embed",)), "config.optim.freeze"),
    "two fields": (changed(seed=1, optim__lr=0.5), "config.optim.lr"),
    "XLA's flags": (variable("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"), "XLA_FLAGS"),
    "libtpu's flags": (variable("LIBTPU_INIT_ARGS", "--x=1"), "LIBTPU_INIT_ARGS"),
    "NCCL": (variable("NCCL_ALGO", "Ring"), "NCCL_ALGO"),
    "TF32": (variable("NVIDIA_TF32_OVERRIDE", "0"), "NVIDIA_TF32_OVERRIDE"),
    "64 bits": (option_of_jax("jax_enable_x64", True), "JAX_ENABLE_X64"),
    "precision": (
        option_of_jax("jax_default_matmul_precision", "highest"), "JAX_DEFAULT_MATMUL_PRECISION"
    ),
    "random numbers": (
        option_of_jax("jax_threefry_partitionable", False), "JAX_THREEFRY_PARTITIONABLE"
    ),
    "version": (own_version, "the version of vit_jax"),
    "an edited file": (own_files, "the files of the package vit_jax"),
    "a registered file": (registered_file, "the file family.py"),
    "jaxlib": (version_of("jaxlib", "0.1"), "the version of jaxlib"),
    "libtpu": (version_of("libtpu", "0.0.9"), "the version of libtpu"),
    "one image more": (images(add_image), "the number of images"),
    "one image less": (images(remove_image), "the number of images"),
    "another image": (images(replace_image), "the names, sizes, labels or order of images (fingerprint)"),
    "a class renamed": (images(rename_class), "the classes of images, number 0"),
    "classes exchanged": (images(exchange_classes), "the contents of some of images"),
    "an image in another class": (
        images(move_image), "the names, sizes, labels or order of images (fingerprint)"
    ),
    "another part": (images(train_split="train[:90%]"), "the number of images"),
}  # fmt: skip


@pytest.mark.parametrize("describe, field", DIFFERENCES.values(), ids=DIFFERENCES)
def test_thirty_differences_are_refused_by_name(config, monkeypatch, tmp_path, describe, field):
    assert len(DIFFERENCES) >= 30
    if field.endswith(("images", "(fingerprint)", "number 0")):
        for name in ("disc", "star"):
            for number in range(9):
                for split in ("train", "val"):
                    write_image(tmp_path / f"data/{split}/{name}/{number}.png", 9 + number)
        first = images()(config, monkeypatch, tmp_path)
    else:
        first = agreement.describe_program() | agreement.describe_config(config)
    own = first | describe(config, monkeypatch, tmp_path)
    difference = comparison.find_difference(first, own)
    assert field in (difference["field"], *difference["more"])
    sentence = comparison.describe_differences({1: difference | {"host": "node1"}}, "node0")
    assert field.partition(",")[0] in sentence
    assert difference["first"] != difference["own"]


# Variables that the programs of vit_jax read and that hosts may set differently.
MAY_DIFFER = {
    "addresses and numbers of processes, which differ in every run": (
        "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "LOCAL_RANK",
        "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_hnp_uri", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID",
        "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "TPU_WORKER_HOSTNAMES",
    ),
    "which devices are a process's own; kind and number of devices are compared": (
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS",
        "SLURM_GPUS_ON_NODE", "TPU_ACCELERATOR_TYPE", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD",
    ),
    "numbers of threads": ("SLURM_CPUS_ON_NODE",),
    "how memory of a device is taken, which changes no program": (
        "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
    ),
    "where files are read from; the data themselves are compared": (
        "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_REGION", "STORAGE_EMULATOR_HOST", "TFDS_DATA_DIR",
        "EPATH_USE_TF",
    ),
    "cache folders": ("XDG_CACHE_HOME",),
    "whether this is a restart of its process": (
        "KUBERNETES_SERVICE_HOST", "SLURM_RESTART_COUNT", "VIT_JAX_RESTARTS",
    ),
    "what a terminal shows": ("CI", "TERM"),
    "no variables but names of os.sysconf": ("SC_CLK_TCK", "SC_PAGE_SIZE", "SC_PHYS_PAGES"),
}  # fmt: skip
_VARIABLE = r"[A-Z][A-Z0-9]*(_[A-Za-z0-9]+)+|CI|TERM|HOME"


def test_every_variable_that_the_programs_read_is_compared_or_may_differ():
    read = set()
    for file in pathlib.Path(vit_jax.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if "environ" not in text:
            continue
        strings = [
            node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)
        ]
        read |= {value for value in strings if re.fullmatch(_VARIABLE, str(value))}
    fields = agreement.describe_program()
    compared = {name for name in read if name in fields}
    may_differ = set(itertools.chain(*MAY_DIFFER.values()))
    # JAX's own list of platforms is one of its options: `jax_platforms`.
    assert read - compared == may_differ
    assert {"XLA_FLAGS", "JAX_PLATFORMS"} <= compared


STARTED = """
import sys
import vit_jax
from etils import epath
from vit_jax import evaluation
from vit_jax.data import sources
from vit_jax.devices import processes
from vit_jax.training import agreement
from vit_jax.training.assembly import resolve
from vit_jax.training.with_data import assembly_for, subject_of
address, count, index, workdir = sys.argv[1:]
if count != "1":
    processes.initialize(address, int(count), int(index))
config = resolve(vit_jax.load_config("digits"))
source = sources.open_train(config.data)
assembly = assembly_for(config, source)
suite = evaluation.make(config.eval.evaluators, subject_of(assembly, source))
agreement.check_run_agrees(assembly, source, suite)
agreement.check_devices_agree(config)
agreement.check_workdir_is_shared(epath.Path(workdir), 1)
"""


def start_healthy(workdir, count: int, address: str) -> list[int]:
    """The exit codes of all processes of a start that makes every check of a training run."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STARTED, address, str(count), str(i), str(workdir)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "HOSTNAME": f"node{i}", "SLURM_CPUS_ON_NODE": str(i + 1)},
        )
        for i in range(count)
    ]  # fmt: skip
    return [process.wait(PATIENCE) for process in started]


@pytest.mark.parametrize(
    "counts",
    [
        [1, 2, 2],
        pytest.param([1, 2, 4, 4, 2, 1, 3, 2] * 5 + [2, 4], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_no_healthy_start_is_refused_whatever_the_number_of_hosts(tmp_path, counts):
    address = f"127.0.0.1:{free_port()}"  # the restarts of one run have one
    assert [start_healthy(tmp_path, count, address) for count in counts] == [
        [0] * count for count in counts
    ]
