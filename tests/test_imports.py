"""Files import downwards: no circles, and no arrow from a room to one above it. All imports count, those
inside functions and those for types alone too. Public names are those of few files. Recipes and `launch/` have no
circles either.
"""

import ast
import collections
import pathlib

import networkx
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vit_jax"
# From the ground up: a room may import those before it. Files beside the rooms are rooms of one file.
ROOMS = (
    "base", "devices", "pictures", "compute", "models", "data", "objectives", "optim", "config", "recipes",
    "user_files", "checkpoints", "interchange", "evaluation", "prediction", "training", "inspection", "studies",
    "planning", "export", "api", "serving", "benchmarks", "__init__", "commands", "main", "__main__",
)  # fmt: skip
# Names that modules share since they fulfil one contract (docs/design.md).
CONTRACTS = {
    "read", "write", "load", "recognises", "inspect", "options_from_name", "register", "make", "text",
    "Authors", "Timm", "Own",
}  # fmt: skip
MOST = 3


def modules(
    folder: pathlib.Path = PACKAGE, seen_from: pathlib.Path = ROOT
) -> dict[str, pathlib.Path]:
    """Every file of a folder by the name under which it is imported."""
    names = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(seen_from).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(path: pathlib.Path, known: dict[str, pathlib.Path]) -> set[str]:
    """The files of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {member if member in known else node.module for member in members}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


def graph(known: dict[str, pathlib.Path] | None = None) -> networkx.DiGraph:
    known = known or modules()
    return networkx.DiGraph(
        {name: imports_of(path, known) - {name} for name, path in known.items()}
    )


def room_of(name: str) -> str:
    return (*name.split("."), "__init__")[1]


def test_no_relative_import_escapes_the_count():
    for path in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not any(isinstance(n, ast.ImportFrom) and n.level for n in nodes), path


def test_every_room_has_its_place_in_the_order():
    assert {room_of(name) for name in modules()} == set(ROOMS)


@pytest.mark.parametrize(
    "folder, seen_from, edge",
    [
        ("vit_jax", ".", ("vit_jax.training.loop", "vit_jax.training.step")),
        (
            "configs",
            "configs",
            ("dino", "dino_continue"),
        ),  # Recipes import their neighbours by name.
        ("launch", ".", ("launch.engines.ray", "launch.ray_train")),
    ],
)
def test_there_are_no_circles_between_files(folder, seen_from, edge):
    files = graph(modules(ROOT / folder, ROOT / seen_from))
    assert files.has_edge(*edge)  # Imports are seen.
    circles = [sorted(c) for c in networkx.strongly_connected_components(files) if len(c) > 1]
    assert not circles


def test_no_room_imports_one_above_it():
    up = [
        (one, other)
        for one, other in graph().edges
        if ROOMS.index(room_of(one)) < ROOMS.index(room_of(other))
    ]
    assert not up


def test_a_public_name_is_that_of_at_most_three_files_or_of_a_contract():
    files = collections.defaultdict(set)
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].add(name)
    shared = {name: sorted(found) for name, found in files.items() if len(found) > MOST}
    assert shared.keys() <= CONTRACTS, shared
