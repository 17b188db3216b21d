"""Which file of the repository imports which, read from the files without running them: for the test of the rooms'
order (`test_imports.py`) and for the choice of tests that a change reaches (`changed.py`).
"""

import ast
import functools
import pathlib

import networkx

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vit_jax"


def modules(*folders: str, root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
    """Every Python file of folders of the repository by the name under which it is imported."""
    names = {}
    for path in (path for folder in folders for path in (root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def imports_of(tree: ast.AST, known: dict[str, pathlib.Path]) -> set[str]:
    """The known files that a piece of code imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            names |= {member if member in known else node.module for member in members}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & known.keys()


def graph(known: dict[str, pathlib.Path]) -> networkx.DiGraph:
    """An edge from each file to each that it imports."""
    return networkx.DiGraph(
        {name: imports_of(parsed(path), known) - {name} for name, path in known.items()}
    )
