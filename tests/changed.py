"""The test files that a change reaches: `bash tests/run.sh --changed [BASE]` runs these. It prints them, or nothing
where that is all of them.

A test file reaches a file that it imports, or that such a file imports in turn. Tables of names (of families,
objectives, evaluators, formats, commands) import nothing themselves, so a test, or a recipe that it names, reaches what
it names: 'dino', 'ViT-B/16', 'convert'. Of a file of tests only the functions, classes and variables count that its
tests use, or those of others that import it; slow tests, which a change does not run, count for nothing.
"""

import ast
import collections
import dataclasses
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from tests import import_graph
from tests.import_graph import ROOT, imports_of, parsed

# The core's own tests: run after every change.
CORE_TESTS = (
    "tests/test_core.py", "tests/test_changed.py", "tests/test_imports.py", "tests/test_words.py",
    "tests/test_patterns.py", "tests/test_schema.py", "tests/test_durations.py", "tests/test_types.py",
    "tests/models/test_vit.py",
    "tests/objectives/test_supervised.py", "tests/data/test_loader.py", "tests/training/test_step.py",
    "tests/integration/test_train.py",
)  # fmt: skip
# A word of a string that may be a name: not the first part of a dotted one, except of a file's.
WORD = r"(?<![\w-])[\w-]+(?![\w-])(?!\.(?!py\b)\w)"
FOLDERS = ("vit_jax", "tests", "configs", "launch", "tools")
PLUGINS = {
    "tests.skips",
    "tests.lowering_contexts",
    "tests.processor_time",
    "tests.services.buckets",
    "tests.services.launching",
    "tests.services.runs",
}
FIXTURE = "fixture "
NUMPYS_OWN = ("np.load", "np.savez")  # an archive that NumPy reads or writes is no checkpoint
# Where a change reaches all tests.
ALL = (
    "setup.py",
    "pyproject.toml",
    ".ci/",
    "tests/conftest.py",
    "tests/run.sh",
    "tests/services/",
    "launch/venv.sh",
)
# Tests that read all files of a folder, or every entry of a table of names by one of these functions or variables.
READERS = {
    "configs/": ("tests/test_configs.py", "tests/test_docs.py", "tests/planning/test_golden.py"),
    "docs/": (
        "tests/test_docs.py",
        "tests/test_site.py",
        "tests/test_extending.py",
        "tests/test_trouble.py",
    ),
    "docs/notebooks/": ("tests/test_notebooks.py",),
    "README.md": ("tests/test_docs.py",),
    "CONTRIBUTING.md": ("tests/test_docs.py",),
    "CHANGELOG.md": (),
    "launch/": ("tests/launch/test_scripts.py",),
    "tools/": (),
    "tests/golden/": ("tests/planning/test_golden.py",),
}
WHOLE = {
    "FAMILIES": "vit_jax.models.registry",
    "families": "vit_jax.models.registry",
    "variants": "vit_jax.models.registry",
    "EVALUATORS": "vit_jax.evaluation",
    "FORMATS": "vit_jax.interchange.formats",
    "OBJECTIVES": "vit_jax.objectives",
    "COMMANDS": "vit_jax.commands.main",
    "CONVERSIONS": "vit_jax.interchange.conversions.table",
}


@dataclasses.dataclass
class Entry:
    """What a name of a table stands for: modules, and a pattern of longer names that mean them too."""

    modules: set[str] = dataclasses.field(default_factory=set)
    pattern: str | None = None


def table_entries(tree: ast.AST, known: Iterable[str]) -> dict[str, Entry]:
    """The entries of the tables in a file: {'NAME': 'MODULE:ATTRIBUTE'}, with a tuple ('MODULE', PATTERN) or a table of
    its own for a value.
    """
    entries = collections.defaultdict(Entry)
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    inner = {value for table in tables for value in table.values}
    for table in (table for table in tables if table not in inner):
        for key, value in zip(table.keys, table.values, strict=True):
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                continue
            places = {text.partition(":")[0] for text in _strings(value)} & set(known)
            if places:
                entries[key.value].modules |= places
                if isinstance(value, ast.Tuple):
                    entries[key.value].pattern = _strings(value)[-1]
    return entries


def _strings(tree: ast.AST, *, but_of: tuple[str, ...] = ()) -> list[str]:
    """The strings of a piece of code, without its docstrings and the arguments of calls of these functions."""
    waiting, nodes = [tree], []
    while waiting:
        nodes.append(node := waiting.pop(0))
        if not (isinstance(node, ast.Call) and but_of and ast.unparse(node.func) in but_of):
            waiting += ast.iter_child_nodes(node)
    prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
    texts = (node for node in nodes if isinstance(node, ast.Constant) and node not in prose)
    return [node.value for node in texts if isinstance(node.value, str)]


