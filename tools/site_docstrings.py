"""Docstrings as the site shows them: lines that begin with `>>>`, which Markdown takes for quotations, as code."""

import re

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n?)+(?:^(?!>>>)\S.*\n?)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts every example, with the output below it, into a block of code."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match) -> str:
    lines = (line.removeprefix(">>> ") for line in example[0].rstrip().splitlines())
    return "\n".join(["```python", *lines, "```", ""])
