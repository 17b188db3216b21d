"""State that no gradient reaches, parameters of an objective's own, and teachers, in whole runs."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import vit_jax
from vit_jax import objectives
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.schema import option
from vit_jax.checkpoints import reading
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.objectives.contract import MovingAverage, Objective
from vit_jax.training import loop
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.guards import check_classes


@dataclasses.dataclass(frozen=True)
class Options:
    """Of the objective below."""

    momentum: float = option(0.9, "of the teacher", minimum=0, maximum=1)


class Agree(Objective):
    """Features near those of a teacher that follows the student, through a head; it keeps a centre."""

    Options = Options
    needs_labels = False

    def make_modules(self, rngs):
        head = nnx.Linear(self.context.model.width, 8, rngs=rngs)
        head.centre = nnx.BatchStat(jnp.zeros(8))
        return head

    def teacher(self):
        return MovingAverage(lambda step: jnp.float32(self.options.momentum))

    def __call__(self, learner, batch, rngs):
        def look(one):
            return one.modules(one.model(batch["image"]).features.astype(jnp.float32))

        taught = jax.lax.stop_gradient(look(learner.teacher))
        centre = learner.modules.centre
        loss = jnp.square(look(learner) - taught + centre[...] + 0.1).mean(-1)
        centre[...] = 0.5 * centre[...] + 0.5 * taught.mean(0)
        return loss, {}


@pytest.fixture
def agree():
    objectives.register("agree", Agree)
    yield
    del objectives.OBJECTIVES["agree"]


@pytest.mark.slow
def test_a_teacher_that_follows_the_student_and_a_centre_are_saved_and_restored(
    agree, tiny_config, tmp_path, monkeypatch, stop_after
):
    config = lambda: tiny_config(  # noqa: E731
        objective__name="agree", augment__mixup=0.0, checkpoint__every="4 steps", optim__ema=0.9
    )
    vit_jax.train(config(), tmp_path / "whole")
    # Stopped after 5 steps, where nothing is saved, and gone on with from step 4.
    stop_after(5, saving=False)
    with pytest.raises(loop.Interrupted):
        vit_jax.train(config(), tmp_path / "parts")
    monkeypatch.undo()
    vit_jax.train(config(), tmp_path / "parts")
    parts = {}
    for run in ("whole", "parts"):
        assembly = assemble(resolve(config()), num_classes=0, examples_per_epoch=1438)
        like = jax.eval_shape(assembly.init, jax.random.key(0)).parts()
        parts[run] = jax.device_get(
            reading.read_parts(reading.find_checkpoint(tmp_path / run), like)
        )
    assert {"params_objective", "teacher", "teacher_objective", "objective_variables"} <= set(
        parts["whole"]
    )
    jax.tree.map(np.testing.assert_array_equal, parts["whole"], parts["parts"])
    assert np.abs(parts["whole"]["objective_variables"]["centre"]).max() > 0


def test_a_teacher_follows_by_its_momentum_and_not_in_skipped_steps(agree, tiny_config):
    config = tiny_config(objective__name="agree", objective__momentum=0.75, nonfinite="skip")
    config.augment.mixup = 0.0
    assembly = assemble(resolve(config), num_classes=0, examples_per_epoch=1438)
    state = jax.jit(assembly.init)(jax.random.key(0))
    step = jax.jit(assembly.train_step)
    batch = {"image": np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), np.uint8)}
    for _ in range(3):
        before, (state, _) = state, step(state, batch)
    name = lambda s, tree: np.asarray(getattr(s, tree)["objective"]["kernel"])  # noqa: E731
    expected = 0.75 * name(before, "teacher") + 0.25 * name(state, "params")
    np.testing.assert_allclose(name(state, "teacher"), expected, atol=1e-6)
    poisoned = state.replace(params=jax.tree.map(lambda p: p * jnp.nan, state.params))
    skipped, _ = step(poisoned, batch)
    assert int(skipped.health.skipped) == 1
    for tree in ("teacher", "variables"):
        jax.tree.map(np.testing.assert_array_equal, getattr(skipped, tree), getattr(state, tree))


@pytest.mark.slow
def test_a_fixed_teacher_is_read_again_and_not_saved(tiny_config, tmp_path):
    vit_jax.train(tiny_config(duration="2 steps"), tmp_path / "teacher")
    config = tiny_config(
        objective__name="distill", objective__teacher=str(tmp_path / "teacher"), model__pool="token",
        model__distilled=True,
    )  # fmt: skip
    result = vit_jax.train(config, tmp_path / "run")
    assert result["step"] == 12
    saved = reading.find_checkpoint(tmp_path / "run") / "state"
    assert "frozen_teacher" not in (saved / "_METADATA").read_text()
    assert vit_jax.train(config, tmp_path / "run")["accuracy"] == result["accuracy"]
    # Another teacher in the same place is another run.
    vit_jax.train(tiny_config(duration="4 steps"), tmp_path / "other")
    shutil.rmtree(tmp_path / "teacher")
    (tmp_path / "other").rename(tmp_path / "teacher")
    with pytest.raises(
        ConfigError, match="has other weights than the one this run was started with"
    ):
        vit_jax.train(config, tmp_path / "run")


def test_a_flat_folder_without_labels_is_learned_from_and_then_fine_tuned(tiny_config, tmp_path):
    (tmp_path / "photos").mkdir()
    for i in range(64):
        Image.effect_noise((32, 32), 64).convert("RGB").save(tmp_path / f"photos/{i}.png")
    learned = vit_jax.train(
        tiny_config(
            objective__name="masked_patches", data__name="folder", augment__mixup=0.0,
            data__path=str(tmp_path / "photos"), data__holdout=0.5, batch_size=8, duration="2 steps",
            model__depth=1,
        ),
        tmp_path / "run",
    )  # fmt: skip
    assert 0 <= learned["accuracy"] <= 1
    tuned = tiny_config(
        init_from=str(tmp_path / "run"), duration="1 steps", model__depth=1, eval__evaluators=()
    )
    vit_jax.train(tuned, tmp_path / "tuned")
    before, after = (reading.read_weights(tmp_path / run).params for run in ("run", "tuned"))
    assert "head" not in before and "objective" not in after
    # The rate is 0 at the first of warm-up's steps.
    np.testing.assert_array_equal(before["position"], after["position"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective.name": "masked_patches", "augment.mixup": 0.2},
            "cannot learn from mixed images",
        ),
        (
            {"objective.name": "masked_patches", "model.num_classes": 7},
            "num_classes is 7, but .*uses no classification head",
        ),
        ({"objective.name": "maked_patches"}, "is no objective; did you mean 'masked_patches'"),
        ({"objective.name": "distill"}, "needs a teacher"),
        ({"objective.corrupted": 0.2}, "objective supervised has no option 'corrupted'"),
    ],
)
def test_what_does_not_go_together_is_refused(tiny_config, changes, message):
    config = tiny_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        assemble(resolve(config), num_classes=10, examples_per_epoch=1438)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_classes=7), "tells 7 classes apart, and the data has 10"),
        (dict(num_classes=0), "has no head, and so no classes to teach"),
        (dict(num_classes=10, channels=1), "sees images of 1 channels, and the student of 3"),
        (None, "the teacher: .*/weights.npz does not exist"),
    ],
)
def test_a_teacher_that_cannot_teach_this_is_refused(tiny_config, tmp_path, change, message):
    path = tmp_path / "weights.npz"
    if change is not None:
        model = registry.model_config("ViT-mu/16", image_size=32, **change)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), registry.abstract(model)[1])
        formats.write_checkpoint(formats.LoadedCheckpoint(model, zeros), path, "official")
    config = tiny_config(objective__name="distill", objective__teacher=str(path))
    with pytest.raises(UserError, match=message):
        assemble(resolve(config), num_classes=10, examples_per_epoch=1438)


def test_a_teacher_with_classes_in_another_order_or_the_run_itself_is_refused(
    tiny_config, tmp_path
):
    check_classes("T", ("a", "b"), ("a", "b"))
    check_classes("T", ("n01", "n02"), ("a", "b"))  # other words
    check_classes("T", None, ("a", "b"))
    with pytest.raises(ConfigError, match="number 0 is 'b' to it, and 'a' in the data"):
        check_classes("T", ("b", "a"), ("a", "b"))
    for teacher in (tmp_path, tmp_path / "checkpoints" / "12"):
        config = tiny_config(objective__name="distill", objective__teacher=str(teacher))
        with pytest.raises(ConfigError, match="is the run itself"):
            resolve(config, tmp_path)


def test_an_objective_that_needs_labels_refuses_data_without(tiny_config):
    with pytest.raises(ConfigError, match="the objective 'supervised' needs labels, and 'digits'"):
        assemble(resolve(tiny_config()), num_classes=0, examples_per_epoch=1438)
