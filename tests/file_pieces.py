"""What the pieces of a file import and name, read without running it: for `changed.py`, which says what counts. In the
package a file is one piece; of tests each function, class and variable is.
"""

import ast
import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.import_graph import imports_of, parsed

# A word of a string that may be a name: not the first part of a dotted one, except of a file's.
WORD = r"(?<![\w-])[\w-]+(?![\w-])(?!\.(?!py\b)\w)"
# Names that are used in any file, not only where their own is imported: fixtures, and words that choose an entry of a
# recipe's table. Tests that read all recipes choose every entry.
FIXTURE, CHOICE = "fixture ", "choice "
EVERY_CHOICE = f"{CHOICE}*"
PACKAGE = "vit_jax"
NUMPYS_OWN = ("np.load", "np.savez")  # an archive that NumPy reads or writes is no checkpoint

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
            places = {text.partition(":")[0] for text in strings(value)} & set(known)
            if places:
                entries[key.value].modules |= places
                if isinstance(value, ast.Tuple):
                    entries[key.value].pattern = strings(value)[-1]
    return entries


def strings(tree: ast.AST, *, but_of: tuple[str, ...] = ()) -> list[str]:
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
        names |= set(map(_fixture, strings(tree)))
    return names - {None}


def _fixture(name: str) -> str:
    """A fixture's name, apart from those of variables: many are called `file` or `trained`."""
    return f"{FIXTURE}{name}"


def _is_fixture(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(re.match(r"(pytest\.)?fixture\b", ast.unparse(text)) for text in node.decorator_list)


def _is_script(node: ast.AST) -> bool:
    """Whether this is what a file does as a program."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _is_slow(node: ast.AST) -> bool:
    """Whether all cases of a test are slow."""
    return "pytest.mark.slow" in map(ast.unparse, getattr(node, "decorator_list", ()))


def _choices(tree: ast.Module) -> dict[ast.AST, set[str]]:
    """The tables of a recipe of which one entry is used, `TABLE[word]` or `TABLE.get(word)`, and its keys, `*TABLE`:
    each entry and the names by which it is used, and the assignment, whose use says nothing.
    """
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    parts = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(table)], value=ast.Dict(keys, values)):
                uses = [parents[n] for n in parents if isinstance(n, ast.Name) and n.id == table]
                words = [getattr(key, "value", None) for key in keys]
                if all(isinstance(w, str) and re.fullmatch(r"[\w-]+", w) for w in words) and all(
                    use is node
                    or isinstance(use, ast.Subscript | ast.Starred)
                    or isinstance(use, ast.Attribute)
                    and use.attr == "get"
                    for use in uses
                ):
                    parts[node] = set()
                    for word, value in zip(words, values, strict=True):
                        parts[value] = {CHOICE + word, EVERY_CHOICE}
    return parts


class Piece(NamedTuple):
    """A piece of a file: its module, the modules that it imports or names, formats that it names, the names that it
    uses, and those by which its own module and those that import it use it; of fixtures and choices, any.
    """

    module: str
    modules: frozenset[str]
    formats: frozenset[str]
    identifiers: frozenset[str]
    names: frozenset[str]


class Pieces:
    """The pieces of the files of a repository."""

    def __init__(self, known: dict[str, pathlib.Path]):
        """Reads the tables of names.

        Args:
          known: the files by the names under which they are imported.
        """
        self.known = known
        self._entries, self._tables = collections.defaultdict(Entry), {}
        for module, path in known.items():
            if module.startswith("vit_jax"):
                entries = table_entries(parsed(path), known)
                self._tables[module] = set().union(*(entry.modules for entry in entries.values()))
                for name, entry in entries.items():
                    self._entries[name].modules |= entry.modules
                    self._entries[name].pattern = self._entries[name].pattern or entry.pattern
            elif module.startswith("configs."):
                self._entries[module.rpartition(".")[2]].modules.add(module)

    @functools.cache  # noqa: B019
    def imported(self, module: str) -> set[str]:
        """A module, and of one of the package all that it imports in turn; not what `vit_jax` itself does, which
        depends on the names that are used.
        """
        waiting, modules = {module}, set()
        while waiting:
            modules.add(one := waiting.pop())
            if one.startswith(f"{PACKAGE}."):
                pieces, _ = self.of(one)
                waiting |= set().union(*(piece.modules for piece in pieces)) - modules
        return modules

    @functools.cache  # noqa: B019 (one object a process)
    def of(self, module: str) -> tuple[set[Piece], set[Piece]]:
        """The pieces of a file that count, and those that count where one of their names is used."""
        tree, always = parsed(self.known[module]), set()
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
            imports = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
            always = {self._import(n, module) for n in imports}
            parts |= {n: {alias.asname or alias.name for alias in n.names} for n in imports}
            parts |= {n: {"-m", "__file__"} for n in tree.body if _is_script(n)}
        else:
            parts = _choices(tree) if module.startswith("configs.") else {}
        rest = [node for node in tree.body if node not in parts]
        if module == "vit_jax":
            rest = [node for node in rest if not isinstance(node, ast.If)]
        always |= {self._piece(node, module, set()) for node in rest}
        return always, {self._piece(node, module, names) for node, names in parts.items()}

    def stored(self, module: str) -> set[str]:
        """The formats, families and their conversions that a file names or imports anywhere."""
        pieces = set().union(*self.of(module))
        tables = (WHOLE[name] for name in ("FORMATS", "FAMILIES", "CONVERSIONS"))
        known = set().union(*(self._tables.get(table, set()) for table in tables))
        return {m for piece in pieces for m in piece.modules | piece.formats} & known

    def _import(self, node: ast.ImportFrom, module: str) -> Piece:
        """What a test file imports, whether or not its tests use these names."""
        nothing = frozenset()
        return Piece(module, frozenset(imports_of(node, self.known)), nothing, nothing, nothing)

    def _piece(self, node: ast.AST, module: str, names: set[str]) -> Piece:
        modules, formats, identifiers = imports_of(node, self.known), set(), set()
        if module.startswith("vit_jax"):  # where a name in a string says nothing
            package = module.rpartition(".")[0]
            modules |= {package} & self.known.keys() - {"vit_jax"}
        else:
            texts = strings(node, but_of=NUMPYS_OWN)
            words = {word for text in texts for word in re.findall(r"\w[\w-]*", text)}
            identifiers = _identifiers(node) | {CHOICE + word for word in words}
            named = self._named(texts)
            formats = named & self._tables.get(WHOLE["FORMATS"], set())
            modules |= named - formats
            modules |= {m for text in texts for m in (text, f"{text}.__main__")} & self.known.keys()
            if module.startswith("configs."):  # recipes import their neighbours by name
                # A split `train` is no command, and who made a checkpoint or chose a rate is no format.
                formats = set()
                for table in ("COMMANDS", "FORMATS", "CONVERSIONS"):
                    modules -= self._tables.get(WHOLE[table], set())
                # Neither is `best` a recipe: these are named with their suffix.
                modules -= {
                    m for m in modules if m.startswith("configs.")
                    and not any(f"{m.rpartition('.')[2]}.py" in text for text in texts)
                }  # fmt: skip
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
