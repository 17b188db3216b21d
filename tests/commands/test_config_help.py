"""What `--help` prints of the config, and whether each option that it lists can be found by a reader."""

import pathlib
import re

import pytest

from vit_jax.base import schema
from vit_jax.commands.config_help import WIDTH, config_help
from vit_jax.config import config_class, default_config
from vit_jax.models.zoo import vit_zoo
from vit_jax.recipes.user_files import load_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
SCREEN = 50  # lines


def fields(text: str) -> dict[str, str]:
    """The values that help shows, by the names of the fields."""
    return dict(re.findall(r"^  --config\.([\w.]+)=(.*?)(?:  .*)?$", text, flags=re.M))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_help_on_a_recipe_has_a_screen_for_each_section(path):
    text = config_help(load_config(str(path)))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert max(len(section.splitlines()) for section in text.split("\n\n")) <= SCREEN


def test_help_on_a_recipe_lists_what_its_model_objective_and_optimizer_read_with_its_values():
    config = load_config("configs/vit_i21k.py:B/16,light2")
    shown = fields(config_help(config))
    of_model = {name.removeprefix("model.") for name in shown if name.startswith("model.")}
    options = schema.options(vit_zoo.Config)
    visible = {option.name for option in options if not option.metadata["published"]}
    assert of_model == {"name", *visible} and len(visible) <= 24
    assert (shown["model.width"], shown["model.head_bias"]) == ("768", "-10.0")
    assert shown["objective.loss"] == "sigmoid" and "objective.masked" not in shown
    assert shown["optim.lr_end"] == "0.0" and "optim.timescale" not in shown
    config.optim.update(name="sgd", schedule="rsqrt")
    assert {"optim.b2", "optim.eps", "optim.lr_end"}.isdisjoint(
        again := fields(config_help(config))
    )
    assert again["optim.timescale"] == "'10000 steps'" and again["optim.b1"] == "0.9"


def test_options_of_published_weights_are_listed_where_a_recipe_or_a_name_sets_them():
    config = load_config("configs/vit_i21k.py:B/16")
    config.model.update(name="ViT-22B/14", rope="axial")
    shown = fields(config_help(config))
    assert (shown["model.rope"], shown["model.parallel"]) == ("axial", "True")
    assert "model.norm_after" not in shown
    assert "model.norm_after" in fields(config_help(config, everything=True))


def test_help_on_a_recipe_that_starts_from_a_checkpoint_leaves_the_model_to_it():
    text = config_help(load_config("configs/finetune.py:cifar10"))
    assert "config.model: that of the checkpoint to start from" in text
    assert fields(text)["model.dtype"] == "bfloat16"


def test_help_all_lists_every_field_and_says_nothing_twice_of_one():
    text = config_help(default_config(), everything=True)
    assert list(fields(text)) == [name for name, _ in schema.walk(config_class())]
    for name, field in schema.walk(config_class()):
        clauses = field.metadata["doc"].split("; ")
        assert len(clauses) == len(set(clauses)), name
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("arguments", [("help", "train", "all"), ("train", "--help", "all")])
def test_all_may_be_asked_for_in_two_ways(command, arguments):
    code, out, _ = command(*arguments)
    assert code == 0 and "--config.objective.masked=" in out


def test_help_on_an_experiment_shows_the_values_of_its_first_run(command):
    recipe = "configs/experiments/optimizers.py:smoke"
    code, out, err = command("train", f"--config={recipe}", "--help")
    assert code == 0 and f"of {recipe}" in out, err


def test_every_option_is_in_a_recipe_or_in_a_guide():
    guides = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    recipes = (ROOT / "vit_jax/recipes/__init__.py").read_text()
    recipes += "".join(path.read_text() for path in ROOT.glob("configs/**/*.py"))

    def is_found(name: str) -> bool:
        last = re.escape(name.rpartition(".")[2])
        in_recipe = rf"\b{re.escape(name)}\b|[\"']{last}[\"']|\b{last}="
        in_guide = rf"(?<![\w.])(config\.)?{re.escape(name)}\b|`{last}[`=]"
        return bool(re.search(in_recipe, recipes) or re.search(in_guide, guides))

    missing = [name for name, _ in schema.walk(config_class()) if not is_found(name)]
    assert missing == []
