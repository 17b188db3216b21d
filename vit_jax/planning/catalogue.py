"""The recipes that come with the package, as `vit_jax recipes` lists them: what each trains, on what, what it
costs at least, and what its own docstring says to expect. Copies of them, to change.
"""

import ast
import pathlib
import re
import shutil
import textwrap
from collections.abc import Sequence

from ml_collections import ConfigDict

from vit_jax.base import logs, outputs
from vit_jax.base.errors import ConfigError
from vit_jax.devices import chips
from vit_jax.models import naming, registry
from vit_jax.planning import plan
from vit_jax.recipes import shipped, user_files
from vit_jax.training.assembly import outline, resolve

CHIP = "TPU v5e"  # whose published peak costs are counted by
_WIDTH = 100
_COMMAND = re.compile(r"vit_jax train --config=configs/(?P<name>[\w/]+)\.py(?::(?P<argument>\S+))?")
_EXPECT = re.compile(r"\bExpect.*?(?=\n\n|\Z)", re.DOTALL)
_TITLE_END = re.compile(r"\s\(|[.:;]\s|\.$")
_SENTENCE_END = re.compile(r"(?<=\.)\s")


def recipe_table(names: Sequence[str] = (), *, parameters: bool = True) -> list[dict]:
    """A row for each recipe, made of its first documented command.

    Args:
      names: of the recipes, by default all.
      parameters: whether they are counted, for which each network is traced: a tenth of a second and more.

    Returns:
      Dicts of `name`, `title`, `config` (for --config), `model`, `parameters`, `data`, `duration`, `runs`
      (1, or more of an experiment), `exaflops` of all training steps, `chip_hours` at the published peak of
      `CHIP`, and `expect`. `None` for what is left to the command line or to the checkpoint to start from, and
      for what is not counted.
    """
    names = names or shipped.recipe_names()
    with logs.with_elapsed_time(f"reading {len(names)} recipes", after=2.0):
        return [_row(name, parameters) for name in names]


def recipe_text(rows: list[dict]) -> str:
    """The rows for a person."""
    parts = [_paragraph(row) for row in rows]
    end = (
        "vit_jax train --config=NAME[:ARGUMENT] --workdir=DIR trains one; 'vit_jax recipes NAME' prints all "
        f"that it says, 'vit_jax recipes copy NAME DIR' copies it. Costs are lower bounds: a {CHIP} at its "
        "published peak, which no run reaches."
    )
    return "\n\n".join([*parts, textwrap.fill(end, _WIDTH)])


def recipe_page(rows: list[dict]) -> str:
    """The rows as a Markdown page."""
    lines = [
        "# Recipes", "",
        "Made by `vit_jax recipes --markdown`. `vit_jax train --config=NAME` trains one, `vit_jax recipes NAME` "
        "prints all that it says, and `vit_jax recipes copy NAME DIR` copies it. Costs count the products of all "
        f"training steps at the published peak of a {CHIP}, which no run reaches: they are lower bounds.", "",
        "| recipe | what | model | parameters | data | length | chip-hours, at least |",
        "|---|---|---|--:|---|---|--:|",
    ]  # fmt: skip
    for row in rows:
        parameters = f"{row['parameters'] / 1e6:,.1f} M" if row["parameters"] else ""
        of_run = row["model"], parameters, row["data"], row["duration"], _hours(row["chip_hours"])
        cells = (f"`{row['config']}`", row["title"], *of_run)
        lines.append(f"| {' | '.join(cells)} |")
    expected = [(row["name"], row["expect"]) for row in rows if row["expect"]]
    lines += ["", "## What to expect", ""]
    for name, text in expected:
        lines += [f"**{name}**", "", "```text", text, "```", ""]
    return "\n".join(lines).rstrip()


def recipe_docstring(name: str) -> str:
    """All that a recipe says of itself. Raises `ConfigError` for an unknown name."""
    path = shipped.require_recipe(name)
    return f"{_docstring(path)}\n\n{path}"