def _assigned(node: ast.Assign) -> set[str]:
    """The variables that an assignment makes, unless it changes something else too."""
    places = [place for target in node.targets for place in getattr(target, "elts", [target])]
    return {x.id for x in places} if all(isinstance(x, ast.Name) for x in places) else set()


def _identifiers(tree: ast.AST) -> set[str]:
    """The names that a piece of code uses; those of a test's arguments, and texts beside `usefixtures`, may be
    fixtures'."""
    names = set()
    for node in ast.walk(tree):
        names |= {getattr(node, field, None) for field in ("id", "arg", "attr")}
        if isinstance(node, ast.alias):
            names.add(node.name)
        elif isinstance(node, ast.FunctionDef) and (
            node.name.startswith("test") or _is_fixture(node)
        ):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names |= {_fixture(argument.arg) for argument in arguments}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    if names & {"usefixtures", "getfixturevalue"}:
        names |= set(map(_fixture, _strings(tree)))
    return names - {None}


def _fixture(name: str) -> str:
    """A fixture's name, apart from those of variables: many are called `file` or `trained`."""
    return f"{FIXTURE}{name}"


def _is_fixture(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(re.match(r"(pytest\.)?fixture\b", ast.unparse(text)) for text in node.decorator_list)


def _is_slow(node: ast.AST) -> bool:
    """Whether all cases of a test are slow."""
    return "pytest.mark.slow" in map(ast.unparse, getattr(node, "decorator_list", ()))


class Piece(NamedTuple):
    """A piece of a file: its module, the modules that it imports or names, formats that it names, the names that it
    uses, and those by which its own module and those that import it use it; of a fixture, any.
    """

    module: str
    modules: frozenset[str]
    formats: frozenset[str]
    identifiers: frozenset[str]
    names: frozenset[str]


class Reach:
    """What each test file of the repository reaches."""

    def __init__(self, root: pathlib.Path = ROOT):
        """Reads the tables of names.

        Args:
          root: the repository.
        """
        self._root = root
        self.known = import_graph.modules(*FOLDERS, root=root)
        self._names = {path: name for name, path in self.known.items()}
        self._entries, self._tables = collections.defaultdict(Entry), {}
        for module, path in self.known.items():
            if module.startswith("vit_jax"):
                entries = table_entries(parsed(path), self.known)
                self._tables[module] = set().union(*(entry.modules for entry in entries.values()))
                for name, entry in entries.items():
                    self._entries[name].modules |= entry.modules
                    self._entries[name].pattern = self._entries[name].pattern or entry.pattern
            elif module.startswith("configs."):
                self._entries[module.rpartition(".")[2]].modules.add(module)

    def tests(self) -> list[str]:
        """The path of every test file."""
        paths = (self._root / "tests").rglob("test_*.py")
        return sorted(path.relative_to(self._root).as_posix() for path in paths)

    @functools.cache  # noqa: B019 (one object a process)
    def of(self, test: str) -> frozenset[str]:
        """The modules that a test file reaches."""
        own = self._names[self._root / test]
        waiting, reached, unused, formats = {own, *self._conftests(test)}, set(), set(), set()
        used = collections.defaultdict(set)  # names, by the module that uses them
        importers = collections.defaultdict(set)
        while waiting:
            module = waiting.pop()
            reached.add(module)
            pieces, maybe = self._pieces(module)
            if module == own:  # pytest finds its tests; the slow ones are not run
                found = {p for p in maybe if any(n.startswith(("test", "Test")) for n in p.names)}
                pieces, maybe = pieces | found, maybe - found
            unused |= maybe
            while pieces or (pieces := self._used(unused, used, importers)):
                for piece in pieces:
                    waiting |= piece.modules - reached
                    used[piece.module] |= piece.identifiers
                    formats |= piece.formats
                    for imported in piece.modules:
                        importers[imported].add(piece.module)
                unused, pieces = unused - pieces, set()
            # Elsewhere the word means something else, as `timm` a RandAugment.
            if WHOLE["FORMATS"] in reached:
                waiting |= formats - reached
        return frozenset(reached)

    def _used(self, pieces: set[Piece], used: dict, importers: dict) -> set[Piece]:
        """Those of the pieces whose names their own module uses, or one that imports it; of fixtures, any."""
        fixtures = {name for names in used.values() for name in names if name.startswith(FIXTURE)}
        return {
            piece
            for piece in pieces
            if piece.names & fixtures
            or any(piece.names & used[m] for m in (piece.module, *importers[piece.module]))
        }

    def reached_by(self, paths: Iterable[str]) -> list[str] | None:
        """The test files that a change of files reaches, with the core's; `None`: all of them.

        Args:
          paths: of the files that changed, below the root.
        """
        tests, chosen = self.tests(), set(CORE_TESTS)
        for path in paths:
            readers = [files for folder, files in READERS.items() if path.startswith(folder)]
            changed = self._modules_of(path)
            reaching = {test for test in tests if changed & self.of(test)}
            reaching |= {test for test in tests if self._mentions(self._root / test, path)}
            if path.startswith(ALL) or not (readers or changed or reaching):
                return None
            chosen |= reaching.union(*readers)
        return sorted(chosen)

    def _modules_of(self, path: str) -> set[str]:
        """The module of a file, or those of the package that read it."""
        if path.endswith(".py"):
            return {self._names.get(self._root / path)} - {None}
        package = (module for module in self.known if module.startswith("vit_jax"))
        return {module for module in package if self._mentions(self.known[module], path)}

    def _mentions(self, file: pathlib.Path, path: str) -> bool:
        """Whether a file has the name of another in a string; modules are found by their imports."""
        name = path.rpartition("/")[2]
        if path.startswith("vit_jax/") and name.endswith(".py"):
            return False
        return any(name in text for text in _texts(file))

    def _conftests(self, test: str) -> set[str]:
        folders = [folder.as_posix() for folder in pathlib.PurePath(test).parents]
        paths = [self._root / folder / "conftest.py" for folder in folders]
        return {self._names[path] for path in paths if path in self._names} | (
            PLUGINS & self.known.keys()
        )

    @functools.cache  # noqa: B019
    def _pieces(self, module: str) -> tuple[set[Piece], set[Piece]]:
        """The pieces of a file that count, and those that count where one of their names is used."""
        tree = parsed(self.known[module])
        if module == "vit_jax":  # its public names are imported when they are used
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            parts = {node: {alias.name for alias in node.names} for node in imports}
        elif module.startswith("tests"):
            tree.body = [node for node in tree.body if not _is_slow(node)]
            definitions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
            parts = {
                n: {_fixture(n.name) if _is_fixture(n) else n.name}
                for n in definitions
                if "autouse" not in ast.unparse(n)
            }
            constants = [n for n in tree.body if isinstance(n, ast.Assign)]
            parts |= {n: names for n in constants if (names := _assigned(n))}
        else:
            parts = {}
        rest = [node for node in tree.body if node not in parts]
        if module == "vit_jax":
            rest = [node for node in rest if not isinstance(node, ast.If)]
        return (
            {self._piece(node, module, set()) for node in rest},
            {self._piece(node, module, names) for node, names in parts.items()},
        )

    def _piece(self, node: ast.AST, module: str, names: set[str]) -> Piece:
        modules, formats, identifiers = imports_of(node, self.known), set(), set()
        if module.startswith("vit_jax"):  # where a name in a string says nothing
            package = module.rpartition(".")[0]
            modules |= {package} & self.known.keys() - {"vit_jax"}
        else:
            identifiers = _identifiers(node)
            named = self._named(_strings(node, but_of=NUMPYS_OWN))
            formats = named & self._tables.get(WHOLE["FORMATS"], set())
            modules |= named - formats
            if module.startswith("configs."):  # recipes import their neighbours by name
                # A split `train` is no command, and who made a checkpoint or chose a rate is no format.
                formats = set()
                for table in ("COMMANDS", "FORMATS", "CONVERSIONS"):
                    modules -= self._tables.get(WHOLE[table], set())
                neighbours = {
                    name.removeprefix("configs."): path for name, path in self.known.items()
                }
                modules |= {
                    f"configs.{name}" for name in imports_of(node, neighbours)
                } & self.known.keys()
            modules |= {m for name in WHOLE.keys() & identifiers for m in self._tables[WHOLE[name]]}
        return Piece(
            module, frozenset(modules), frozenset(formats), frozenset(identifiers), frozenset(names)
        )

    def _named(self, texts: list[str]) -> set[str]:
        """The modules of the entries of tables that strings name."""
        texts = [text for text in texts if not _is_prose(text)]
        words = {word for text in texts for word in re.findall(WORD, text)}
        longer = {word for text in texts for word in re.findall(r"[\w+*.-]+", text)}
        patterns = {name: entry.pattern for name, entry in self._entries.items() if entry.pattern}
        names = words & self._entries.keys() | {
            name for name, pattern in patterns.items() if any(re.match(pattern, w) for w in longer)
        }
        return set().union(*(self._entries[name].modules for name in names))


def _is_prose(text: str) -> bool:
    """Whether a string is a sentence, such as a message, rather than names, options or a program."""
    return text.count(" ") > 3 and not any(mark in text for mark in ("--", "=", "\n"))


@functools.cache
def _texts(file: pathlib.Path) -> list[str]:
    return _strings(parsed(file))


def changed_files(base: str) -> list[str]:
    """The files that differ from where this branch left another, those that git does not know yet included."""

    def git(*words: str) -> list[str]:
        return subprocess.run(
            ["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.splitlines()

    (start,) = git("merge-base", base, "HEAD")
    differ = git("diff", "--name-only", "--no-renames", "--diff-filter=d", start)
    return differ + git("ls-files", "--others", "--exclude-standard")


if __name__ == "__main__":
    print(*(Reach().reached_by(changed_files(sys.argv[1])) or ()), sep="\n")
