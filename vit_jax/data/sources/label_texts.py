"""Labels as people write them into lists: several in one field, vectors of 0 and 1, and probabilities."""

import re
from collections.abc import Callable, Iterable, Sequence

from vit_jax.base.errors import ConfigError

LabelText = str | tuple[str, ...] | None  # a label, several, or none

NO_SEPARATOR = "none"
_LIKELY = (
    "|",
    ",",
    "\t",
)  # separators that hardly ever stand within a label
_IN_BRACKETS = re.compile(r"\[.*\]", re.DOTALL)
_ITEM = re.compile(r"""'([^']*)'|"([^"]*)"|([^\s,'"\[\]]+)""")
_ZERO = ("0", "0.0", "0.", "false")
_ONE = ("1", "1.0", "1.", "true")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def split_labels(
    path: object, texts: Sequence[LabelText], separator: str, *, is_plural: bool
) -> list[LabelText]:
    """The labels in the fields of a list.

    Args:
      path: of the list, for errors.
      texts: the field of each image; a tuple comes from a file that has lists itself.
      separator: `config.data.label_separator`.
      is_plural: whether the field is called `labels`.

    Returns:
      of each image its label, or a tuple of them.

    Raises:
      ConfigError: a separator is likely, and not the one that is set.
    """
    written = [text for text in texts if isinstance(text, str) and text]
    if written and all(map(_IN_BRACKETS.fullmatch, written)):
        return [_items(text) if isinstance(text, str) else text for text in texts]
    if not separator:
        _check_separator(path, set(written), is_plural=is_plural)
    if separator == NO_SEPARATOR:
        return [_as_tuple(text) if is_plural else text for text in texts]
    if not separator and not is_plural:
        return list(texts)
    return [_split(text, separator or ";") if isinstance(text, str) else text for text in texts]


def read_vectors(
    texts: Sequence[LabelText], names: int | None, where: Callable[[int], str]
) -> tuple[list[LabelText], int]:
    """Vectors of 0 and 1 become class numbers. Returns the labels, and the length of the vectors; 0 if there are none.

    Lists of the same length of 0 and 1 alone are vectors: as class numbers they would name a class twice, or each
    image would have the same two.

    Args:
      names: how many names of classes there are; `None` if they are not given.
      where: gives the name of example i for errors.

    Raises:
      ConfigError: vectors have other lengths than there are names, or are probabilities.
    """
    lists = [text for text in texts if isinstance(text, tuple) and text]
    if not lists or len(lists) < sum(text is not None for text in texts):
        return list(texts), 0
    items = set().union(*lists)
    if not all(map(_NUMBER.fullmatch, items - {"True", "False", "true", "false"})):
        return list(texts), 0
    if part := next((item for item in items if _is_fraction(item)), None):
        first = next(i for i, text in enumerate(texts) if text and part in text)
        raise ConfigError(
            f"{where(first)}: the labels {', '.join(texts[first])} are probabilities or scores, which lists of images "
            "do not have: write the names or numbers of the classes that an image has"
        )
    length = len(lists[0])
    if length < 2 or any(len(text) != length for text in lists):
        return list(texts), 0
    if not all(item.lower() in (*_ZERO, *_ONE) for item in items):
        return list(texts), 0
    if names not in (None, length):
        if length == 2 and all(len(set(text)) == 2 for text in lists):
            return list(texts), 0  # class numbers
        raise ConfigError(
            f"{where(0)}: the labels are vectors of {length} numbers, 0 or 1, and there are {names} names of classes"
        )
    return [text and _ones(text) for text in texts], length


def check_no_scores(texts: Iterable[str], names_file: object, where: str) -> None:
    """Raises `ConfigError`, a question, if labels are numbers with fractions: scores, or names that look like them.

    Args:
      texts: all labels that occur.
      names_file: where names of classes would be.
      where: what has the labels, for errors.
    """
    texts = sorted(texts)
    if texts and all(map(_NUMBER.fullmatch, texts)) and any(map(_is_fraction, texts)):
        shown = ", ".join(texts[:3])
        raise ConfigError(
            f"{where}: the labels {shown} are numbers with fractions. Scores cannot be learned here. If they are the "
            f"names of classes, write them into {names_file}, one a line, in the order of the classes"
        )


def _ones(vector: tuple[str, ...]) -> tuple[str, ...]:
    """('0', '1', '1') -> ('1', '2'): the classes that an image has."""
    return tuple(str(i) for i, item in enumerate(vector) if item.lower() in _ONE)


def _is_fraction(item: str) -> bool:
    return bool(_NUMBER.fullmatch(item)) and not float(item).is_integer()


def _items(text: str) -> tuple[str, ...]:
    """The items of a printed list: '[0 1]', '[0, 1]', "['sky', 'sea']"."""
    return tuple("".join(groups).strip() for groups in _ITEM.findall(text[1:-1]))


def _split(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator) if part.strip())


def _as_tuple(text: LabelText) -> LabelText:
    return (text,) if isinstance(text, str) and text else text or ()


def _check_separator(path: object, written: set[str], *, is_plural: bool) -> None:
    """Raises `ConfigError`, a question, if fields are likely to have several labels, separated by something else than
    usual.
    """
    if is_plural and any(";" in text for text in written):
        return
    separators = (*_LIKELY, " ", "/", "+", "&") if is_plural else ("|", ";")
    for separator in separators:
        joined = sorted(text for text in written if separator in text)
        shown = "$'\\t'" if separator == "\t" else f"'{separator}'"  # as a shell takes it
        if joined and (_shares_parts(written, separator) or (is_plural and separator in _LIKELY)):
            raise ConfigError(
                f"{path}: {joined[0]!r} may be one label, or several that are separated by {separator!r}. Set "
                f"--config.data.label_separator={shown} if they are several, or ={NO_SEPARATOR} if it is one "
                "(vit_jax prepare: --label_separator)"
            )


def _shares_parts(written: Iterable[str], separator: str) -> bool:
    """Whether texts are made of fewer parts than there are texts."""
    texts = set(written)
    parts = {part for text in texts for part in _split(text, separator)}
    return len(parts) < len(texts)
