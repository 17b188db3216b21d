"""Masked patch prediction against its description in the ViT paper, in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.objectives.contract import Learner, ObjectiveContext
from vit_jax.objectives.masked_patches import (
    MaskedPatches,
    MaskedPatchesOptions,
    corrupt,
    mean_colors,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def made(target="mean_color", corrupted=0.5, **model):
    options = {"image_size": 32, "num_classes": 0} | model
    config = registry.model_config("ViT-mu/8", **options)
    context = ObjectiveContext(config, MEAN, STD, 10, int)
    return MaskedPatches(MaskedPatchesOptions(target, corrupted), context), config


def test_half_of_the_patches_are_corrupted_80_10_10():
    patches = jax.random.normal(jax.random.key(1), (64, 100, 3))
    mask = jnp.full(3, 7.0)
    chosen, out = jax.jit(lambda k: corrupt(patches, mask, k, count=50))(jax.random.key(0))
    chosen, out, patches = map(np.asarray, (chosen, out, patches))
    assert all(len(set(row)) == 50 for row in chosen)
    hit = np.zeros((64, 100), bool)
    np.put_along_axis(hit, chosen, True, axis=1)
    np.testing.assert_array_equal(out[~hit], patches[~hit])
    is_mask = (out == 7).all(-1)
    same = (out == patches).all(-1)
    shares = [x[hit].mean() for x in (is_mask, same, ~is_mask & ~same)]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.02)
    # The others are patches of the same image, and not the patch itself.
    for b, n in np.argwhere(hit & ~is_mask & ~same)[:50]:
        assert (patches[b] == out[b, n]).all(-1).any()


@pytest.mark.parametrize("parts", [1, 4])
def test_colors_have_three_bits_a_channel(parts):
    pixels = np.random.default_rng(0).random((2, 3, 8, 8, 3), np.float32)
    pixels[0, 0] = 1.0
    side = 8 // parts
    expected = np.empty((2, 3, parts**2), int)
    for index in np.ndindex(2, 3, parts, parts):
        b, n, y, x = index
        part = pixels[b, n, y * side : (y + 1) * side, x * side : (x + 1) * side]
        red, green, blue = np.minimum((part.astype(np.float64).mean((0, 1)) * 8).astype(int), 7)
        expected[b, n, y * parts + x] = red * 64 + green * 8 + blue
    np.testing.assert_array_equal(mean_colors(jnp.asarray(pixels), parts), expected)
    assert expected[0, 0, 0] == 511


@pytest.mark.parametrize("target", ["mean_color", "downsized", "full"])
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_the_loss_is_that_of_the_corrupted_patches_alone(target, pool):
    objective, config = made(target, pool=pool)
    model = registry.build(config, rngs=nnx.Rngs(0))
    own = objective.make_modules(nnx.Rngs(1))
    pixels = np.random.default_rng(2).random((3, 32, 32, 3))
    images = jnp.asarray((pixels - MEAN) / STD, jnp.float32)
    rngs = nnx.Rngs(dropout=5)
    loss, metrics = objective(Learner(model, own, None, 0), {"image": images}, rngs)
    chosen, x = corrupt(
        model.patches(images), own.mask[...], nnx.Rngs(dropout=5).dropout(), count=8
    )
    tokens = model.encode(model.add_positions(x))[0][:, -16:]
    said = np.asarray(own.head(tokens), np.float64)
    expected, right = [], []
    for b in range(3):
        losses = []
        for n in map(int, chosen[b]):
            y, x = divmod(n, 4)
            patch = pixels[b, y * 8 : y * 8 + 8, x * 8 : x * 8 + 8]
            if target == "full":
                losses.append(np.mean((said[b, n] - patch.ravel()) ** 2))
                continue
            parts = 1 if target == "mean_color" else 4
            colors = np.asarray(mean_colors(jnp.asarray(patch[None, None], jnp.float32), parts))[
                0, 0
            ]
            logits = said[b, n].reshape(parts**2, 512)
            logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            losses.append(-np.mean(logs[np.arange(parts**2), colors]))
            right += list(logits.argmax(-1) == colors)
        expected.append(np.mean(losses))
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    if right:
        np.testing.assert_allclose(np.mean(metrics["accuracy"]), np.mean(right), atol=1e-6)


def test_every_parameter_of_model_and_objective_learns():
    objective, config = made()
    definition, weights = registry.split(registry.build(config, rngs=nnx.Rngs(0)))
    own_definition, own = registry.split(objective.make_modules(nnx.Rngs(1)))
    images = jax.random.normal(jax.random.key(0), (4, 32, 32, 3))

    def loss(params):
        learner = Learner(
            nnx.merge(definition, params["model"]),
            nnx.merge(own_definition, params["own"]),
            None,
            0,
        )
        return objective(learner, {"image": images}, nnx.Rngs(dropout=0))[0].mean()

    grads = jax.jit(jax.grad(loss))({"model": weights.params, "own": own.params})
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corrupted": 0.01}, "of 16 patches leaves 16 to see and 0 to predict"),
        ({"corrupted": 0.99}, "leaves 0 to see and 16 to predict"),
        ({"target": "downsized", "patch": 2, "image_size": 8}, "patches of 2 x 2 pixels cannot be"),
    ],
)
def test_what_leaves_nothing_to_see_or_predict_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_only_models_of_patches_can_learn_so():
    objective, _ = made()
    with pytest.raises(ConfigError, match="needs a model of patches"):
        MaskedPatches(
            objective.options,
            dataclasses.replace(objective.context, model=registry.model_config("BiT-R50x1")),
        )


def test_it_costs_the_encoder_and_the_predictions():
    objective, config = made("full")
    assert objective.flops() == config.flops() + 2 * 8 * config.width * 8 * 8 * 3
