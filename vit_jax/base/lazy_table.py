"""Tables of families, objectives and evaluators by name; an entry is imported when it is first asked for."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazyTable(MutableMapping, Generic[T]):
    """Entries by name, in the order of their addition, like a dict.

    >>> table = LazyTable({"sqrt": "math:sqrt", "json": "json"})
    >>> table["sqrt"](4.0)
    2.0
    >>> table["double"] = lambda value: 2 * value
    >>> list(table)
    ['sqrt', 'json', 'double']
    """

    def __init__(self, places: Mapping[str, str], then: Callable[[Any], T] = lambda entry: entry):
        """The entries of a package.

        Args:
          places: 'MODULE:ATTRIBUTE', or the 'MODULE' itself, by name.
          then: a function from the imported object to the entry.
        """
        self._places = dict(places)
        self._entries = dict.fromkeys(places)
        self._then = then

    def __getitem__(self, name: str) -> T:
        if name in self._places:
            module, _, attribute = self._places[name].partition(":")
            imported = importlib.import_module(module)
            self[name] = self._then(getattr(imported, attribute) if attribute else imported)
        return self._entries[name]

    def __setitem__(self, name: str, entry: T) -> None:
        self._entries[name] = entry
        self._places.pop(name, None)

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._places.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def imported(self) -> Iterator[T]:
        """The entries of all modules that are already imported, by any code."""
        for name in list(self._entries):
            if name not in self._places or self._places[name].partition(":")[0] in sys.modules:
                yield self[name]
