"""The tests that a change reaches: `bash tests/run.sh --changed [BASE]` runs these. It prints them, files or single
tests of them, or nothing where that is all.

A test reaches a file that its own file imports, or that such a file imports in turn. Tables of names (of families,
objectives, evaluators, formats, commands) import nothing themselves, so a test, or a recipe that it names, reaches what
it names: 'dino', 'ViT-B/16', 'convert'. Of a file of tests only the functions, classes and variables count that its
tests use, or those of others that import it; slow tests, which a change does not run, count for nothing. A test that
reads stored models reaches the formats and families that its file names anywhere: they are found by their content.
"""

import collections
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterable

from tests import import_graph
from tests.file_pieces import CHOICE, EVERY_CHOICE, FIXTURE, PACKAGE, WHOLE, Piece, Pieces, strings
from tests.import_graph import ROOT, parsed

# The core's own tests: run after every change.
CORE_TESTS = (
    "tests/test_core.py", "tests/test_changed.py", "tests/test_imports.py", "tests/test_words.py",
    "tests/test_patterns.py", "tests/test_schema.py", "tests/test_durations.py", "tests/test_types.py",
    "tests/models/test_vit.py",
    "tests/objectives/test_supervised.py", "tests/data/test_loader.py", "tests/training/test_step.py",
    "tests/integration/test_train.py",
)  # fmt: skip
FOLDERS = ("vit_jax", "tests", "configs", "launch", "tools")
PLUGINS = {
    "tests.skips",
    "tests.lowering_contexts",
    "tests.processor_time",
    "tests.services.buckets",
    "tests.services.launching",
    "tests.services.runs",
    "tests.services.stopping",
}
# What reads a stored model of any format and family: functions, and words of commands, fields and names of files.
READING = {
    "load", "load_run", "load_weights", "read_checkpoint", "read_model", "create_model", "convert", "detect", "show",
    "summarize", "init_from", "teacher", "teachers", "CHECKPOINT",
    *(f"{CHOICE}{word}" for word in (
        "checkpoint", "convert", "init_from", "show", "teacher", "teachers", "safetensors", "pth", "npz",
    )),
}  # fmt: skip
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
        "tests/launch/test_guides.py",
        "tests/test_site.py",
        "tests/test_extending.py",
        "tests/test_trouble.py",
    ),
    "docs/notebooks/": ("tests/test_notebooks.py",),
    "README.md": (
        "tests/test_docs.py",
        "tests/test_readme.py",
        "tests/launch/test_guides.py",
        "tests/test_site.py",
    ),
    "CONTRIBUTING.md": ("tests/test_docs.py",),
    "CHANGELOG.md": (),
    "launch/": ("tests/launch/test_scripts.py",),
    "tools/": (),
    "tests/golden/": ("tests/planning/test_golden.py",),
    "tests/stored_runs/": ("tests/test_stored_runs.py",),
}


class Reach:
    """What each test of the repository reaches."""

    def __init__(self, root: pathlib.Path = ROOT):
        """Reads the tables of names.

        Args:
          root: the repository.
        """
        self._root = root
        self.known = import_graph.modules(*FOLDERS, root=root)
        self._names = {path: name for name, path in self.known.items()}
        self._pieces = Pieces(self.known)

    def tests(self) -> list[str]:
        """The path of every test file."""
        paths = (self._root / "tests").rglob("test_*.py")
        return sorted(path.relative_to(self._root).as_posix() for path in paths)

    @functools.cache  # noqa: B019 (one object a process)
    def of(self, test: str) -> frozenset[str]:
        """The modules that the tests of a file reach, or one of them alone: FILE::NAME."""
        file, _, name = test.partition("::")
        own = self._names[self._root / file]
        waiting, reached, unused, formats = {own, *self._conftests(file)}, set(), set(), set()
        used = collections.defaultdict(set)  # names, by the module that uses them
        importers = collections.defaultdict(set)
        if file in READERS["configs/"]:
            used[own].add(EVERY_CHOICE)
        while waiting:
            module = waiting.pop()
            closure = self._pieces.imported(module)
            waiting |= closure & {PACKAGE} - reached
            reached |= closure - {PACKAGE} | {module}
            pieces, maybe = self._pieces.of(module)
            if module == own:  # pytest finds its tests; the slow ones are not run
                found = {p for p in maybe if p.names & ({name} if name else self._tests_in(file))}
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
            waiting -= reached
            # What a stored model is, is found by its content: any of those that the file names.
            if any(names & READING for names in used.values()):
                formats |= self._pieces.stored(own)
            # Elsewhere the word means something else, as `timm` a RandAugment.
            if WHOLE["FORMATS"] in reached:
                waiting |= formats - reached
        return frozenset(reached)

    def _used(self, pieces: set[Piece], used: dict, importers: dict) -> set[Piece]:
        """Those of the pieces whose names their own module uses, or one that imports it; of fixtures and
        choices, any.
        """
        anywhere = {n for names in used.values() for n in names if n.startswith((FIXTURE, CHOICE))}
        return {
            piece
            for piece in pieces
            if piece.names & anywhere
            or any(piece.names & used[m] for m in (piece.module, *importers[piece.module]))
        }

    def reached_by(self, paths: Iterable[str]) -> list[str] | None:
        """What pytest is to run after a change of files, the core's tests too: test files, and of those that it reaches
        in part FILE::NAME. `None`: all of them.

        Args:
          paths: of the files that changed, below the root.
        """
        tests, chosen = self.tests(), set(CORE_TESTS)
        for path in paths:
            readers = [files for folder, files in READERS.items() if path.startswith(folder)]
            changed = self._modules_of(path)
            reaching = set().union(*(self._reaching(test, changed) for test in tests))
            reaching |= {test for test in tests if self._mentions(self._root / test, path)}
            if path.startswith(ALL) or not (readers or changed or reaching):
                return None
            chosen |= reaching.union(*readers)
        return sorted(test for test in chosen if test.partition("::")[0] not in chosen - {test})

    def _reaching(self, file: str, changed: set[str]) -> set[str]:
        """The tests of a file that reach one of the modules, or the file where all do."""
        if not changed & self.of(file):
            return set()
        tests = {f"{file}::{name}" for name in self._tests_in(file)}
        reaching = {test for test in tests if changed & self.of(test)}
        return reaching if reaching < tests else {file}

    def _tests_in(self, file: str) -> set[str]:
        """The functions and classes of a file that pytest runs."""
        _, pieces = self._pieces.of(self._names[self._root / file])
        names = {name for piece in pieces for name in piece.names}
        return {name for name in names if name.startswith(("test", "Test"))}

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


@functools.cache
def _texts(file: pathlib.Path) -> list[str]:
    return strings(parsed(file))


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
