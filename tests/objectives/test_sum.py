"""A weighted sum of objectives over one model."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from tests.new_models import drawn
from vit_jax import objectives
from vit_jax.base import durations
from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.models.vit import VisionTransformer
from vit_jax.objectives.contract import (
    Learner,
    MovingAverage,
    Objective,
    ObjectiveContext,
    SavedObjective,
    Teacher,
)
from vit_jax.objectives.image_text.image_text import ImageText
from vit_jax.objectives.masked_patches import MaskedPatches
from vit_jax.objectives.sum.sum import Sum, SumOptions, TextSum
from vit_jax.recipes.user_files import load_config

GUEST = pathlib.Path(__file__).resolve().parents[2] / "docs/extending/my_term.py"
TINY = dict(image_size=16, patch=8, width=16, depth=1, heads=2, mlp_dim=32, num_classes=0)
TOKENS = dict(tokenizer="bytes", text_length=8, vocabulary=259, text_end=1, text_pad=0)
TERMS = (
    ("image_text", {"weight": 0.5, "text_depth": 1, "loss": "softmax"}),
    ("features", {"weight": 2.0, "teachers": ("T",), "adaptor": "linear", "drop": 0.0}),
    ("masked_patches", {"weight": 0.25, "start": "80%"}),
)


def steps(duration: str) -> int:
    return durations.steps(duration, batch_size=4, examples_per_epoch=None, total_steps=10)


def model_of(seed: int, **options) -> nnx.Module:
    config = registry.model_config("ViT-S/16", **TINY | options)
    return drawn(lambda: registry.build(config, rngs=nnx.Rngs(0)), seed)


@pytest.fixture(scope="module")
def made():
    student, teacher = model_of(0, pool="token"), model_of(1, depth=2, pool="mean")
    context = ObjectiveContext(
        student.config, (0.5,) * 3, (0.5,) * 3, 10, steps, batch_size=4, teachers=(teacher.config,)
    )
    random = np.random.default_rng(0)
    batch = {
        "image": jnp.asarray(random.normal(size=(4, 16, 16, 3)), jnp.float32),
        "tokens": jnp.asarray(random.integers(3, 259, (4, 8)), jnp.int32),
    }
    same = (0.5,) * 3
    frozen = (Teacher(teacher, 16, same, same, same, same),)
    return student, context, frozen, batch


def make(made, terms=TERMS, **options) -> Sum:
    options = SumOptions(terms=terms, **TOKENS | options)
    return Sum.variant(options)(options, made[1])


@pytest.fixture(scope="module")
def whole(made):
    """The sum of all terms, what it owns, and its `gradient`."""
    objective = make(made)
    own = drawn(lambda: objective.make_modules(nnx.Rngs(2)), 2)
    return objective, own, gradient(objective, made, own)


def gradient(objective, made, own):
    """(gradients by model and own parameters in float64, losses, metrics) at a step, one program for all."""
    student, _, teachers, batch = made
    (definition, weights), (of_own, module_weights) = registry.split(student), registry.split(own)

    def loss(params, own_params, step):
        learner = Learner(
            nnx.merge(definition, params, weights.variables),
            nnx.merge(of_own, own_params, module_weights.variables),
            teachers,
            step,
        )
        losses, metrics = objective(learner, batch, nnx.Rngs(dropout=5))
        return losses.mean(), (losses, metrics)

    program = jax.jit(jax.grad(loss, (0, 1), has_aux=True))

    def at(step):
        grads, (losses, metrics) = program(weights.params, module_weights.params, jnp.int32(step))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), grads), losses, metrics

    return at


def traced_metrics(objective, own, made, teacher=lambda student, own: None) -> dict:
    """The shapes of its metrics: nothing is computed."""
    student, _, _, batch = made
    definition, state = nnx.split(own)

    def metrics(state, batch):
        own = nnx.merge(definition, state)
        learner = Learner(student, own, teacher(student, own), jnp.int32(0))
        return objective(learner, batch, nnx.Rngs(dropout=0))[1]

    return jax.eval_shape(metrics, state, batch)


def test_the_gradient_is_the_weighted_sum_of_each_terms_alone(made, whole):
    objective, own, at = whole
    (of_sum, of_own), *_ = at(9)
    key, total = nnx.Rngs(dropout=5), None
    for term in objective.terms:
        drawn = key.dropout()

        class Alone(type(term.objective)):
            """The term with the key that the sum gives it."""

            def __call__(self, learner, batch, rngs, drawn=drawn):
                return super().__call__(learner, batch, nnx.Rngs(dropout=drawn))

        alone = Alone(term.objective.options, term.objective.context)
        (grads, own_grads), *_ = gradient(alone, made, own.terms[term.name])(9)
        grads = jax.tree.map(lambda x, w=term.weight: w * x, grads)
        total = grads if total is None else jax.tree.map(np.add, total, grads)
        theirs = of_own["terms"][term.name]
        for one, other in zip(jax.tree.leaves(theirs), jax.tree.leaves(own_grads), strict=True):
            np.testing.assert_allclose(one, term.weight * other, atol=1e-6, rtol=1e-5)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(total))
    for one, other in zip(jax.tree.leaves(of_sum), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * largest)


def test_the_images_as_they_are_go_through_the_model_once(made, monkeypatch):
    calls, forward = [], VisionTransformer.__call__

    def counted(self, *args, **kwargs):
        calls.append(self.config)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(VisionTransformer, "__call__", counted)
    student, _, teachers, _ = made
    whole = make(made, (TERMS[0], ("features", TERMS[1][1] | {"adaptor": "ladder"})))
    own = nnx.eval_shape(lambda: whole.make_modules(nnx.Rngs(2)))
    calls.clear()
    metrics = traced_metrics(whole, own, made, lambda *_: teachers)
    assert calls.count(student.config) == 1 and len(calls) == 2  # and the teacher once
    assert {"image_text_loss", "image_text_cosine", "features_loss", "features_cosine_0"} <= {
        *metrics
    }
    alone = [term.objective.flops() for term in whole.terms]
    assert whole.flops() == sum(alone) - registry.count_flops(student.config)


def test_a_term_that_has_not_begun_changes_nothing(whole):
    (_, of_own), losses, metrics = whole[2](7)
    assert not any(map(np.any, jax.tree.leaves(of_own["terms"]["masked_patches"])))
    rest = 0.5 * metrics["image_text_loss"] + 2.0 * metrics["features_loss"]
    np.testing.assert_allclose(losses, rest, rtol=1e-6)
    assert not metrics["masked_patches_loss"].any() and metrics["features_loss"].all()


def test_terms_of_labels_and_of_a_guest_share_the_pass(made, monkeypatch):
    monkeypatch.setattr(objectives, "OBJECTIVES", dict(objectives.OBJECTIVES))
    load_config(str(GUEST))  # registers it
    student, batch = (
        model_of(0, pool="token", num_classes=3),
        made[3] | {"label": jnp.arange(4) % 3},
    )
    context = dataclasses.replace(made[1], model=student.config)
    given = (("supervised", {"loss": "sigmoid", "weight": 0.5}), ("uniformity", {"weight": 2.0}))
    whole = make((student, context), given, tokenizer="")
    assert (
        whole.needs_labels
        and whole.mixes
        and not whole.evaluates_with_modules
        and len(whole.shared) == 2
    )
    of_terms = dict(name="sum", terms=given)
    assert objectives.find_objective(ConfigDict(of_terms))[0] is type(whole)
    assert objectives.probabilities(ConfigDict(of_terms)) == "sigmoid"
    texts = make(made)
    assert (
        not texts.needs_labels and texts.evaluates_with_modules and texts.evaluator == "retrieval"
    )
    beside_masks = make((student, context), (given[0], "masked_patches"), tokenizer="")
    assert beside_masks.needs_labels and not beside_masks.mixes

    learner = Learner(student, whole.make_modules(nnx.Rngs(2)), None, jnp.int32(0))
    loss, metrics = whole(learner, batch | whole.targets(batch), nnx.Rngs(dropout=0))
    output = student(batch["image"])
    z, x = (np.asarray(a, np.float64) for a in (output.logits, output.features))
    signs = 2 * np.eye(3)[np.arange(4) % 3] - 1
    supervised = np.log1p(np.exp(-signs * z)).sum(1)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    near = np.exp(-2 * np.square(x[:, None] - x).sum(-1))
    uniformity = np.log((near.sum(1) - 1) / 3)
    np.testing.assert_allclose(metrics["supervised_loss"], supervised, rtol=1e-5)
    np.testing.assert_allclose(metrics["uniformity_loss"], uniformity, rtol=1e-4)
    np.testing.assert_allclose(loss, 0.5 * supervised + 2 * uniformity, rtol=1e-4)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """None."""


class Viewed(Objective):
    """A guest's term of several views, whose teacher is a moving average, with a count of its steps."""

    Options, needs_labels, mixes, needs_views = NoOptions, False, False, True

    def make_modules(self, rngs):
        return nnx.Dict(gain=nnx.Param(jnp.float32(2)), steps=nnx.Variable(jnp.int32(0)))

    def teacher(self):
        total = self.context.total_steps
        return MovingAverage(lambda step: 0.5 + step / (2 * total))

    def __call__(self, learner, batch, rngs):
        assert "image" not in batch
        assert sorted(self.context.views) == ["image_1", "image_2"]
        learner.modules["steps"][...] += 1
        views = (batch["image_1"].mean((1, 2, 3, 4)), batch["image_2"].mean((1, 2, 3, 4)))
        step = jnp.broadcast_to(learner.step, views[0].shape)
        teacher = learner.teacher.modules["gain"][...] * views[1]
        return learner.modules["gain"][...] * views[0] + teacher, {"step": step}


