"""Options: what values they take, what code gets of them, and how a union of classes is said."""

import dataclasses
import math

import pytest

from vit_jax.base import schema, settings, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option, section
from vit_jax.config import config_class, default_config


@dataclasses.dataclass(frozen=True)
class Part:
    """A section."""

    share: float = option(0.5, "a share", minimum=0, maximum=1)
    many: tuple = option((1.0, 2.0), "two numbers", above=0, length=2)
    size: int | str | tuple = option(8, "an image size", parse=sizes.parse)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A config."""

    count: int = option(3, "a number", minimum=1, below=10)
    kind: str = option("red", "a choice", choices=("red", "green"))
    part: Part = section(Part)


def config(**values):
    made = schema.to_config(Whole)
    made.update_from_flattened_dict(values)
    return made


def test_code_gets_a_frozen_dataclass_with_values_in_their_types():
    made = schema.typed(Whole, config(**{"part.size": "4x8", "part.share": 1}))
    assert made == Whole(3, "red", Part(share=1.0, size=(4, 8)))
    assert isinstance(made.part.share, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.count = 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "config.count = 0 must be at least 1"),
        ({"count": 10}, "config.count = 10 must be below 10"),
        ({"kind": "gren"}, "config.kind = 'gren' is not one of red, green; did you mean 'green'?"),
        ({"kind": "x"}, "config.kind = 'x' is not one of red, green$"),
        ({"part.share": 1.5}, "config.part.share = 1.5 must be at most 1"),
        ({"part.share": math.nan}, "config.part.share = nan is not finite"),
        ({"part.many": (1.0,)}, "config.part.many = .* must be 2 values, separated by commas"),
        ({"part.many": (1.0, 0.0)}, "config.part.many = .* must be above 0"),
        ({"part.many": ({"weight": math.inf}, 1.0)}, "config.part.many = .* is not finite"),
        ({"part.many": (1.0, math.inf)}, "config.part.many = .* is not finite"),
        ({"part.size": "big"}, "config.part.size = 'big' is no image size: give"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        schema.typed(Whole, config(**values))


@pytest.mark.parametrize("size", [0, -16, 1.5, True, "", "224x", "x", (224, 448, 3), (), None])
def test_what_is_no_image_size_is_refused(size):
    with pytest.raises(ConfigError, match="is no image size"):
        sizes.parse(size)


def test_an_image_size_has_one_form():
    assert sizes.parse("224") == sizes.parse((224, 224)) == sizes.parse([224]) == 224
    assert sizes.parse("224x448") == sizes.parse([224, 448]) == (224, 448)
    assert [sizes.size_text(s) for s in (224, (224, 448))] == ["224", "224x448"]
    assert sizes.height_width(7) == (7, 7)


def test_two_families_may_have_an_option_of_the_same_name():
    @dataclasses.dataclass(frozen=True)
    class One:
        pool: str = option("token", "tokens to a vector", choices=("token", "mean"))
        depth: int = option(12, "blocks", minimum=1, role="size")

    @dataclasses.dataclass(frozen=True)
    class Other:
        pool: str = option("gem", "a map to a vector", choices=("gem",))
        depth: tuple = option((3, 4), "blocks of each stage", role="size")

    @dataclasses.dataclass(frozen=True)
    class Name:
        name: str = option("one", "which")

    joined = schema.union("Joined", Name, One, Other)
    made = schema.to_config(joined)
    assert schema.given_options(schema.typed(joined, made)) == {"name": "one"}
    made.pool, made.depth = "gem", (3, 4)
    assert schema.typed(joined, made).depth == (3, 4)
    made.depth = 12
    said = schema.given_options(schema.typed(joined, made))
    with pytest.raises(ConfigError, match="model.pool = 'gem' is not one of token, mean"):
        schema.checked_options(One, {"pool": said["pool"]}, "model One", "model.")
    assert schema.with_role(joined, "size") == ["depth"]


def test_what_a_resumed_run_may_change_is_said_at_the_option():
    names = set(schema.may_change(config_class()))
    assert {"log.every", "eval.every", "mesh.fsdp", "data.threads", "model.remat"} <= names
    assert not names & {
        "seed",
        "batch_size",
        "optim.lr",
        "model.depth",
        "data.path",
        "model.dropout",
    }


WRONG = {
    "objective.label_smoothing": 1.5, "optim.ema": 2.0, "optim.layer_decay": 0.0, "optim.lr": math.nan,
    "optim.b1": 1.0, "augment.mix_switch": 7.0, "augment.erasing": 3.0, "data.mean": (128.0,) * 3,
    "data.std": (0.0,) * 3, "data.crop_area": (0.2,), "seed": -1, "data.image_size": 0,
    "rollback_skip": "1 stp", "eval.every": "sometimes", "checkpoint.every": "never",
    "optim.boundaries": ("half",),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_every_number_and_duration_of_the_config_has_its_bounds(name):
    made = default_config()
    made.update_from_flattened_dict({name: WRONG[name]})
    with pytest.raises(ConfigError, match=f"config.{name}|model.*{name}"):
        schema.typed(config_class(), made)


def test_an_option_of_an_earlier_version_is_ignored_with_a_sentence(caplog):
    config = default_config()
    assert settings.change(config, config_class(), [("data.mixed_decoders", "True")]) == {}
    assert "config.data.mixed_decoders=True is ignored: all hosts decode" in caplog.text


def test_a_section_by_the_name_of_an_earlier_version_is_found_with_a_sentence(caplog):
    config = default_config()
    config.adapt.lora_rank = 2
    assert config.lora.lora_rank == 2
    assert "config.adapt is called config.lora now" in caplog.text
    copy = config.copy_and_resolve_references()  # as experiments make of a recipe
    assert settings.with_fields(copy, {"adapt.lora_rank": 3}).lora.lora_rank == 3
    changed = settings.change(copy, config_class(), [("adapt.lora_rank", "4")])
    assert changed == {"lora.lora_rank": (2, 4)}
    typed = schema.typed(config_class(), copy)
    assert typed.lora.lora_rank == 4 and "adapt" not in dataclasses.asdict(typed)
    with pytest.raises(AttributeError, match="adept"):
        config.adept.lora_rank = 2


def test_a_setting_that_nothing_reads_is_found_and_what_it_would_need():
    config = default_config()
    settled = {
        "optim.late_warmup": "5 steps",
        "rollback_skip": 3,
        "optim.lr": 0.1,
        "model.width": 8,
    }
    assert settings.without_effect(config, config_class(), settled) == {
        "optim.late_warmup": "config.optim.late = ()", "rollback_skip": "config.nonfinite = 'stop'",
    }  # fmt: skip
    config.optim.late, config.nonfinite = (".*",), "rollback"
    assert not settings.without_effect(config, config_class(), settled)
