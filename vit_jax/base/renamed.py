"""Sections of the config by the names of earlier versions, which recipes, flags and checkpoints may still have."""

from collections.abc import Mapping

from absl import logging
from ml_collections import ConfigDict

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


class RootConfig(ConfigDict):
    """A config whose sections are found by the names of earlier versions too; see `current_name`."""

    def __getitem__(self, key: str):
        return super().__getitem__(current_name(key))

    def update_from_flattened_dict(
        self, flattened_dict: Mapping[str, object], strip_prefix: str = ""
    ) -> None:
        """Sets values by dotted names, those of earlier versions too."""
        if not strip_prefix:
            flattened_dict = {current_name(name): value for name, value in flattened_dict.items()}
        super().update_from_flattened_dict(flattened_dict, strip_prefix)
