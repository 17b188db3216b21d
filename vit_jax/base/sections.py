"""Sections of the config whose options depend on the name in them: `config.model` has those of the family
that `config.model.name` is of. And sections by the names of earlier versions, which recipes, flags and checkpoints
may still have.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Self

from absl import logging
from ml_collections import ConfigDict, config_dict

from vit_jax.base import schema


class UnknownField(KeyError):
    """A config has no field of this name. Its arguments are the section and the name."""

    def __str__(self) -> str:
        section, name = self.args
        return section._message(name)


class ConfigSection(ConfigDict):
    """A section of a config, whose errors for unknown fields have the nearest name."""

    def __getitem__(self, key: str) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError as error:
            raise error if isinstance(error, UnknownField) else UnknownField(self, key) from None

    def __setitem__(self, key: str, value: object) -> None:
        if self.is_locked and key not in self and "." not in str(key):
            raise UnknownField(self, key)
        super().__setitem__(key, value)

    def copy_and_resolve_references(self, visit_map: dict | None = None) -> Self:
        """A copy in which a field of several types, such as an image size, still takes all of them. In the copy of
        ml_collections it takes only the type of its value.
        """
        copied = super().copy_and_resolve_references(visit_map)
        with copied.ignore_type():
            for name in self:
                if self.get_type(name) is object:
                    copied[name] = config_dict.FieldReference(copied[name], field_type=object)
        return copied

    def _message(self, name: str) -> str:
        return schema.no_such_field(name, self.keys(), "this section of the config")


class NamedSection(ConfigSection):
    """A section with the options of what its `name` names; another name swaps them, and what was set stays.

    Options of others are found too, so that their order does not matter: all are imported for the first that
    what is named does not have. A value that stays with a name that has no such option is an error where the
    model or objective is made.

    A subclass declares `TITLE`, `NAME` (the dataclass with `name`), `class_named` and `classes`.
    """

    TITLE: str
    NAME: type

    @classmethod
    def class_named(cls, name: str) -> type | None:
        """The dataclass of the options of what has this name, of an unknown name those that all share."""
        raise NotImplementedError

    @classmethod
    def classes(cls) -> tuple[type, ...]:
        """The dataclass of every one that has a name."""
        raise NotImplementedError

    @classmethod
    def everything(cls) -> type:
        """The dataclass with the options of all."""
        return _union(cls.TITLE, cls.NAME, *cls.classes())

    @classmethod
    def declared(cls, values: ConfigDict | Mapping) -> type:
        """The dataclass of a section with these values: with options of others if one of those is set."""
        named = cls._named(values)
        of_others = [name for name in values if name not in _options(named)]
        # JSON of earlier versions names all options there are, most of them not set.
        if isinstance(values, dict):
            of_others = [name for name in of_others if values[name] is not None]
        return cls.everything() if of_others else named

    @classmethod
    def _named(cls, values: ConfigDict | Mapping) -> type:
        named = cls.class_named(values.get("name") or "")
        return _union(cls.TITLE, cls.NAME, *([named] if named else []))

    def option(self, name: str) -> dataclasses.Field | None:
        """The option of this name: that of what is named, or else of others; `None` if there is none."""
        return _options(self._named(self)).get(name) or _options(self.everything()).get(name)

    def _message(self, name: str) -> str:
        return schema.no_such_field(
            name, _options(self.everything()), f"config.{self.TITLE.lower()}"
        )

    def __setitem__(self, key: str, value: object) -> None:
        if self.is_locked and key not in self and (option := self.option(key)):
            self._add([option])
        super().__setitem__(key, value)
        if self.is_locked and key == "name":
            self._swap()
        elif self.is_locked and value is None and key not in _options(self._named(self)):
            self._drop([key])

    def __getitem__(self, key: str) -> object:
        is_own = key in self or key.startswith("_") or key == "name" or not self.is_locked
        if is_own or self.option(key) is None:
            return super().__getitem__(key)
        return None  # an option of others, not set

    def _swap(self) -> None:
        """Replaces the options that are not set by those of what is now named."""
        options = _options(self._named(self))
        self._drop([name for name, value in self.items() if value is None])
        self._add(option for name, option in options.items() if name not in self)

    def _drop(self, names: Iterable[str]) -> None:
        with self.unlocked():
            for name in names:
                del self[name]

    def _add(self, options: Iterable[dataclasses.Field]) -> None:
        with self.unlocked():
            for option in options:
                self[option.name] = config_dict.placeholder(schema.option_type(option.type))


@functools.cache
def _union(title: str, base: type, *classes: type) -> type:
    return schema.union(title, base, *classes)


@functools.cache
def _options(cls: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in schema.options(cls)}


RENAMED = {"adapt": "lora"}


def current_name(name: str) -> str:
    """The name of a section, or the dotted name of a field; if it is that of an earlier version, today's, and a
    sentence in the log.
    """
    section, dot, field = name.partition(".")
    if section not in RENAMED:
        return name
    logging.warning("config.%s is called config.%s now", section, RENAMED[section])
    return f"{RENAMED[section]}{dot}{field}"


def with_current_sections(config: dict) -> dict:
    """A config that was stored as JSON, its sections by the names of this version."""
    return {RENAMED.get(name, name): value for name, value in config.items()}


class RootConfig(ConfigSection):
    """A config whose sections are found by the names of earlier versions too; see `current_name`."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(current_name(key))

    def __setitem__(self, key: str, value: object) -> None:
        section = self.get(key) if type(value) is ConfigDict else None
        # ml_collections wants the class that the section has.
        super().__setitem__(key, type(section)(value) if section is not None else value)

    def _message(self, name: str) -> str:
        sections = [key for key, value in self.items() if isinstance(value, ConfigDict)]
        return schema.no_such_field(
            name, [*self, *(f"{key}.{field}" for key in sections for field in self[key])]
        )

    def update_from_flattened_dict(
        self, flattened_dict: Mapping[str, object], strip_prefix: str = ""
    ) -> None:
        """Sets values by dotted names, those of earlier versions too."""
        if not strip_prefix:
            flattened_dict = {current_name(name): value for name, value in flattened_dict.items()}
        super().update_from_flattened_dict(flattened_dict, strip_prefix)
