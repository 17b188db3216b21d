"""A web page in one file: texts, tables and pictures, which need no network to be shown."""

import base64
import html
import io
from collections.abc import Sequence

from PIL import Image

from vit_jax.pictures.style import SCALE

_STYLE = """
body { font: 16px/1.45 sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.6em } h2 { font-size: 1.25em; margin-top: 2.2em; border-bottom: 1px solid #ddd }
img { max-width: 100%; display: block; margin: 1em 0 }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }
td, th { border: 1px solid #ddd; padding: .25em .6em; text-align: left; white-space: nowrap }
figure { margin: 0 } figcaption { font-size: .8em; overflow-wrap: anywhere }
div.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 1em; margin: 1em 0 }
div.gallery img { width: 100%; height: 150px; object-fit: contain; background: #f4f4f4; margin: 0 0 .3em }
p.large { font-size: 1.5em; margin: .6em 0 } pre { background: #f4f4f4; padding: .6em; overflow-x: auto }
p.absent { color: #777 } nav a { margin-right: 1em }
@media print { h2 { break-after: avoid } img { break-inside: avoid } }
"""


class Page:
    """Grows from above downwards.

    >>> page = Page("Two runs")
    >>> page.heading("Accuracy")
    >>> page.text("Higher is better.")
    >>> content = page.html()
    """

    def __init__(self, title: str):
        self._title = title
        self._body: list[str] = []
        self._headings: list[str] = []

    def heading(self, text: str) -> None:
        """The beginning of a section, which the top of the page links to."""
        self._headings.append(text)
        number = len(self._headings)
        self._body.append(f'<h2 id="s{number}">{html.escape(text)}</h2>')

    def text(self, text: str, *, absent: bool = False, large: bool = False) -> None:
        """A paragraph; `absent` for one that says why there is nothing to see, `large` for a result."""
        kind = ' class="absent"' if absent else ' class="large"' if large else ""
        self._body.append(f"<p{kind}>{html.escape(text)}</p>")

    def commands(self, text: str) -> None:
        """Lines as they are typed."""
        self._body.append(f"<pre>{html.escape(text)}</pre>")

    def picture(self, image: Image.Image, description: str) -> None:
        """A picture, and what it shows for those who cannot see it."""
        width = image.width // SCALE
        self._body.append(_img(png(image), "png", description, f' width="{width}"'))

    def gallery(self, pictures: Sequence[tuple[bytes, str, str]]) -> None:
        """Small pictures side by side, as many in a row as there is room for: (JPEG file, caption, description)."""
        figures = (
            f"<figure>{_img(content, 'jpeg', words)}<figcaption>{html.escape(caption)}</figcaption></figure>"
            for content, caption, words in pictures
        )
        self._body.append(f'<div class="gallery">{"".join(figures)}</div>')

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Rows of texts, the first one their names."""
        head, *others = [[html.escape(str(cell)) for cell in row] for row in rows]
        lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in others]
        self._body.append(f"<table>{''.join(lines)}</table>")

    def html(self) -> str:
        """The whole."""
        title = html.escape(self._title)
        links = "".join(
            f'<a href="#s{number}">{html.escape(text)}</a> '
            for number, text in enumerate(self._headings, start=1)
        )
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
            f"<style>{_STYLE}</style></head><body>\n<h1>{title}</h1>\n<nav>{links}</nav>\n"
            + "\n".join(self._body)
            + "\n</body></html>\n"
        )


def _img(content: bytes, kind: str, description: str, size: str = "") -> str:
    words, data = html.escape(description, quote=True), base64.b64encode(content).decode()
    return f'<img src="data:image/{kind};base64,{data}"{size} alt="{words}">'


def png(image: Image.Image) -> bytes:
    """The bytes of a PNG file."""
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=False)
    return file.getvalue()


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, the first row their names, as Markdown."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"
