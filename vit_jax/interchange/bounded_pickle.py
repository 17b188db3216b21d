"""An unpickler whose work is bounded by the size of what it reads. What the names in a pickle stand for
is decided by its subclass, in `pickles.py`.
"""

import collections
import pickle
from typing import Any, BinaryIO

MOST_PICKLED = 2**22  # bytes of a file beside its tensors
_MOST_KEY = 64  # parts of a key


class TooMuch(ValueError):
    """A file holds more beside its tensors than is read."""


class Bounded:
    """A file of pickles, of which `MOST_PICKLED` bytes may be read and no more: each may become an
    object of a hundred bytes.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._left = file, MOST_PICKLED

    def read(self, size: int) -> bytes:
        """`size` bytes."""
        return self._counted(self._file.read(min(size, self._left + 1)))

    def readline(self) -> bytes:
        """A line."""
        return self._counted(self._file.readline(self._left + 1))

    def _counted(self, content: bytes) -> bytes:
        self._left -= len(content)
        if self._left < 0:
            raise TooMuch
        return content


# The one in Python: its memo grows with what is stored, where that in C allocates as many places as
# a few bytes of a file say.
class BoundedUnpickler(pickle._Unpickler):
    """Refuses what would take memory or time beyond the bytes that describe it."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def load_dict(self) -> None:
        """A dictionary with items."""
        for key in self.stack[::2]:
            _check_key(key)
        super().load_dict()

    def load_setitem(self) -> None:
        """An item of a dictionary."""
        _check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Items of a dictionary."""
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()

    def load_additems(self) -> None:
        """Items of a set."""
        for key in self.stack:
            _check_key(key)
        super().load_additems()

    def load_frozenset(self) -> None:
        """A set that does not change."""
        for key in self.stack:
            _check_key(key)
        super().load_frozenset()

    def load_bytearray8(self) -> None:
        """Bytes, which Python would make room for before it reads them."""
        raise ValueError("it holds a bytearray")

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.FROZENSET[0]] = load_frozenset


class Dictionary(collections.OrderedDict):
    """What stands for torch's and Python's dictionaries."""

    def __init__(self, items: Any = ()):
        items = list(items.items() if isinstance(items, dict) else items)
        for key, _ in items:
            _check_key(key)
        super().__init__(items)


def _check_key(key: Any) -> None:
    """Raises `ValueError` for a tuple of tuples of tuples …, whose hash would take forever."""
    parts, count = [key], 0
    while parts:
        part = parts.pop()
        count += 1
        if count > _MOST_KEY:
            raise ValueError("a key of one of its dictionaries is nested too deeply")
        if isinstance(part, tuple):
            parts.extend(part[:_MOST_KEY])