def test_a_term_of_several_views_waits_and_the_others_see_the_whole_image(made, monkeypatch):
    monkeypatch.setitem(objectives.OBJECTIVES, "viewed", Viewed)
    student, context, *_ = made
    shapes = {"image_0": (1, 16, 16, 3), "image_1": (2, 16, 16, 3), "image_2": (3, 8, 8, 3)}
    random = np.random.default_rng(1)
    views = {name: jnp.float32(random.normal(size=(4, *shape))) for name, shape in shapes.items()}
    context = dataclasses.replace(context, views=shapes, teachers=())
    terms = ("masked_patches", ("viewed", {"weight": 3.0, "start": "80%"}))
    whole = make((student, context), terms, tokenizer="")
    assert whole.needs_views and not whole.evaluates_with_modules and not whole.needs_labels
    # Until step 8 the average is the student; the two steps after that are all of its own.
    momentum = whole.teacher().momentum
    np.testing.assert_allclose([momentum(n) for n in (0, 7, 8, 9)], [0, 0, 0.5, 0.75])
    own = whole.make_modules(nnx.Rngs(2))
    average = Learner(student, own, None, jnp.int32(0))
    alone = make(made, terms[:1], tokenizer="")
    for step, started in ((7, 0), (9, 1)):
        learner = Learner(student, own, average, jnp.int32(step))
        loss, metrics = whole(learner, views, nnx.Rngs(dropout=0))
        of_term = own.terms["viewed"]["gain"][...] * sum(
            views[name].mean((1, 2, 3, 4)) for name in ("image_1", "image_2")
        )
        np.testing.assert_allclose(metrics["viewed_loss"], started * of_term, rtol=1e-6)
        assert metrics["viewed_step"].tolist() == [started] * 4
        assert own.terms["viewed"]["steps"][...] == started
        seen, _ = alone(learner, {"image": views["image_0"][:, 0]}, nnx.Rngs(dropout=0))
        np.testing.assert_allclose(loss, seen + 3 * started * of_term, rtol=1e-5)
    with pytest.raises(ConfigError, match="config.objective.view = 1"):
        make((student, context), terms, tokenizer="", view=1)


