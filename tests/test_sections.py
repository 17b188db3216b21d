"""Sections of the config whose options are those of what they name, and tables that import what is named."""

import dataclasses
import functools
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from vit_jax.base import lazy_table, schema, settings
from vit_jax.base.errors import ConfigError
from vit_jax.config import Config, config_class, default_config
from vit_jax.models import registry
from vit_jax.models.zoo import mixer, vit_zoo
from vit_jax.objectives.mae import Mae
from vit_jax.objectives.supervised import Supervised


def names(cls: type) -> set[str]:
    return {"name", *(option.name for option in schema.options(cls))}


def test_the_default_has_the_options_of_its_family_and_objective():
    config = default_config()
    assert set(config.model) == names(vit_zoo.Config)
    assert set(config.objective) == names(Supervised.Options)
    typed = schema.typed(config_class(config), config)
    assert {field.name for field in dataclasses.fields(typed.model)} == names(vit_zoo.Config)


def test_another_name_brings_other_options_and_keeps_what_was_set():
    config = default_config()
    config.model.width = 64
    config.model.name, config.objective.name = "Mixer-B/16", "mae"
    assert set(config.model) == names(mixer.Config) and config.model.width == 64
    assert set(config.objective) == names(Mae.Options)
    config.model.token_mlp_dim = 32
    copy = config.copy_and_resolve_references()
    assert copy == config and copy.model.token_mlp_dim == 32
    copy.model.name = "ViT-B/16"
    assert copy.model.token_mlp_dim == 32  # an error where the model is made
    with pytest.raises(ConfigError, match="model ViT-B/16 has no option 'token_mlp_dim'"):
        registry.model_config(**schema.given_options(copy.model))


def test_options_of_others_may_be_set_before_their_name_read_and_unset():
    config = default_config()
    assert config.model.token_mlp_dim is None and "token_mlp_dim" not in config.model
    config.model.update(token_mlp_dim=32, name="Mixer-B/16")
    assert set(config.model) == names(mixer.Config)
    config.model.rope = None  # of a ViT
    assert set(config.model) == names(mixer.Config)
    with pytest.raises(
        AttributeError, match="config.model has no field depht; did you mean 'depth'"
    ):
        config.model.depht = 1
    with pytest.raises(AttributeError, match="depht"):
        _ = config.model.depht


def test_a_name_on_the_command_line_comes_before_other_settings():
    config = default_config()
    lines = [("model.token_mlp_dim", "32"), ("model.name", "Mixer-B/16"), ("optim.lr", "0.1")]
    changes = settings.change(config, Config, lines)
    assert changes["model.token_mlp_dim"] == (None, 32) and config.optim.lr == 0.1
    assert set(config.model) == names(mixer.Config)
    with pytest.raises(ConfigError, match="did you mean 'model.token_mlp_dim'"):
        settings.change(default_config(), Config, [("model.token_mlp_dimm", "1")])


def test_a_config_of_an_earlier_version_with_the_options_of_all_is_read():
    earlier = dataclasses.asdict(config_class()())  # as JSON had it: most of them None
    earlier["model"] |= {"name": "Mixer-S/16", "token_mlp_dim": 8}
    assert len(earlier["model"]) > 2 * len(names(mixer.Config))
    config = schema.fill(default_config(), earlier)
    assert set(config.model) == names(mixer.Config) and config.model.token_mlp_dim == 8
    assert config_class(earlier) is config_class(config)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("optim.learning_rate", "lr"),
        ("lr", "optim.lr"),
        ("optmi", "optim"),
        ("batchsize", "batch_size"),
        ("model.num_clases", "num_classes"),
        ("objective.label_smothing", "label_smoothing"),
    ],
)
def test_a_field_that_a_config_does_not_have_is_an_error_with_the_nearest(name, nearest):
    *path, field = name.split(".")
    section = functools.reduce(getattr, path, default_config())
    message = f"has no field {field}; did you mean '{nearest}'"
    with pytest.raises(AttributeError, match=message):
        setattr(section, field, 3)
    with pytest.raises(AttributeError, match=message):
        getattr(section, field)
    with pytest.raises(KeyError, match=message):
        section[field]
    with pytest.raises(KeyError, match=message):
        default_config().update_from_flattened_dict({name: 3})


def test_a_section_may_be_replaced_by_a_plain_one():
    config = default_config()
    config.eval = ConfigDict(config.eval.to_dict() | {"every": "1 epoch"})
    config.optim = {"lr": 0.5}
    assert config.eval.every == "1 epoch" and config.optim.lr == 0.5
    assert config.get("no_such", 7) == 7 and not hasattr(config, "no_such")


def test_an_entry_is_imported_when_it_is_asked_for():
    table = lazy_table.LazyTable({"one": "json:loads", "lost": "vit_jax:no_such_name"})
    table["two"] = len
    assert list(table) == ["one", "lost", "two"] and "lost" in table and len(table) == 3
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = table["lost"]
    del table["lost"]
    assert table["one"]("[1]") == [1] and list(table.imported())[-1] is len
    with pytest.raises(KeyError):
        _ = table["lost"]


def test_every_entry_of_a_table_is_there_under_its_name():
    assert [registry.family_name(f) for f in registry.FAMILIES.values()] == list(registry.FAMILIES)
    for family in registry.families():
        assert all(registry.find_family(name) is family for name in family.VARIANTS)


def test_a_family_is_imported_alone():
    code = (
        "import sys; from vit_jax.models import registry; registry.model_config('Mixer-B/16'); "
        "print(*(m for m in sys.modules if m.startswith('vit_jax.models.zoo.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["vit_jax.models.zoo.mixer"]


def test_a_copy_takes_an_image_size_of_either_form_as_the_config_does():
    copied = default_config().copy_and_resolve_references()
    settings.change(copied, Config, [("data.image_size", "32x64")])
    typed = schema.typed(config_class(copied), copied)
    assert typed.data.image_size == (32, 64)
    copied.data.image_size = 64
    assert copied.data.image_size == 64
    with pytest.raises(TypeError):
        copied.data.image_feature = 3
