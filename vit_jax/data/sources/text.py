"""Text from users: files in some encoding, and file names that may not be text at all."""

import codecs
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from etils import epath

from vit_jax.base.errors import ConfigError

_Description = TypeVar("_Description")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: epath.Path) -> str:
    """The text of a file in UTF-8, or in UTF-16 that says so by its first bytes.

    Raises:
      ConfigError: it is in another encoding, or no text.
    """
    content = path.read_bytes()
    encoding = "utf-16" if content.startswith(_UTF_16) else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        place = _place(path, content, error.start)
        if encoding == "utf-16":
            raise ConfigError(
                f"{place}: this is not UTF-16, though it begins like it: {error.reason}"
            ) from None
        raise ConfigError(
            f"{place}: the byte 0x{content[error.start]:02x} is not UTF-8; most likely the file is in "
            f"Latin-1 or Windows-1252. Convert it: iconv -f WINDOWS-1252 -t UTF-8 {path} > NEW"
        ) from None
    if "\0" in text:
        place = _place(path, content, content.index(b"\0"))
        raise ConfigError(
            f"{place}: there is a NUL character: this is no text, or it is UTF-16 that does not begin "
            f"with a byte order mark. Convert that: iconv -f UTF-16LE -t UTF-8 {path} > NEW"
        )
    return text


def json_rows(
    path: epath.Path,
    files: Sequence[str],
    described: Callable[[dict], _Description],
    split: str = "split",
) -> Iterator[tuple[int, str, _Description, str]]:
    """Of each object in a file of JSON lines: line, file, description, split ('' if none).

    Args:
      files: fields that may have the file, the first that is there counts.
      described: gives the description of an object; raises `ValueError` with the reason if it has none.
      split: the field that has the split.

    Raises:
      ConfigError: a line is no JSON object, names no file, or has no description.
    """
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: this is no JSON object: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: this is no JSON object: {line[:60]}")
        try:
            description = described(row)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        file = next((row[name] for name in files if name in row), None)
        if not file:
            raise ConfigError(f"{path}, line {number}: a path is needed")
        yield number, str(file), description, str(row.get(split, ""))


def _place(path: epath.Path, content: bytes, start: int) -> str:
    return f"{path}, line {content.count(10, 0, start) + 1}"


def same_text(text: str) -> str:
    """A text in the form in which names are compared: an accent may be a character of its own (as on a Mac) or not."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def readable(name: str) -> str:
    """`name` as text that can be stored and printed: of a file name that is not UTF-8, the bytes
    that are not stand as \\xE9.
    """
    if name.isascii():
        return name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
