"""What is built and installed works outside of the clone: recipes by name, the guides' recipes, training."""

import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from tests.conftest import QUICK
from tests.integration.conftest import TINY
from vit_jax import __version__
from vit_jax.base.errors import ConfigError
from vit_jax.planning import catalogue
from vit_jax.recipes import shipped, user_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
BUILT_FROM = (
    "configs",
    "launch",
    "vit_jax",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)
BUILT_FROM += ("CHANGELOG.md", "CITATION.cff", "docs/notebooks")


def build(kind: str, source: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The wheel that is built of the sdist, which is built of the clone."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in BUILT_FROM:  # building writes beside them
        (source / name).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    with tarfile.open(build("build_sdist", source, folder)) as archive:
        archive.extractall(folder, filter="data")
    return build("build_wheel", folder / f"vit_jax-{__version__}", folder)


@pytest.fixture(scope="module")
def outside(wheel, tmp_path_factory):
    """`outside(*command)`: runs a program of an environment that has the wheel, and of the tests' packages all others,
    in a folder outside of the clone.
    """
    folder = tmp_path_factory.mktemp("outside")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "of_tests.pth").write_text(sysconfig.get_path("purelib"))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"XLA_FLAGS": QUICK, "PATH": f"{environment}/bin:{os.environ['PATH']}"}

    def run(*command) -> subprocess.CompletedProcess:
        return subprocess.run(
            list(map(str, command)), cwd=folder, env=variables, capture_output=True, text=True
        )

    pip = (
        "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        "--no-compile",
    )
    installed = run(*pip, "--ignore-installed", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    return run


def test_the_wheel_has_every_recipe_once_and_nothing_beside_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    recipes = {
        f"vit_jax/configs/{path.relative_to(ROOT / 'configs').as_posix()}"
        for path in (ROOT / "configs").rglob("*.py")
    }
    assert {name for name in names if "configs/" in name} == recipes
    assert {name.split("/")[0] for name in names} == {"vit_jax", f"vit_jax-{__version__}.dist-info"}
    launch = [path for path in (ROOT / "launch").rglob("*") if path.is_file()]
    launch = [path for path in launch if "__pycache__" not in path.parts]
    assert {f"vit_jax/{path.relative_to(ROOT).as_posix()}" for path in launch} <= set(names)
    assert {
        "vit_jax/py.typed",
        "vit_jax/annotations.pyi",
        "vit_jax/commands/completion.json",
    } <= set(names)
    assert {"vit_jax/notebooks/fine_tune.ipynb", "vit_jax/notebooks/look_inside.ipynb"} <= set(
        names
    )
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vit_jax").rglob("*.py")}
    assert modules <= set(names)


GUIDES_RECIPES = """
import json, pathlib, sys
import vit_jax
from vit_jax.planning import catalogue
from vit_jax.recipes import shipped, user_files

for spec in json.loads(sys.argv[1]):
    if "" in user_files.load_recipe(spec):
        vit_jax.load_config(spec)
copied = catalogue.copy_recipe("noisy_student", "mine"), catalogue.copy_recipe("experiments/pooling", "mine")
runs = [sorted(user_files.load_recipe(f"{path}:smoke")) for path in copied]
print(json.dumps({"file": vit_jax.__file__, "folder": str(shipped.recipes_folder()), "runs": runs}))
"""


PREDICTS = """
import sys
import numpy, vit_jax
from vit_jax.commands.main import run
print(*vit_jax.load_run("W")(numpy.zeros((32, 32, 3), "uint8")).names)
sys.argv = ["vit_jax", "vtab", "--checkpoint=W", "--workdir=V", "--config.data.path=nothing"]
run()
"""


def test_every_recipe_that_a_guide_names_is_found_outside_the_clone(outside):
    guides = "".join(
        path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    )
    specs = sorted(set(re.findall(r"--config=(configs/[\w/]+\.py(?::[\w/,.+-]+)?)", guides)))
    assert len(specs) > 30
    names = shipped.recipe_names()
    done = outside("python", "-c", GUIDES_RECIPES, json.dumps([*specs, "finetune:pets", *names]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert str(ROOT) not in found["file"] and found["folder"].endswith("vit_jax/configs")
    assert found["runs"][0] == ["round_1", "round_2", "teacher"] and len(found["runs"][1]) == 12


def test_outside_the_clone_a_recipe_trains_by_name_and_its_run_predicts(outside, compilation_cache):
    few = {
        "duration": "4 steps",
        "compilation_cache": compilation_cache,
        "eval.evaluators": "()",
    }
    tiny = [f"--config.{name}={value}" for name, value in (TINY | few).items()]
    done = outside("vit_jax", "train", "--config=digits", "--workdir=W", *tiny, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 4
    done = outside("python", "-c", PREDICTS)
    assert len(done.stdout.split()) == 5, done.stderr
    assert done.returncode == 2 and "is not prepared in" in done.stderr


def test_outside_the_clone_a_type_checker_finds_mistakes_and_no_others(outside):
    for name in ("mistakes.py", "correct.py"):
        outside("cp", ROOT / "tests" / "typing" / name, name)
    pyrefly = pathlib.Path(sys.executable).with_name("pyrefly")
    python = outside("which", "python").stdout.strip()
    words = ("--preset=default", "--output-format=min-text", "mistakes.py", "correct.py")
    done = outside(pyrefly, "check", f"--python-interpreter-path={python}", *words)
    lines = set(re.findall(r"^ERROR \S*?(\w+)\.py:(\d+)", done.stdout, re.M))
    assert len(lines) == 10 and {name for name, _ in lines} == {"mistakes"}, done.stdout


def test_outside_the_clone_runs_are_launched_with_the_version_that_is_installed(outside):
    flags = ("--name=b16", "--topology=v5e:2x2", "--dry_run", "--unchecked")
    follow = ("--", "evaluate", "--follow", "--checkpoint=gs://bucket/run")
    done = outside("vit_jax", "launch", "gke", *flags, *follow)
    assert done.returncode == 0 and f"vit_jax[tpu,gcs]=={__version__}" in done.stdout, done.stderr
    install = ("--name=b16", "--zone=us-east5-b", "--dry_run")
    done = outside("vit_jax", "launch", "tpu_vm", "install", *install)
    assert f"tpu_worker.sh install --version={__version__}" in done.stdout, done.stderr


def test_a_recipe_is_found_by_its_name_and_by_its_path():
    by_name = user_files.load_config("deit:S")
    assert by_name == user_files.load_config(str(ROOT / "configs/deit.py:S"))
    assert (
        by_name
        == user_files.load_config("configs/deit.py:S")
        == user_files.load_config("deit.py:S")
    )


def test_an_unknown_recipe_is_refused_with_the_nearest(command):
    code, _, err = command("train", "--config=vit_i12k:B/16", "--workdir=W")
    assert (
        code == 2
        and "'vit_i21k'" in err
        and "'vit_i1k'" in err
        and "'vit_jax recipes' lists all" in err
    )
    code, _, err = command("recipes", "copy", "experiments/poling", "mine")
    assert code == 2 and "did you mean 'experiments/pooling'" in err


def test_a_local_file_comes_before_a_recipe_of_its_name_which_is_logged(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    path = catalogue.copy_recipe("digits", ".")
    path.write_text(
        path.read_text().replace("    return config", "    config.seed = 7\n    return config")
    )
    with caplog.at_level("WARNING"):
        assert user_files.load_recipe("digits")[""].seed == 7
        assert user_files.load_config("digits").seed == 7
    assert caplog.text.count(f"the local file {tmp_path / 'digits.py'} is used") == 1
    assert user_files.load_config(str(ROOT / "configs/digits.py")).seed == 0
    with pytest.raises(ConfigError, match=r"digits\.py exists"):
        catalogue.copy_recipe("digits", str(tmp_path))


@pytest.mark.slow
def test_every_recipe_is_listed(command):
    code, out, err = command("recipes", "--json")
    assert code == 0, err
    rows = json.loads(out.splitlines()[-1])
    assert [row["name"] for row in rows] == shipped.recipe_names()
    assert all(row["title"] and row["data"] and row["model"] for row in rows)


def test_recipes_are_listed_with_size_data_cost_and_what_to_expect(command):
    names = ["deit", "finetune", "experiments/pooling"]
    rows = {row["name"]: row for row in catalogue.recipe_table(names)}
    assert (
        "DeiT-S/16, 22.1 M parameters, imagenet2012, 300 epochs, at least 15 hours of a TPU v5e"
        in (catalogue.recipe_text(list(rows.values())))
    )
    deit = rows["deit"]
    assert (deit["config"], deit["model"], deit["data"]) == ("deit:S", "DeiT-S/16", "imagenet2012")
    assert deit["parameters"] == 22_050_664 and deit["expect"].startswith(
        "Expect 72.2, 79.9 and 81.8 %"
    )
    # 300 epochs of 1,281,167 images, three passes of 9.2 GFLOPs each, on 197 TFLOP/s.
    assert deit["chip_hours"] == pytest.approx(
        300 * 1_281_167 * 3 * 9.2e9 / 197e12 / 3600, rel=0.02
    )
    assert rows["experiments/pooling"]["runs"] == 12 and rows["finetune"]["parameters"] is None
    code, out, _ = command("recipes", "finetune")
    assert code == 0 and "R50+B/16 98.72 / 98.94" in out


PERSON = "-c user.name=a -c user.email=a@b.c"


@pytest.fixture
def repository(tmp_path):
    """A small repository that can be released."""
    for name in ("tools/release.sh", "vit_jax/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for words in (("init", "-q"), ("add", "."), (*PERSON.split(), "commit", "-qm", "x")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("true", 0, f"v{__version__} can be released"),
        ("echo x > new.txt", 2, "uncommitted changes"),
        ("echo >> CITATION.cff", 2, "uncommitted changes"),
        (f"git tag v{__version__}", 2, f"tag v{__version__} exists"),
        (f"sed -i 's/^## \\[[0-9].*//' CHANGELOG.md && git {PERSON} commit -qam y", 2, "no heading"),
    ],
)  # fmt: skip
def test_a_release_is_made_only_of_a_clean_tree_with_a_changelog(repository, change, code, message):
    subprocess.run(["bash", "-c", change], cwd=repository, check=True)
    command = ["bash", "tools/release.sh", "--dry_run"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == code and message in done.stdout + done.stderr


def test_the_changelog_and_the_citation_have_the_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", __version__]
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
