"""Which tests a change reaches, in a small repository, and that what `changed.py` states is there in this one."""

import ast

import pytest

from tests.changed import CORE_TESTS, PLUGINS, READERS, Reach
from tests.file_pieces import WHOLE
from tests.import_graph import ROOT, modules, parsed

FILES = {
    "vit_jax/__init__.py": "if TYPE_CHECKING:\n    from vit_jax.loop import train",
    "vit_jax/loop.py": "from vit_jax import zoo",
    "vit_jax/zoo/__init__.py": 'TABLE = {"vit": ("vit_jax.zoo.vit:ViT", "ViT-"), "mixer": "vit_jax.zoo.mixer"}',
    "vit_jax/zoo/vit.py": "",
    "vit_jax/zoo/mixer.py": "from vit_jax.zoo import mixing",
    "vit_jax/zoo/mixing.py": "import json\nNAMES = json.load(open('names.json'))",
    "vit_jax/names.json": "",
    "vit_jax/commands/__init__.py": "",
    "vit_jax/commands/main.py": 'COMMANDS = {"train": "vit_jax.commands.run"}',
    "vit_jax/commands/run.py": "",
    "vit_jax/interchange/formats.py": 'FORMATS = {"npz": "vit_jax.interchange.npz"}',
    "vit_jax/interchange/npz.py": "",
    "configs/tokens.py": 'model, split = "mixer", "train"',
    "configs/more_tokens.py": "import tokens",
    "configs/sized.py": "SIZES = {'small': 'mixer', 'large': 1}\n\n\ndef get_config(arg): return SIZES[arg]",
    "launch/start.sh": "",
    "tests/conftest.py": '@fixture\ndef trained():\n    return train("tokens")\n\n\ndef other(): pass',
    "tests/helpers.py": "def loop():\n    import vit_jax.loop\n\n\ndef vit():\n    import vit_jax.zoo.vit",
    "tests/test_imports_it.py": "from vit_jax.zoo.mixer import Mixer",
    "tests/test_names_it.py": 'make("--model=mixer")',
    "tests/test_says_it.py": '"""A mixer."""\nassert error == "the run of a mixer is not as long as it was"',
    "tests/test_names_a_size.py": 'make("ViT-B/16")',
    "tests/test_uses_a_fixture.py": "def test_it(trained): pass",
    "tests/test_has_a_variable_of_its_name.py": "trained = 1\nassert trained",
    "tests/test_uses_a_helper.py": "from tests.helpers import vit\nvit()",
    "tests/test_trains.py": "import vit_jax\nvit_jax.train()",
    "tests/test_names_a_recipe.py": 'load_config("configs/more_tokens.py")',
    "tests/test_chooses_an_entry.py": 'load_config("configs/sized.py:small")',
    "tests/test_chooses_another.py": 'load_config("configs/sized.py:large")',
    "tests/test_starts.py": 'run("start.sh")',
    "tests/test_commands.py": 'command("train")',
    "tests/test_names_a_format.py": 'from vit_jax.interchange import formats\nread("a.npz")',
    "tests/test_reads_arrays.py": 'from vit_jax.interchange import formats\nnp.load("a.npz")',
    "tests/test_reads_no_format.py": 'read("a.npz")',
    "tests/test_nothing.py": "import json",
    "tests/test_reads_in_part.py": "from vit_jax.interchange import formats\n\n\n"
    "def test_named():\n    save('npz')\n\n\ndef test_read():\n    formats.read_checkpoint(FILE)\n\n\n"
    "def test_neither(): pass",
    "tests/test_is_slow.py": 'MODEL = "mixer"\n\n\n@pytest.mark.slow\ndef test_it():\n    make(MODEL)',
    "tests/test_in_part.py": "from vit_jax import loop\n\n\n@fixture\ndef big():\n    return 'ViT-L/16'\n\n\n"
    "def test_one(big): pass\n\n\nclass TestTwo:\n    SIZE = 'ViT-S/16'\n\n\ndef test_three(): pass",
}  # fmt: skip

