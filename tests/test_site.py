"""The site builds without a warning: every link and every docstring of the reference is understood."""

import pathlib
import re
import subprocess
import sys

import pytest

import vit_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
GUIDES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/extending").glob("*.md")]


# mkdocs with two recipes on their page, for which every model is traced; all of them are of `test_package.py`.
BUILD = """
from mkdocs.__main__ import cli
from vit_jax.planning import catalogue

table = catalogue.recipe_table
catalogue.recipe_table = lambda: table(["digits", "scaling_vit"])
cli()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", BUILD, "build", "--strict", "--quiet", f"--site-dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_reference_has_every_public_name(site):
    page = (site / "reference" / "index.html").read_text()
    anchors = set(re.findall(r'id="vit_jax\.[\w.]*\.(\w+)"', page))
    assert set(vit_jax.__all__) <= anchors
    for method in ("__call__", "features", "evaluate", "save", "export", "push", "preprocess"):
        assert f'id="vit_jax.api.Run.{method}"' in page


def test_recipes_guides_and_changelog_are_pages(site):
    assert "scaling_vit:g/14" in (site / "recipes" / "index.html").read_text()
    assert vit_jax.__version__ in (site / "changelog" / "index.html").read_text()
    guides = {path.stem for path in GUIDES}
    assert guides <= {path.parent.name for path in site.rglob("index.html")}


def test_every_guide_is_in_the_navigation():
    named = set(re.findall(r"(\w[\w-]*)\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {path.stem for path in GUIDES} <= named


def test_examples_flags_and_lists_look_as_they_were_meant(site):
    reference = (site / "reference" / "index.html").read_text()
    assert "<blockquote>" not in reference and "&gt;&gt;&gt;" not in reference
    assert '<span class="flag">--dry_run</span>' in (site / "index.html").read_text()
    finetuning = (site / "finetuning" / "index.html").read_text()
    assert "- Several" not in finetuning and "<li>Several" in finetuning
