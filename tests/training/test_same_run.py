"""Whether a run that is resumed is the one that was begun: its data, and where they lie."""

import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base import durations, schema
from vit_jax.base.durations import normal
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import saving
from vit_jax.data.sources import fingerprint
from vit_jax.recipes.user_files import load_config
from vit_jax.training import normal_forms
from vit_jax.training.assembly import resolve
from vit_jax.training.guards import changed_fields, few_other_images
from vit_jax.training.normal_forms import forms
from vit_jax.training.positions import check_position
from vit_jax.training.starting import check_same_run

RECIPE = str(pathlib.Path(__file__).resolve().parents[2] / "configs/digits.py")


def config(path, **fields):
    config = load_config(RECIPE)
    config.data.update({"name": "folder", "path": str(path), **fields})
    return config


def described(config_, **changes):
    """What a run of this config says of itself, without the data."""
    fields = dataclasses.asdict(resolve(config_))
    model = {"name": "ViT-mu/8", "image_size": 8}
    return {"config": fields, "model": model, "classes": [], "training_examples": 1} | changes


@pytest.mark.parametrize("path", ["", "gs://bucket/x", "/a/b/*.tar", "/a/x-{000..003}.tar"])
def test_what_is_no_relative_path_stays_as_it_is(path):
    assert resolve(config(path)).data.path == path


def test_relative_paths_are_from_the_working_folder_and_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve(config("x-*.tar")).data.path == f"{tmp_path}/x-*.tar"
    assert resolve(config("../x")).data.path == str(tmp_path.parent / "x")
    assert resolve(config("~/x")).data.path == f"{tmp_path}/home/x"
    (tmp_path / "birds").mkdir()
    mixed = config("", name="mixture", mixture=(("digits", 1), ("birds", 2), ("cars196", 1)))
    assert resolve(mixed).data.mixture == (("digits", 1), (f"{tmp_path}/birds", 2), ("cars196", 1))


def test_another_spelling_of_a_place_is_no_change_and_another_place_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    (tmp_path / "link").symlink_to("set")
    before = described(config("set"))
    for same in ("./set", "set/", str(tmp_path / "set"), "link", "../" + tmp_path.name + "/set"):
        assert changed_fields(before, described(config(same))) == [], same
    (told,) = changed_fields(before, described(config("other")))
    assert told == f"config.data.path: '{tmp_path}/set' -> '{tmp_path}/other'"
    mixed = config("", name="mixture", mixture=(("set", 1),))
    linked = config("", name="mixture", mixture=(("link", 1),))
    weighted = config("", name="mixture", mixture=(("set", 2),))
    assert changed_fields(described(mixed), described(linked)) == []
    assert len(changed_fields(described(mixed), described(weighted))) == 1


def test_runs_of_an_earlier_version_kept_paths_as_typed_and_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = described(config("x"))
    for typed in ("data/set", "./data/set/", "~/set", "data/x-*.tar"):
        old["config"]["data"]["path"] = typed
        assert changed_fields(old, described(config(typed))) == [], typed
    old["config"]["data"]["path"] = "data/set"
    assert changed_fields(old, described(config("/elsewhere/data/set"))) == []
    assert changed_fields(old, described(config("/elsewhere/other_data/set")))
    del old["config"]["data"]["sampling"], old["config"]["data"]["holdout_by"]
    assert changed_fields(old, described(config("data/set"), training_data="0123")) == []


def test_other_training_images_are_a_change_that_is_said(tmp_path):
    before = described(config(tmp_path), training_data="0123")
    after = described(config(tmp_path), training_data="4567")
    (told,) = changed_fields(before, after)
    assert told == "the training images: their names, sizes, labels or order are not the same"
    assert changed_fields(before, before) == []


def of_images(path, first, stop):
    numbers = np.random.default_rng(0).integers(0, 2**63, 4000).astype(np.uint64)[first:stop]
    sketch, mark = fingerprint.sketch(numbers), fingerprint.digest(numbers)
    fields = {"training_examples": len(numbers), "training_sketch": sketch, "training_data": mark}
    return described(config(path), **fields)