# By the recipe of tokens.
MIXER = {"uses_a_fixture", "names_a_recipe"}


@pytest.fixture(scope="module")
def reach(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Reach(root)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("vit_jax/zoo/mixer.py", {*MIXER, "imports_it", "names_it", "chooses_an_entry"}),
        ("vit_jax/zoo/mixing.py", {*MIXER, "imports_it", "names_it", "chooses_an_entry"}),
        ("vit_jax/names.json", {*MIXER, "imports_it", "names_it", "chooses_an_entry"}),
        ("vit_jax/zoo/vit.py", {"names_a_size", "uses_a_helper", "in_part"}),
        ("vit_jax/interchange/npz.py", {"names_a_format", "reads_in_part"}),
        ("vit_jax/loop.py", {"trains", "in_part"}),
        ("vit_jax/commands/run.py", {"commands"}),
        ("launch/start.sh", {"starts"}),
        ("configs/tokens.py", MIXER),
        ("tests/test_nothing.py", {"nothing"}),
    ],
)
def test_a_change_reaches_the_tests_that_import_or_name_what_changed(reach, path, expected):
    stated = set(CORE_TESTS).union(
        *(tests for folder, tests in READERS.items() if path.startswith(folder))
    )
    files = {test.partition("::")[0] for test in reach.reached_by([path])}
    assert files - stated == {f"tests/test_{name}.py" for name in expected}


def test_of_a_file_those_tests_run_that_reach_what_changed(reach):
    file, vit, loop = "tests/test_in_part.py", "vit_jax/zoo/vit.py", "vit_jax/loop.py"
    tests = set(reach.reached_by([vit]))
    assert tests >= {f"{file}::test_one", f"{file}::TestTwo"}
    assert tests.isdisjoint({file, f"{file}::test_three"})
    tests = set(reach.reached_by([vit, loop]))  # the file imports the loop: that reaches every test
    assert file in tests and tests.isdisjoint({f"{file}::test_one", f"{file}::TestTwo"})


def test_what_reads_a_model_reaches_the_formats_that_its_file_names(reach):
    tests = [test for test in reach.reached_by(["vit_jax/interchange/npz.py"]) if "in_part" in test]
    assert tests == [f"tests/test_reads_in_part.py::test_{name}" for name in ("named", "read")]


def test_the_words_of_a_test_choose_an_entry_of_a_recipes_table(reach):
    tests = set(reach.reached_by(["vit_jax/zoo/mixing.py"]))
    assert "tests/test_chooses_an_entry.py" in tests
    assert "tests/test_chooses_another.py" not in tests


def test_the_core_is_tested_whatever_changed_and_changes_add_up(reach):
    assert reach.reached_by([]) == sorted(CORE_TESTS)
    one, other = reach.reached_by(["vit_jax/loop.py"]), reach.reached_by(["vit_jax/zoo/mixer.py"])
    assert reach.reached_by(["vit_jax/loop.py", "vit_jax/zoo/mixer.py"]) == sorted({*one, *other})


@pytest.mark.parametrize("path", ["setup.py", "tests/conftest.py", "a file that no test names"])
def test_what_may_reach_any_test_reaches_all(reach, path):
    assert reach.reached_by(["vit_jax/loop.py", path]) is None


def test_what_is_stated_is_there():
    known = modules("vit_jax", "tests")
    files = [*CORE_TESTS, *(test for tests in READERS.values() for test in tests)]
    assert [name for name in [*files, *READERS] if not (ROOT / name).exists()] == []
    assert known.keys() >= PLUGINS
    for module in set(WHOLE.values()):
        names = {node.id for node in ast.walk(parsed(known[module])) if isinstance(node, ast.Name)}
        assert names & {name for name, place in WHOLE.items() if place == module}, module
