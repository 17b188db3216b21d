"""What lists and tar files of pairs have in common: captions in fields, and what has no partner."""

import functools
from collections.abc import Sequence

from absl import logging

TEXT = ("captions", "caption", "texts", "text", "title")  # names of fields


@functools.cache  # A run opens its data once to train and once to evaluate.
def _report(where: str, what: str, count: int, first: str) -> None:
    logging.warning("%s: %d %s and are skipped, the first is %s", where, count, what, first)


def report_unpaired(where: str, what: str, count: int, names: Sequence[str]) -> None:
    """Warns once of images without captions, or of captions without images, which are skipped."""
    if count:
        _report(where, what, count, names[0])


def text_of(value: object) -> tuple[str, ...]:
    """The captions in a field: a text, or a list of texts; those of white space are none."""
    texts = value if isinstance(value, list) else [value]
    joined = (" ".join(str(text).split()) for text in texts if text is not None)
    return tuple(text for text in joined if text)


def captions_in(fields: dict) -> tuple[str, ...]:
    """The captions in a JSON object: its field `captions`, `caption`, `texts`, `text` or `title`."""
    return text_of(next((fields[name] for name in TEXT if name in fields), None))
