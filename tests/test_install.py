"""What messages say about installing an extra, and the project's address, of which there is one."""

import ast
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from vit_jax.base.install import REPOSITORY, _command, clone_folder

ROOT = pathlib.Path(__file__).resolve().parents[1]
GIT = {"url": "https://host/team/vit_jax", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}
ARCHIVE = {"url": "https://host/vit_jax-0.2.0.tar.gz", "archive_info": {}}


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (GIT, "vit_jax[hub] @ git+https://host/team/vit_jax@abc123"),
        (ARCHIVE, "vit_jax[hub] @ https://host/vit_jax-0.2.0.tar.gz"),
    ],
    ids=["repository", "archive"],
)
def test_an_extra_is_installed_from_where_the_package_came_from(origin, requirement):
    words = shlex.split(_command("hub", json.dumps(origin), None, ""))
    assert words == ["pip", "install", requirement]
    assert Requirement(requirement).extras == {"hub"}


@pytest.mark.parametrize(
    ("clone", "repository", "requirement"),
    [
        (ROOT, "", f"{ROOT}[hub]"),
        (ROOT, "https://host/team/vit_jax", f"{ROOT}[hub]"),
        (None, "https://host/team/vit_jax", "vit_jax[hub] @ git+https://host/team/vit_jax"),
        (None, "", "vit_jax[hub]"),
    ],
    ids=["clone", "clone of a published one", "published", "unknown"],
)
def test_where_the_origin_is_not_known_an_extra_is_installed_from_the_clone_or_by_name(
    clone, repository, requirement
):
    assert shlex.split(_command("hub", "", clone, repository))[2:] == [requirement]


def test_a_clone_is_a_folder_that_pip_can_install():
    assert clone_folder() == ROOT and (ROOT / "setup.py").is_file()


def test_an_extra_of_a_clone_or_a_wheel_is_installed_from_its_path(tmp_path):
    folder, wheel = tmp_path / "my clone", tmp_path / "vit_jax-0.2.0-py3-none-any.whl"
    folder.mkdir()
    wheel.touch()
    clone = {"url": folder.as_uri(), "dir_info": {"editable": True}}
    words = shlex.split(_command("hub", json.dumps(clone), ROOT, ""))
    assert words == ["pip", "install", "--editable", f"{folder}[hub]"]
    built = json.dumps({"url": wheel.as_uri(), "archive_info": {}})
    assert shlex.split(_command("hub", built, None, ""))[-1] == f"vit_jax[hub] @ {wheel.as_uri()}"
    wheel.unlink()
    assert shlex.split(_command("hub", built, None, ""))[-1] == "vit_jax[hub]"


def test_every_message_about_an_extra_uses_the_one_sentence_and_names_one_that_there_is():
    extras = set(re.findall(r'^        "([\w-]+)": ', (ROOT / "setup.py").read_text(), re.M))
    named = set()
    for path in (ROOT / "vit_jax").rglob("*.py"):
        text = path.read_text()
        if path.name != "install.py":
            assert not re.search(r"pip install [^\n]*vit_jax", text), path
        for node in ast.walk(ast.parse(text)) if "pip_install(" in text else ():
            is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "pip_install"
            if is_call and isinstance(node.args[0], ast.Constant):
                named.add(node.args[0].value)
    assert {"hub", "plan", "onnx"} <= named <= extras
    assert {"gcs", "s3"} <= extras  # of `base/buckets.py`


def test_no_page_has_a_placeholder_for_the_address_and_all_have_the_one_that_is_in_the_code():
    assert re.fullmatch(r"(https://[a-z][\w.-]*[a-z](/[\w.-]+)+)?", REPOSITORY)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*"), *(ROOT / "launch").rglob("*")]
    pages += (ROOT / "vit_jax").rglob("*.py")
    for page in (page for page in pages if page.suffix in (".md", ".py", ".sh", ".yaml", ".ipynb")):
        text = page.read_text()
        assert "HOST/OWNER" not in text, f"{page}: nobody can run a command with a placeholder"
        for address in re.findall(r"git\+(https://[\w./-]+)", text):
            assert address.removesuffix(".git") == REPOSITORY, page
    done = subprocess.run(
        [sys.executable, "setup.py", "--url"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split()[-1] == (REPOSITORY or "None"), done.stderr
