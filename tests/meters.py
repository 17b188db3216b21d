"""Meters of what makes code and prose hard to read: counts in 1,000 lines of code, or in 1,000 words.

python -m tests.meters [PATH …] shows them for files and folders, by default the package, with the worst places.
"""

import ast
import collections
import functools
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

DENSE = 25  # nodes of syntax a line
LONG = 60  # nodes of syntax of a statement
ADVICE = {
    "packed": "give each name an assignment of its own",
    "chain": "name the steps of the expression, a line each",
    "long": "name the steps of the statement, a line each",
    "splat": "write the arguments at the call",
    "guest": "move the feature behind a subclass, an action or a project",
    "elliptical": "give the sentence a noun: not 'what', 'those', 'of which', 'others', 'place'",
}
_HIDDEN_TOKENS = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip
_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DENSE_STATEMENTS = (ast.Assign, ast.Return, ast.Expr)
_LONG_STATEMENTS = (
    *_DENSE_STATEMENTS, ast.AnnAssign, ast.AugAssign, ast.Raise, ast.Assert,
)  # fmt: skip
_ELLIPTICAL = re.compile(
    r"\bwhat\b(?! (?:is|are) the)|\bthose\b|\bthat of\b|\b(?:of|to|from|with|in|by) (?:which|whom)\b|\bwhose\b"
    r"|\bothers\b|\bof (?:its|their) own\b|\botherwise\b|\bas [^.,;]{1,30}\b(?:has|have) (?:it|them)\b|\bplaces?\b",
    re.IGNORECASE,
)


class Place(NamedTuple):
    """A line that a meter counts, and how bad it is: the larger the worse."""

    file: str
    line: int
    badness: float


class Reading(NamedTuple):
    """What the meters show of some files.

    Attributes:
      lines: of code.
      words: of docstrings and comments.
      places: by meter.
    """

    lines: int
    words: int
    places: dict[str, list[Place]]

    def rate(self, meter: str) -> float:
        """In 1,000 lines of code; of the meter `elliptical` in 1,000 words."""
        total = self.words if meter == "elliptical" else self.lines
        return 1000 * len(self.places[meter]) / max(total, 1)

    def worst(self, meter: str, count: int) -> list[Place]:
        different = sorted(set(self.places[meter]))
        return sorted(different, key=lambda place: -place.badness)[:count]


def read(files: Iterable[pathlib.Path]) -> Reading:
    """The meters of some files together."""
    lines, words = 0, 0
    places = collections.defaultdict(list)
    for file in files:
        reading = _read_file(file)
        lines += reading.lines
        words += reading.words
        for meter, of_file in reading.places.items():
            places[meter] += of_file
    return Reading(lines, words, places)


@functools.cache
def _read_file(file: pathlib.Path) -> Reading:
    text = file.read_text()
    tree = ast.parse(text)
    docstrings = list(_docstrings(tree))
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = _lines_with_code(tokens) - _lines_of(docstrings)
    places = collections.defaultdict(list)
    for meter, line, badness in _places(tree):
        places[meter].append(Place(str(file), line, badness))
    words = 0
    for line, prose in (*_docstring_texts(docstrings), *_comments(tokens)):
        words += len(prose.split())
        found = len(_ELLIPTICAL.findall(prose))
        places["elliptical"] += [Place(str(file), line, found)] * found
    return Reading(len(lines), words, places)


def python_files(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Files, and all Python files below folders."""
    return [
        file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """The statements that are docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def _lines_of(nodes: Iterable[ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


def _lines_with_code(tokens: Sequence[tokenize.TokenInfo]) -> set[int]:
    """Lines that have more than a comment."""
    return {
        line
        for token in tokens
        if token.type not in _HIDDEN_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }


def _docstring_texts(docstrings: Iterable[ast.Expr]) -> Iterator[tuple[int, str]]:
    for statement in docstrings:
        yield statement.lineno, statement.value.value


def _comments(tokens: Sequence[tokenize.TokenInfo]) -> Iterator[tuple[int, str]]:
    """Comments that are prose."""
    for token in tokens:
        if (
            token.type == tokenize.COMMENT
            and "noqa" not in token.string
            and "fmt:" not in token.string
        ):
            yield token.start[0], token.string


def _places(tree: ast.AST) -> Iterator[tuple[str, int, float]]:
    """(meter, line, badness) of each statement that a meter counts."""
    for node in ast.walk(tree):
        size = sum(1 for _ in ast.walk(node)) if isinstance(node, _LONG_STATEMENTS) else 0
        if isinstance(node, _DENSE_STATEMENTS):
            density = size / (node.end_lineno - node.lineno + 1)
            if density >= DENSE:
                yield "chain", node.lineno, density
        if isinstance(node, _LONG_STATEMENTS) and size >= LONG:
            yield "long", node.lineno, size
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield "packed", node.lineno, size
        if isinstance(node, _FUNCTIONS):
            yield from _splats(node)
            yield from _guests(node.body, is_conditional=False)


def _splats(function: ast.FunctionDef) -> Iterator[tuple[str, int, float]]:
    """Calls `f(**d)` with a dict that the same function makes."""
    dicts = set()
    for node in _own_nodes(function):
        if isinstance(node, ast.Assign) and any(map(_is_dict, _values(node.value))):
            dicts |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in _own_nodes(function):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            is_local = isinstance(keyword.value, ast.Name) and keyword.value.id in dicts
            if keyword.arg is None and (is_local or isinstance(keyword.value, ast.IfExp)):
                yield "splat", node.lineno, 1


def _values(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    if isinstance(value, ast.BinOp):
        return [value.left, value.right]
    return [value]


def _is_dict(value: ast.expr) -> bool:
    return isinstance(value, ast.Dict) or (
        isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict"
    )


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside it."""
    waiting = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _FUNCTIONS):
            waiting += ast.iter_child_nodes(node)


def _guests(body: Sequence[ast.stmt], is_conditional: bool) -> Iterator[tuple[str, int, float]]:
    """Imports in a function that happen on a condition."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and is_conditional:
            yield "guest", statement.lineno, 1
        if isinstance(statement, _FUNCTIONS):
            continue
        for part in ("body", "orelse", "finalbody"):
            inside = isinstance(statement, ast.If) and part == "body"
            yield from _guests(getattr(statement, part, []), is_conditional or inside)
        for handler in getattr(statement, "handlers", []):
            yield from _guests(handler.body, is_conditional)


def main() -> None:
    paths = [pathlib.Path(name) for name in sys.argv[1:] or ["vit_jax"]]
    reading = read(python_files(paths))
    print(f"{reading.lines:,} lines of code, {reading.words:,} words")
    for meter, advice in ADVICE.items():
        print(f"{meter:<12}{reading.rate(meter):>8.1f}   {advice}")
        for place in reading.worst(meter, 3):
            print(f"{'':<12}{place.file}:{place.line}")


if __name__ == "__main__":
    main()