def test_dino_is_a_term_of_views(made):
    student, context, _, batch = made
    shapes = {"image_0": (1, 16, 16, 3), "image_1": (2, 16, 16, 3)}
    views = {name: jnp.zeros((4, *shape)) for name, shape in shapes.items()}
    context = dataclasses.replace(context, views=shapes, teachers=())
    options = dict(prototypes=8, head_hidden=8, bottleneck=4, start="80%", temperature_warmup="0%")
    options |= dict(frozen_prototypes="0 steps", mask_shares=(0.3, 0.6))
    whole = make((student, context), (TERMS[0], ("dino", options)))
    assert whole.needs_views and whole.evaluates_with_modules and whole.evaluator == "retrieval"
    own = whole.make_modules(nnx.Rngs(2))
    average = lambda student, own: Learner(student, own, None, jnp.int32(0))  # noqa: E731
    given = student, context, None, views | {"tokens": batch["tokens"]}
    metrics = traced_metrics(whole, own, given, average)
    assert {"image_text_loss", "dino_dino_loss", "dino_ibot_loss", "dino_teacher_entropy"} <= {
        *metrics
    }
    with pytest.raises(ConfigError, match="set gram_weight to 0"):
        make((student, context), (TERMS[0], ("dino", options | {"gram_weight": 1.0})))


