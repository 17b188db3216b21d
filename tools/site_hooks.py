"""Pages of the site that are not in docs/: the README as its front page, the recipes' table, the changelog, how to
contribute. Links to files of the repository outside of docs/ are shown as their names. A paragraph that begins with a
link to a Python file beside the page is followed by that file.
"""

import json
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
_INLINE = re.compile(r"<code>([^<]*--[^<]*)</code>")  # blocks of code have other tags inside
_FLAG = re.compile(r"(?<![\w-])--[\w.]+")
_SCRIPT = re.compile(r"^\[\w+\.py\]\(([\w/]+\.py)\):.*$", re.M)
_LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:|#|mailto:)[^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Adds the generated pages."""
    from vit_jax.planning import catalogue

    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    pages = {
        "index.md": readme.replace("](CHANGELOG.md)", "](changelog.md)").replace(
            "](CONTRIBUTING.md)", "](contributing.md)"
        ),
        "recipes.md": catalogue.recipe_page(catalogue.recipe_table()),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "]("),
    }
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = _notebook(path)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def _notebook(path: pathlib.Path) -> str:
    """A notebook as Markdown, headed by how to run it."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    how = "A notebook: `vit_jax tutorial` copies it to your folder."
    return "\n\n".join([parts[0], how, *parts[1:]])


def on_page_markdown(markdown, page, config, files):
    """Shows links to files that the site does not have as their names alone."""
    folder = pathlib.PurePosixPath(page.file.src_uri).parent
    known = {file.src_uri for file in files}

    def shown(match: re.Match) -> str:
        target = _normal(folder / match[2])
        is_outside = (ROOT / target).exists() or (ROOT / "docs" / target).exists()
        return match[0] if target in known or not is_outside else match[1]

    def with_code(match: re.Match) -> str:
        return f"{match[0]}\n\n```python\n{(ROOT / 'docs' / folder / match[1]).read_text()}```"

    return _with_lists(_SCRIPT.sub(with_code, _LINK.sub(shown, markdown)))


def on_page_content(html, page, config, files):
    """Keeps flags whole: browsers break lines after each hyphen of `--workdir`."""
    kept = r'<span class="flag">\g<0></span>'
    return _INLINE.sub(lambda match: f"<code>{_FLAG.sub(kept, match[1])}</code>", html)


def _with_lists(markdown: str) -> str:
    """An empty line before each list that follows a line of text, which GitHub does not need."""
    lines, in_code, before = [], False, ""
    for line in markdown.splitlines():
        in_code ^= line.lstrip().startswith("```")
        begins = line.startswith("- ") and before and not before.startswith(("- ", " "))
        lines += ["", line] if begins and not in_code else [line]
        before = line
    return "\n".join(lines)


def _normal(path: pathlib.PurePosixPath) -> str:
    parts = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
