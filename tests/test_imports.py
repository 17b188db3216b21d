"""Files import downwards: no circles, and no arrow from a room to one above it. All imports count, those
inside functions and those for types alone too. Public names are those of few files. Recipes and `launch/` have no
circles either.
"""

import ast
import collections
import pathlib

import networkx
import pytest

from tests.import_graph import PACKAGE, ROOT, graph, modules, parsed

# From the ground up: a room may import those before it. Files beside the rooms are rooms of one file.
ROOMS = (
    "base", "annotations", "devices", "pictures", "compute", "models", "data", "objectives", "optim", "config",
    "recipes", "user_files", "checkpoints", "interchange", "evaluation", "prediction", "training", "inspection",
    "studies", "planning", "export", "extend", "api", "serving", "benchmarks", "__init__", "commands", "main",
    "__main__",
)  # fmt: skip
# Names that modules share since they fulfil one contract (docs/design.md).
CONTRACTS = {
    "read", "write", "load", "recognises", "inspect", "options_from_name", "register", "make", "text",
    "Authors", "Timm", "Own",
}  # fmt: skip
MOST = 3


@pytest.fixture(scope="module")
def files():
    return modules("vit_jax")


def named_in(path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """The files that a file names in tables of what is imported later: 'vit_jax.models.zoo.mixer:Model'."""
    nodes = ast.walk(parsed(path))
    texts = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {text.partition(":")[0] for text in texts} & known.keys() - {"vit_jax"}


def room_of(name: str) -> str:
    return (*name.split("."), "__init__")[1]


def test_no_relative_import_escapes_the_count():
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(parsed(path))
        assert not any(isinstance(n, ast.ImportFrom) and n.level for n in nodes), path


def test_every_room_has_its_place_in_the_order(files):
    assert {room_of(name) for name in files} == set(ROOMS)


@pytest.mark.parametrize(
    "root, folder, edge",
    [
        (ROOT, "vit_jax", ("vit_jax.training.loop", "vit_jax.training.setup")),
        # Recipes import their neighbours by name.
        (ROOT / "configs", ".", ("dino", "dino_continue")),
        (ROOT, "launch", ("launch.engines.ray", "launch.ray_train")),
    ],
    ids=["vit_jax", "configs", "launch"],
)
def test_there_are_no_circles_between_files(root, folder, edge):
    files = graph(modules(folder, root=root))
    assert files.has_edge(*edge)  # Imports are seen.
    circles = [sorted(c) for c in networkx.strongly_connected_components(files) if len(c) > 1]
    assert not circles


def test_no_room_imports_one_above_it(files):
    up = [
        (one, other)
        for one, other in graph(files).edges
        if ROOMS.index(room_of(one)) < ROOMS.index(room_of(other))
    ]
    assert not up


def test_no_table_of_a_room_names_a_file_of_one_above_it(files):
    named = [(one, other) for one, path in files.items() for other in named_in(path, files)]
    up = [pair for pair in named if ROOMS.index(room_of(pair[0])) < ROOMS.index(room_of(pair[1]))]
    assert len(named) > 50 and not up


def test_a_public_name_is_that_of_at_most_three_files_or_of_a_contract(files):
    owners = collections.defaultdict(set)
    for name, path in files.items():
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].add(name)
    shared = {name: sorted(found) for name, found in owners.items() if len(found) > MOST}
    assert shared.keys() <= CONTRACTS, shared
