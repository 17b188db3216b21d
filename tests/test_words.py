"""The words of the field: what the project once called things otherwise does not come back
(CONTRIBUTING.md).
"""

import ast
import collections
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Instead of these: sharded over; logged, printed, reported; verified when read; skipped, excluded, removed;
# re-initialised, again; forever; without a position; the previous one; restarts included; set --x=…
BANNED = (
    r"cut (over|along)", r"told", r"heard", r"hush", r"speaks", r"proven", r"left out", r"anew",
    r"for ever(?! \w)", r"of no place", r"the one before(?=[:.,;)]| it\b| does\b)", r"nothing (else )?tells",
    r"needs none", r"over all its starts", r"steps that count", r"insists", r"say --", r"homeless",
    r"views of whatever number", r"fill up", r"made ready", r"LeftOut", r"from_anywhere",
    r"class (Foreign|Lazy|Wishes|Opened|Recognised)", r"processes\.(agree|leave)", r"said", r"go(es|ing)? on",
    r"went on", r"cut into", r"say [a-z_.]+=", r"[Ll]earnt", r"cut (evenly|as the batch)",
    r"(parallelism|`tensor`|`fsdp`) cuts", r"config\.adapt\.",
)  # fmt: skip
# No names of values: of which one, a reader would have to look up. A name says what it holds: `matches`, `paths`.
VAGUE = {
    "found", "beside", "several", "said", "there", "how", "one", "told", "heard", "begun", "anew", "homeless",
}  # fmt: skip
# How many of them rooms may still have. These numbers only go down.
STILL_VAGUE = {}
PATTERN = re.compile(rf"\b(?:{'|'.join(BANNED)})(?!\w)")
FILES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/extending").glob("*.md")),
    *(p for folder in ("vit_jax", "launch", "configs") for p in sorted((ROOT / folder).rglob("*.py"))),
]  # fmt: skip


@pytest.mark.parametrize(
    "folder", ["README.md", "CONTRIBUTING.md", "configs", "docs", "launch", "vit_jax"]
)
def test_no_file_uses_a_word_that_the_field_has_another_for(folder):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r} in {line.strip()!r}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == folder
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in PATTERN.finditer(line)
    ]
    assert not found, "\n".join(found)


def assigned_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every variable that a file assigns, and of every parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def test_a_name_says_what_it_holds():
    vague = collections.defaultdict(list)
    for path in (path.relative_to(ROOT) for path in FILES if path.suffix == ".py"):
        room = "/".join(path.parts[: 2 if path.parts[0] == "vit_jax" else 1])
        for line, name in assigned_names(ast.parse((ROOT / path).read_text())):
            if name in VAGUE:
                vague[room].append(f"{path}:{line}: {name}")
    more = [
        f"{room}: {len(places)} vague names, {STILL_VAGUE.get(room, 0)} are still allowed:\n  " + "\n  ".join(places)
        for room, places in vague.items() if len(places) > STILL_VAGUE.get(room, 0)
    ]  # fmt: skip
    assert not more, "\n".join(more)


def test_no_docstring_only_sends_the_reader_elsewhere():
    """It says first what the function gives, or is."""
    sent = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES if path.suffix == ".py"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.match(r' +"""See `', line)
    ]  # fmt: skip
    assert not sent, "\n".join(sent)


def sentences_of(guide: pathlib.Path, ends: str) -> list[str]:
    """The prose of a guide between the marks `ends`; without code, tables, headings and lists of links."""
    text = re.sub(r"^```.*?^```", "", guide.read_text(), flags=re.M | re.S)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    ", "#", "<!"))]
    paragraphs = re.split(r"\n\s*\n|\n- ", "\n".join(lines))
    found = [
        sentence for paragraph in paragraphs
        for sentence in re.split(rf"(?<=[{ends}])\s+", " ".join(paragraph.split()))
    ]  # fmt: skip
    return [sentence for sentence in found if " · " not in sentence]


def words_of(sentence: str) -> int:
    """How many words it has; code counts as one."""
    return len(re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "x", sentence)).split())


@pytest.mark.parametrize("guide", [p for p in FILES if p.suffix == ".md"], ids=lambda p: p.name)
def test_a_sentence_of_a_guide_is_short(guide):
    long = [s for s in sentences_of(guide, ".!?;:") if words_of(s) > 30]
    assert long + [s for s in sentences_of(guide, ".!?") if words_of(s) > 45] == []