def test_few_other_images_are_said_and_many_are_a_change(tmp_path):
    before = of_images(tmp_path, 0, 2000)
    assert few_other_images(before, before) == ""
    for now, count in ((of_images(tmp_path, 1, 2000), 1999), (of_images(tmp_path, 1, 2001), 2000)):
        assert f"It continues with the {count:,} that there are" in few_other_images(before, now)
        assert changed_fields(before, now) == []
    for now in (of_images(tmp_path, 400, 2000), of_images(tmp_path, 2000, 4000)):
        assert few_other_images(before, now) == "" and len(changed_fields(before, now)) >= 1
    earlier = {name: value for name, value in before.items() if name != "training_sketch"}
    assert len(changed_fields(earlier, of_images(tmp_path, 1, 2000))) == 2  # which did not keep it


def test_runs_begun_before_fingerprints_had_the_contents_of_buckets_resume(tmp_path):
    old, now, rewritten, others = (
        described(config(tmp_path), training_data=mark)
        for mark in ("0123", "0123-4567", "0123-89ab", "cdef-4567")
    )
    assert changed_fields(old, now) == changed_fields(now, now) == []
    assert changed_fields(now, rewritten) and changed_fields(old, others)


def test_runs_begun_before_heads_of_exits_had_patterns_resume(tmp_path):
    old, now = described(config(tmp_path)), config(tmp_path)
    old["config"]["init_reset"] = old["config"]["lora"]["also"] = ["head(_distilled)?/.*"]
    old["config"]["optim"]["freeze"] = ["(?!head(_distilled)?/).*"]
    now.optim.freeze = load_config(
        str(pathlib.Path(RECIPE).parent / "linear_probe.py")
    ).optim.freeze
    assert changed_fields(old, described(now)) == []
    now.init_reset = ("head/.*",)
    (told,) = changed_fields(old, described(now))
    assert "init_reset" in told


def test_runs_whose_recipe_reset_nothing_of_a_model_without_a_head_resume(tmp_path):
    old, now = described(config(tmp_path)), described(config(tmp_path))
    for description in (old, now):
        description["model"]["num_classes"] = 0
    old["config"]["init_reset"] = []
    assert changed_fields(old, now) == []
    now["config"]["init_reset"] = ["encoder/.*"]
    assert any("init_reset" in field for field in changed_fields(old, now))


def test_a_tokenizer_of_other_tokens_is_another_run_and_an_earlier_version_kept_none():
    now, before = (described(load_config("image_text:smoke")) for _ in "ab")
    objective = before["config"]["objective"]
    assert changed_fields(before, now) == []
    objective["tokenizer_digest"] = "0123"
    (changed,) = changed_fields(before, now)
    assert changed == "config.objective.tokenizer_digest: '0123' -> 'bytes'"
    del objective["tokenizer_digest"]
    assert changed_fields(before, now) == []


def test_another_spelling_of_a_duration_or_a_size_is_no_change_and_another_value_is(tmp_path):
    before, now = described(config(tmp_path)), described(config(tmp_path))
    before["config"] |= {"duration": "40 steps"}
    before["config"]["optim"] |= {"warmup": "2 epochs", "boundaries": ["30%", "60 %"]}
    before["config"]["data"]["image_size"] = 224
    now["config"] |= {"duration": "40steps"}
    now["config"]["optim"] |= {"warmup": "2epoch", "boundaries": ["30percent", "60%"]}
    for same in ("224", "224x224", [224, 224]):
        now["config"]["data"]["image_size"] = same
        assert changed_fields(before, now) == changed_fields(now, before) == [], same
    now["config"]["data"]["image_size"] = "224x448"
    now["config"]["duration"] = "41steps"
    assert changed_fields(before, now) == [
        "config.data.image_size: 224 -> '224x448'",
        "config.duration: '40 steps' -> '41steps'",
    ]


def test_every_duration_of_a_config_is_compared_in_its_normal_form(tmp_path):
    resolved = resolve(config(tmp_path))
    spelled = {name for name, form in forms(type(resolved)).items() if form is normal}
    for name, field in schema.walk(type(resolved)):
        parser = field.metadata["parse"]
        assert (name in spelled) == (parser is durations.parse), name
    assert {"duration", "optim.warmup", "optim.timescale"} <= spelled


def position_error(before, now, step=40, total_steps=80):
    with pytest.raises(ConfigError) as raised:
        check_position(step, total_steps, before, now, "runs/a")
    return str(raised.value)


def native(path, **fields):
    """A description of a run whose batches have as many images as there are patches for."""
    made = described(config(path))
    made["config"]["data"] |= {"native_tokens": 64, "native_budget": 1024} | fields
    return made


