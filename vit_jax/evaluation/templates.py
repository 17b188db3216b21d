"""Prompt templates, such as "a photo of a {}", whose {} becomes the name of a class: CLIP's, or those of a run, which
are like its captions.
"""

from collections.abc import Sequence

from absl import logging

from vit_jax.base.errors import ConfigError
from vit_jax.base.settings import named_entries

# The seven of CLIP's 80 templates that its authors found to do best on ImageNet.
TEMPLATES = (
    "itap of a {}.", "a bad photo of the {}.", "a origami {}.", "a photo of the large {}.", "a {} in a video game.",
    "art of the {}.", "a photo of the small {}.",
)  # fmt: skip


def check_templates(templates: Sequence[str], where: str) -> None:
    """Raises `ConfigError` if there are none, or one has no place for the name of a class."""
    if not templates:
        raise ConfigError(
            f"{where}: templates = (): name at least one, such as 'a photo of a {{}}'"
        )
    if lacking := [text for text in templates if "{}" not in text]:
        raise ConfigError(
            f"{where}: templates: {lacking[0]!r} has no {{}}, for the name of a class"
        )


def with_run_templates(entries: Sequence, run_entries: Sequence) -> tuple:
    """Entries of `config.eval.evaluators`, in which an evaluator without templates takes those of the run's evaluator
    of its name: a text tower knows texts like the captions it has learned from.

    Args:
      entries: to evaluate now.
      run_entries: what the run is evaluated by as it trains. An entry that equals one of these stays as it is.
    """
    own = named_entries("eval.evaluators", run_entries)
    known = {name: given["templates"] for name, given in own[::-1] if "templates" in given}
    completed, taken = [], {}
    for name, given in named_entries("eval.evaluators", entries):
        if name in known and "templates" not in given and (name, given) not in own:
            given = given | {"templates": known[name]}
            taken[name] = known[name]
        completed.append((name, given))
    for name, templates in taken.items():
        logging.info("%s: templates of the run: %s", name, ", ".join(map(repr, templates)))
    return tuple(completed)
