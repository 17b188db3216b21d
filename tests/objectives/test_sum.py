"""A weighted sum of objectives over one model."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base import durations
from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.models.vit import VisionTransformer
from vit_jax.objectives.contract import Learner, MovingAverage, ObjectiveContext, Teacher
from vit_jax.objectives.masked_patches import MaskedPatches
from vit_jax.objectives.sum.sum import Sum, SumOptions
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
    return registry.build(registry.model_config("ViT-S/16", **TINY | options), rngs=nnx.Rngs(seed))


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


def gradient(objective, made, own, *, step: int = 9):
    """Of the mean loss, by model and own parameters, float64; `own` is what the objective owns."""
    student, _, teachers, batch = made
    (definition, weights), (of_own, own_weights) = registry.split(student), registry.split(own)

    def loss(params, own_params):
        learner = Learner(
            nnx.merge(definition, params, weights.variables),
            nnx.merge(of_own, own_params, own_weights.variables),
            teachers,
            jnp.int32(step),
        )
        return objective(learner, batch, nnx.Rngs(dropout=5))[0].mean()

    grads = jax.jit(jax.grad(loss, (0, 1)))(weights.params, own_weights.params)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), grads)


def test_the_gradient_is_the_weighted_sum_of_each_terms_alone(made):
    whole = make(made)
    own = whole.own_modules(nnx.Rngs(2))
    of_sum, of_own = gradient(whole, made, own)
    key, total = nnx.Rngs(dropout=5), None
    for term in whole.terms:
        drawn = key.dropout()

        class Alone(type(term.objective)):
            """The term with the key that the sum gives it."""

            def __call__(self, learner, batch, rngs, drawn=drawn):
                return super().__call__(learner, batch, nnx.Rngs(dropout=drawn))

        alone = Alone(term.objective.options, term.objective.context)
        grads, own_grads = gradient(alone, made, own.terms[term.name])
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
    student, _, teachers, batch = made
    whole = make(made, (TERMS[0], ("features", TERMS[1][1] | {"adaptor": "ladder"})))
    own = whole.own_modules(nnx.Rngs(2))
    calls.clear()
    learner = Learner(student, own, teachers, jnp.int32(0))
    _, metrics = whole(learner, batch, nnx.Rngs(dropout=0))
    assert calls.count(student.config) == 1 and len(calls) == 2  # and the teacher once
    assert {"image_text_loss", "image_text_cosine", "features_loss", "features_cosine_0"} <= {
        *metrics
    }
    alone = [term.objective.flops() for term in whole.terms]
    assert whole.flops() == sum(alone) - registry.count_flops(student.config)


def test_a_term_that_has_not_begun_changes_nothing(made):
    whole = make(made)
    own = whole.own_modules(nnx.Rngs(2))
    _, of_own = gradient(whole, made, own, step=7)
    assert not any(map(np.any, jax.tree.leaves(of_own["terms"]["masked_patches"])))
    student, _, teachers, batch = made
    learner = Learner(student, own, teachers, jnp.int32(7))
    loss, metrics = whole(learner, batch, nnx.Rngs(dropout=0))
    rest = 0.5 * metrics["image_text_loss"] + 2.0 * metrics["features_loss"]
    np.testing.assert_allclose(loss, rest, rtol=1e-6)
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
    assert whole.needs_labels and whole.mixes and not whole.own_judged and len(whole.shared) == 2
    of_terms = dict(name="sum", terms=given)
    assert objectives.find_objective(ConfigDict(of_terms))[0] is type(whole)
    assert objectives.probabilities(ConfigDict(of_terms)) == "sigmoid"
    texts = make(made)
    assert not texts.needs_labels and texts.own_judged and texts.evaluator == "retrieval"
    beside_masks = make((student, context), (given[0], "masked_patches"), tokenizer="")
    assert beside_masks.needs_labels and not beside_masks.mixes

    learner = Learner(student, whole.own_modules(nnx.Rngs(2)), None, jnp.int32(0))
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


class Followed(MaskedPatches):
    """A guest's term, whose teacher is a moving average of it."""

    def teacher(self):
        return MovingAverage(lambda step: 0.9)

    def __call__(self, learner, batch, rngs):
        assert learner.teacher.own.mask.shape == learner.own.mask.shape
        return super().__call__(learner, batch, rngs)


def test_a_term_has_its_part_of_a_moving_average(made, monkeypatch):
    monkeypatch.setitem(objectives.OBJECTIVES, "followed", Followed)
    student, *_, batch = made
    whole = make(made, (TERMS[0], "followed"))
    assert whole.teacher().momentum(0) == 0.9
    own = whole.own_modules(nnx.Rngs(2))
    average = Learner(student, own, None, jnp.int32(0))
    whole(Learner(student, own, average, jnp.int32(0)), batch, nnx.Rngs(dropout=0))
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
        (("dino",), dict(tokenizer=""), "several views"),
        ((("masked_patches", {"weight": -1}),), dict(tokenizer=""), "weight = -1"),
        ((("masked_patches", {"start": "late"}),), dict(tokenizer=""), "masked_patches: start"),
        ((("masked_patches", {"nosuch": 1}),), dict(tokenizer=""), "nosuch"),
        ((("image_text", {"text_length": 4}),), {}, "text_length is an option of the sum"),
    ],
)
def test_what_is_no_sum_is_refused(made, terms, options, message):
    with pytest.raises(ConfigError, match=message):
        make(made, terms, **options)
