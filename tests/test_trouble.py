"""Every message that docs/trouble.md quotes stands in the source, so that a reader's search finds it."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]


def texts_of(path: pathlib.Path) -> list[str]:
    """The strings of a file, with `…` where values are filled in."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(r"%[.\d]*[sdrfg]|\{\w+\}", "…", node.value))
    return texts


def test_the_messages_of_the_guide_are_those_of_the_program():
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/trouble.md").read_text(), flags=re.M)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    sources = [p for folder in ("vit_jax", "launch") for p in (ROOT / folder).rglob("*.py")]
    texts = [text for path in sources for text in texts_of(path)]
    missing = []
    for text in quoted:
        pattern = re.compile("…?.*".join(re.escape(part.strip()) for part in text.split("…")))
        if not any(pattern.search(written) for written in texts):
            missing.append(text)
    assert len(quoted) >= 40 and missing == []