def copy_recipe(name: str, directory: str) -> pathlib.Path:
    """Copies a recipe to change it; the copy imports what it needs from the package.

    Raises:
      ConfigError: there is no such recipe, or a file of its name in the directory.
    """
    source, folder = shipped.require_recipe(name), pathlib.Path(directory)
    target = folder / source.name
    outputs.make_folder(directory, "DIR")
    if target.exists():
        raise ConfigError(f"{target} exists: remove it, or name another folder")
    shutil.copyfile(source, target)
    return target


def _row(name: str, parameters: bool) -> dict:
    text = _docstring(shipped.require_recipe(name))
    command = next((m for m in _COMMAND.finditer(text) if m["name"] == name), None)
    argument = command and command["argument"]
    spec = f"{name}:{argument}" if argument else name
    runs = user_files.load_recipe(_shipped_spec(spec))
    config = next(iter(runs.values()))
    row = {"name": name, "title": _title(text), "config": spec, "runs": len(runs)}
    expect = _EXPECT.search(text)
    return row | _size(config, parameters) | {"expect": expect[0] if expect else ""}


def _shipped_spec(spec: str) -> str:
    """A recipe's spec by the path of its file, which no local file shadows."""
    name, colon, argument = spec.partition(":")
    return f"{shipped.recipe_path(name)}{colon}{argument}"


def _size(config: ConfigDict, parameters: bool) -> dict:
    """What of a row follows from the config."""
    row = {
        "model": config.model.name or "the checkpoint's", "parameters": None, "data": config.data.name,
        "duration": str(config.duration), "exaflops": None, "chip_hours": None,
    }  # fmt: skip
    classes, examples = plan.known_data(config.data)
    unknown_length = examples is None and "epoch" in str(config.duration)
    needs_teacher = not all(
        config.objective[name] for name in ("teacher", "teachers") if name in config.objective
    )
    no_classes = not (classes or config.model.num_classes)
    if config.init_from or config.pseudo.teacher or needs_teacher or no_classes or unknown_length:
        return row
    made = outline(
        resolve(config),
        num_classes=classes or config.model.num_classes,
        examples_per_epoch=examples,
    )
    exaflops = made.flops() / 1e18
    return row | {
        "model": naming.full_name(made.model_config, config.model.name),
        "parameters": registry.count_parameters(made.model_config) if parameters else None,
        "exaflops": exaflops,
        "chip_hours": exaflops * 1e18 / chips.PEAK_BFLOAT16[CHIP] / 3600,
    }


def _paragraph(row: dict) -> str:
    size = [row["model"], row["data"], row["duration"]]
    if row["parameters"]:
        size.insert(1, f"{row['parameters'] / 1e6:,.1f} M parameters")
    if row["runs"] > 1:
        size.append(f"the first of {row['runs']} runs")
    if row["chip_hours"]:
        size.append(f"at least {_hours(row['chip_hours'])} hours of a {CHIP}")
    texts = [row["title"], ", ".join(size), _summary(row["expect"])]
    lines = [
        line for text in texts for line in textwrap.wrap(text, _WIDTH - 4, break_on_hyphens=False)
    ]
    return "\n    ".join([row["config"], *lines])


def _hours(hours: float | None) -> str:
    if hours is None:
        return ""
    return "0.0" if hours < 0.05 else f"{hours:,.1f}" if hours < 10 else f"{hours:,.0f}"


def _summary(expect: str) -> str:
    """The first sentence of what to expect; of a table its heading."""
    prose = expect.partition("\n  ")[0]
    first = _SENTENCE_END.split(" ".join(prose.split()))[0]
    return f"{first} …" if first.endswith(":") else first


def _docstring(path: pathlib.Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _title(text: str) -> str:
    """The beginning of a docstring, up to the end of its first sentence or of what it names."""
    one_line = " ".join(text.partition("\n\n")[0].split())
    return _TITLE_END.split(one_line)[0]
