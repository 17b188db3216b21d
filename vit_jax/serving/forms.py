"""Several images in one request: the parts of a body that is multipart/form-data (RFC 7578), as browsers, curl and
other clients send files.
"""

import email.message
import email.parser
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.serving.limits import Limits, Refusal

TYPE = "multipart/form-data"
_MOST_HEAD = 4096  # bytes of what stands before the content of a part
_LONGEST_BOUNDARY = 70  # RFC 2046, section 5.1.1
_NEW_LINE = b"\r\n"
_USAGE = "curl -F image=@a.jpg -F image=@b.jpg URL/predict"


class Part(NamedTuple):
    """A file of a form.

    Attributes:
      name: of the file, or of the field if the file has none.
      content: its bytes.
    """

    name: str
    content: bytes


def most_bytes(limits: Limits) -> int:
    """Of a form, with all images that it may have."""
    return limits.images * (limits.bytes + _MOST_HEAD)


def boundary_of(content_type: str) -> bytes:
    """What separates the parts, by a request's Content-Type. Raises `Refusal` for one without."""
    head = email.message.Message()
    head["Content-Type"] = content_type
    boundary = head.get_boundary("")
    if not 0 < len(boundary) <= _LONGEST_BOUNDARY:
        raise _unreadable("its Content-Type has no boundary of 1 to 70 characters")
    return boundary.encode("latin-1", "replace")


def parts_of(body: bytes, boundary: bytes, most: int) -> list[Part]:
    """The files of a form, in its order. Raises `Refusal` for a body that is no form, has none, or more than `most`."""
    parts = []
    for part in _split(body, b"--" + boundary):
        if len(parts) == most:
            raise Refusal(413, f"the form has more than {most} images")
        parts.append(part)
    if not parts:
        raise Refusal(400, f"the form has no images: {_USAGE}")
    return parts


def _split(body: bytes, delimiter: bytes) -> Iterator[Part]:
    if not body.startswith(delimiter):
        raise _unreadable("it does not begin with the boundary of its Content-Type")
    start = len(delimiter)
    while not body.startswith(b"--", start):
        head_end = body.find(2 * _NEW_LINE, start, start + _MOST_HEAD)
        end = body.find(_NEW_LINE + delimiter, head_end)
        if not body.startswith(_NEW_LINE, start) or head_end < 0 or end < 0:
            raise _unreadable("a part has no head, or no end")
        content = body[head_end + 2 * len(_NEW_LINE) : end]
        yield Part(_name(body[start + len(_NEW_LINE) : head_end]), content)
        start = end + len(_NEW_LINE) + len(delimiter)


def _name(head: bytes) -> str:
    fields = email.parser.BytesHeaderParser().parsebytes(head)
    return fields.get_filename() or str(fields.get_param("name", "", "content-disposition"))


def _unreadable(why: str) -> Refusal:
    return Refusal(400, f"the form cannot be read: {why}; {_USAGE}")
