"""Packages that take seconds to import: a test that uses one imports it. Each process of the tests collects all files,
and most of these need none.
"""

import functools

import pytest


class Package:
    """`torch = lazily.Package("torch")` stands for the module; the test that uses it is skipped where it is absent."""

    def __init__(self, name: str):
        self._name = name

    @functools.cached_property
    def _module(self):
        return pytest.importorskip(self._name)

    def __getattr__(self, attribute: str):
        # Of all names of a file, pytest asks whether they have its marks.
        if attribute.startswith(("_", "pytest")):
            raise AttributeError(attribute)
        return getattr(self._module, attribute)