def test_a_step_of_other_images_is_refused_with_both_numbers_whatever_is_allowed(tmp_path):
    before, now = described(config(tmp_path)), described(config(tmp_path))
    before["config"]["batch_size"] = 24
    now["config"]["batch_size"] = 12
    message = position_error(before, now)
    assert "config.batch_size = 12 differs from 24" in message
    assert "step 40, after 960 images" in message and "it would be 480" in message
    assert "--config.batch_size=24" in message and "--config.init_from=runs/a" in message
    now["config"]["batch_size"] = 24
    check_position(40, 80, before, now, "runs/a")
    now["config"]["data"]["repeats"] = 2
    assert "data.repeats = 2 differs from 1" in position_error(before, now)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("native_budget", 2048),
        ("native_budget", 0),
        ("native_tokens", 128),
        ("native_lengths", (32, 64)),
        ("native_multiple", 3),
    ],
)
def test_a_step_of_other_images_at_their_own_size_is_refused(tmp_path, name, value):
    now = native(tmp_path, **{name: value})
    assert f"config.data.{name} = " in position_error(native(tmp_path), now)
    check_position(40, 80, now, native(tmp_path, **{name: value}), "runs/a")


def test_lengths_whose_shares_are_written_or_not_are_the_same_and_the_seed_orders_them(tmp_path):
    before, now = (
        native(tmp_path, native_lengths=entries) for entries in ([32, 64], [[32, 1], [64, 1]])
    )
    check_position(40, 80, before, now, "runs/a")
    now["config"]["seed"] += 1
    assert "config.seed" in position_error(before, now)


def test_a_duration_that_ends_before_the_resumed_step_is_refused_and_a_finished_run_is_not(
    tmp_path,
):
    before, now = described(config(tmp_path)), described(config(tmp_path))
    before["config"]["duration"] = "40 steps"
    now["config"]["duration"] = "24 steps"
    message = position_error(before, now, total_steps=24)
    assert "step 40" in message and "config.duration = '24 steps' ends at step 24" in message
    assert "it was '40 steps'" in message
    check_position(24, 24, before, now, "runs/a")
    check_position(40, 40, before, before, "runs/a")
    few = of_images(tmp_path, 0, 2000), of_images(tmp_path, 1, 2000)
    check_position(40, 39, *few, "runs/a")


def test_durations_inside_a_field_have_one_form_too(tmp_path):
    def with_terms(start: str):
        terms = (("supervised", {}), ("features", {"start": start}))
        return {"objective": {"terms": terms}, "model": {}}

    form = functools.partial(normal_forms.normal_value, form=None)
    assert form(with_terms("40steps")) == form(with_terms("4e1 steps"))
    assert form(with_terms("40 steps")) != form(with_terms("41 steps"))
    assert form(({"start": "50 %"}, "B/16")) == form(({"start": "50%"}, "B/16"))
    assert form(("224", "1 example of a name")) == ["224", "1 example of a name"]


@pytest.mark.parametrize("saved, expected", [("unsaid", False), (None, None), (False, False)])
def test_late_terms_of_a_sum_rest_if_they_do_in_the_run_that_was_begun(tmp_path, saved, expected):
    recipe = load_config("digits")
    recipe.objective = load_config("sum:smoke").objective
    recipe.objective.update(dict(name="sum", tokenizer="", terms=("supervised",)))
    new = resolve(recipe, tmp_path)
    assert new.objective.rest is None
    before = described(recipe)
    before["config"]["objective"]["rest"] = saved
    if saved == "unsaid":
        del before["config"]["objective"]["rest"]
    checkpoints = saving.Checkpoints(tmp_path, new.checkpoint)
    checkpoints.save_now(4, {"step": jnp.int32(4)}, before)
    checkpoints.close()
    now = resolve(recipe, tmp_path)
    assert now.objective.rest == expected
    assert changed_fields(before, described(recipe) | {"config": dataclasses.asdict(now)}) == []


def test_a_changed_batch_size_is_never_advised_to_be_allowed(tmp_path, caplog):
    before = described(config(tmp_path))
    now = described(config(tmp_path), config=before["config"] | {"batch_size": 7})
    for choice in ("error", "allow"):
        chosen = resolve(config(tmp_path))
        chosen = dataclasses.replace(
            chosen, checkpoint=dataclasses.replace(chosen.checkpoint, on_config_change=choice)
        )
        if choice == "error":
            with pytest.raises(ConfigError, match="put config.batch_size back") as refused:
                check_same_run(chosen, before, now)
            assert "allow" in str(refused.value) and "change=allow" not in str(refused.value)
        else:
            check_same_run(chosen, before, now)
    assert "continuing" not in caplog.text