def test_each_term_continues_from_a_sum_or_from_what_was_trained_alone(made):
    objective = make(made, TERMS[::2], tokenizer_digest="of these")
    like = registry.split(nnx.eval_shape(lambda: objective.make_modules(nnx.Rngs(0))))[1]
    saved = lambda kind, digest, weights: SavedObjective(  # noqa: E731
        kind, {"tokenizer_digest": digest}, lambda: weights
    )
    table = "terms/image_text/text/token_table"
    for digest, reset in (("of these", []), ("of others", [table])):
        taken, why = objective.continue_from(saved(TextSum, digest, like), like)
        assert list(why) == reset and "terms/masked_patches/mask" in taken, digest
        alone = Weights(like.params["terms"]["image_text"], {})
        taken, why = objective.continue_from(saved(ImageText, digest, alone), like)
        assert "terms/image_text/text/position" in taken and (table in why) == bool(reset)
        assert "objective is ImageText" in why["terms/masked_patches/mask"]
    others = Weights({"terms": {"masked_patches": like.params["terms"]["masked_patches"]}}, {})
    taken, why = objective.continue_from(saved(Sum, "", others), like)
    assert why[table] == "not in the checkpoint" and "terms/masked_patches/mask" in taken


class Followed(MaskedPatches):
    """A guest's term, whose teacher is a moving average of it."""

    def teacher(self):
        return MovingAverage(lambda step: 0.9)

    def __call__(self, learner, batch, rngs):
        assert learner.teacher.modules.mask.shape == learner.modules.mask.shape
        return super().__call__(learner, batch, rngs)


def test_a_term_has_its_part_of_a_moving_average(made, monkeypatch):
    monkeypatch.setitem(objectives.OBJECTIVES, "followed", Followed)
    whole = make(made, (TERMS[0], "followed"))
    assert whole.teacher().momentum(0) == 0.9
    average = lambda student, own: Learner(student, own, None, jnp.int32(0))  # noqa: E731
    own = nnx.eval_shape(lambda: whole.make_modules(nnx.Rngs(2)))
    assert traced_metrics(whole, own, made, average)
    with pytest.raises(ConfigError, match="beside which no other term"):
        make(made, (TERMS[1], "followed"), tokenizer="")


@pytest.mark.parametrize(
    "terms, options, message",
    [
        ((), {}, "needs terms"),
        (("masked_patches",), {}, "no term learns from texts"),
        (("image_text",), dict(tokenizer=""), "needs a tokenizer"),
        (("image_text", "image_text"), {}, "can be a term once"),
        (("image_txt",), {}, "'image_txt' is no objective"),
        (("supervised", "image_text"), {}, "which no data has together"),
        (("segmentation",), dict(tokenizer=""), "learns from masks"),
        (("dino", "masked_patches"), dict(tokenizer=""), "config.objective.view = 0"),
        ((("masked_patches", {"weight": -1}),), dict(tokenizer=""), "weight = -1"),
        ((("masked_patches", {"start": "late"}),), dict(tokenizer=""), "masked_patches: start"),
        ((("masked_patches", {"nosuch": 1}),), dict(tokenizer=""), "nosuch"),
        ((("image_text", {"text_length": 4}),), {}, "text_length is an option of the sum"),
    ],
)
def test_what_is_no_sum_is_refused(made, terms, options, message):
    with pytest.raises(ConfigError, match=message):
        make(made, terms, **options)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"start": "100%"}, "masked_patches starts at step 10, and the run has 10"),
        ({"start": "50 steps"}, "masked_patches starts at step 50"),
        ({"weight": 0}, r"all weights \(masked_patches\) are 0"),
    ],
)
def test_a_term_that_would_train_nothing_is_refused(made, given, message):
    sums = make(made, (("masked_patches", given),), tokenizer="")
    with pytest.raises(ConfigError, match=message):
        sums.check_effects()


def test_a_late_term_and_one_of_weight_0_beside_others_have_an_effect(made):
    terms = (("masked_patches", {"start": "90%"}), ("supervised", {"weight": 0}))
    make(made, terms, tokenizer="").check_effects()
