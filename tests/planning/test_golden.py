"""What the shipped recipes compile to for TPUs is what was reviewed: see `golden.py`."""

import json

import pytest

from tests.planning import golden
from tests.repeats import slow_unless

# Seconds each; the others with -m slow.
QUICK = ("digits-2-slices",)
REWRITE = "if this is meant: python -m tests.planning.golden"


def test_every_recipe_has_a_file():
    recipes = {path.stem for path in (golden.ROOT / "configs").glob("*.py")}
    # Four begin with files of weights, of the digits and of teachers. The fifth takes other recipes. Of the last three
    # tests/objectives has the program.
    assert {case.config.partition(".")[0] for case in golden.CASES.values()} == recipes - {
        "digits_finetune",
        "distill",
        "features",
        "flexivit",
        "best",
        "image_text",
        "sum",
        "dino_txt",
    }
    assert {path.stem for path in golden.FOLDER.glob("*.json")} == golden.CASES.keys()


@pytest.mark.parametrize("name", slow_unless(QUICK, golden.CASES))
def test_a_recipe_compiles_to_what_was_reviewed(name):
    reviewed = golden.read(name)
    now, step = golden.prepared(golden.CASES[name])
    now = json.loads(json.dumps(now))
    assert now == {key: reviewed[key] for key in now}, f"{name} {REWRITE} {name}"
    if reviewed["versions"] != golden.versions():
        pytest.skip(f"reviewed with {reviewed['versions']}, here {golden.versions()}")
    compiled = golden.compiled(step, golden.CASES[name].slices)
    assert compiled == reviewed["compiled"], f"{name} {REWRITE} {name}"
