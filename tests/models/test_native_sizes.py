"""Images of sizes of their own in a padded batch: positions against PyTorch's and big_vision's, and an image alone
against the same one among others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import lazily
from tests.models.conftest import parameters
from tests.repeats import slow_unless
from vit_jax.base.errors import ConfigError
from vit_jax.models import native_sizes, registry
from vit_jax.models.contract import PatchBatch
from vit_jax.models.embeddings import cut_patches

torch = lazily.Package("torch")

GRIDS = [(16, 16), (13, 19), (8, 32), (40, 25), (5, 51), (64, 4)]
TINY = dict(
    image_size=(12, 16), patch=4, depth=2, width=16, heads=2, mlp_dim=32, num_classes=5, unroll=1, head_init="normal",
)  # fmt: skip
MODELS = {
    "the paper's": {},
    "mean of patches": dict(
        pool="mean", registers=4, last_norm="pooled", layer_scale="all", native_resize="bicubic", native_aspect=True
    ),
    "attention pooling": dict(pool="map", position="factorized", native_resize="linear"),
    "rotated": dict(
        position="sincos2d", pool="token_mean", rope="axial", rope_grid=(3, 2), rope_registers=100.0, registers=4
    ),
    "learned rotation": dict(pool="gem", position="learned2d", rope="mixed"),
    "centred": dict(position="none", rope="centred", distilled=True, parallel=True),
}  # fmt: skip
SLOW = ("learned rotation", "rotated", "centred")  # Others cover most of their parts.


def padded(images, grids, patch, tokens):
    """A batch whose padding is no zeros, which must not be seen."""
    rows = [cut_patches(x[None], grid)[0] for x, grid in zip(images, grids, strict=True)]
    rows = [np.pad(x, ((0, tokens - len(x)), (0, 0)), constant_values=3.0) for x in rows]
    return PatchBatch(jnp.asarray(np.stack(rows)), jnp.asarray(grids, jnp.int32))


def draw(grids, patch=4):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((patch * r, patch * c, 3)).astype(np.float32) for r, c in grids]


@pytest.mark.parametrize("method", ["bilinear", "bicubic", "linear"])
def test_positions_are_those_that_pytorch_resizes_for_each_image(method):
    config = registry.model_config("ViT-mu/16", image_size=256, native_resize=method)
    table = np.random.default_rng(0).standard_normal((16, 16, 8)).astype(np.float32)
    tokens = max(r * c for r, c in GRIDS)
    batch = PatchBatch(jnp.zeros((len(GRIDS), tokens, 1)), jnp.asarray(GRIDS, jnp.int32))
    positions = jax.jit(lambda t: native_sizes.resized_table(t, batch, config))
    found = np.asarray(positions(table.reshape(1, 256, 8)))
    stored = torch.tensor(table).permute(2, 0, 1)[None]
    options = dict(
        mode="bicubic" if method == "bicubic" else "bilinear", antialias=method != "linear"
    )
    # big_vision's way, which ends at 64 patches a side.
    resized = lambda scale: jax.image.scale_and_translate(  # noqa: E731
        table, (64, 64, 8), (0, 1), scale, jnp.zeros(2), "bilinear", antialias=True
    )
    scales = np.asarray(GRIDS, np.float32) / 16
    theirs = np.asarray(jax.jit(jax.vmap(resized))(scales)) if method == "bilinear" else ()
    for i, (rows, columns) in enumerate(GRIDS):
        one = found[i, : rows * columns].reshape(rows, columns, 8)
        options = dict(align_corners=False, antialias=method != "linear")
        mode = "bicubic" if method == "bicubic" else "bilinear"
        expected = torch.nn.functional.interpolate(stored, (rows, columns), mode=mode, **options)
        assert np.abs(one - expected[0].permute(1, 2, 0).numpy()).max() <= 5e-6
        if len(theirs):
            assert np.abs(one - theirs[i, :rows, :columns]).max() <= 5e-6


@pytest.mark.parametrize("name", slow_unless([n for n in MODELS if n not in SLOW], MODELS))
def test_an_image_alone_is_what_it_is_among_others(name):
    grids = [(2, 6), (3, 4), (1, 5)]
    images = draw(grids)
    config = registry.model_config("ViT-B/16", **TINY | MODELS[name])
    definition, weights = registry.abstract(config)[0], parameters(config)
    factors = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    factors[2] = 0  # It is only there.

    @jax.jit
    def results(params, batch, factors):
        def loss(params):
            output = nnx.merge(definition, params, {})(batch)
            return (output.logits * factors).sum(), output

        return jax.grad(loss, has_aux=True)(params)

    def results_in_numpy(*arguments):
        gradient, output = results(weights, *arguments)
        return jax.device_get(gradient), jax.device_get(output)

    gradient, together = results_in_numpy(padded(images, grids, 4, 15), factors)
    total = jax.tree.map(np.zeros_like, gradient)
    for i in (0, 1):
        batch = padded(images[i : i + 1], grids[i : i + 1], 4, 12)
        one, output = results_in_numpy(batch, factors[i : i + 1])
        total = jax.tree.map(np.add, total, one)
        count = output.tokens.shape[1]
        np.testing.assert_allclose(output.logits[0], together.logits[i], atol=1e-5)
        np.testing.assert_allclose(output.tokens[0], together.tokens[i, :count], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), total, gradient)
    if name == "attention pooling":
        fixed = jax.jit(lambda x: nnx.merge(definition, weights, {})(x).logits)(images[1][None])
        np.testing.assert_allclose(fixed[0], together.logits[1], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Mixer-S/16", {}, "MLPs over tokens"),
        ("R+ViT-Ti/16", {}, "ResNet's map"),
        ("T2T-ViT-7", {}, "patches overlap"),
        ("DeepViT-16", {}, "whole grid"),
        ("ViT-Ti/16", dict(position="relative"), "model.position_at=auto"),
        ("ViT-Ti/16", dict(channels=1), "patches of 768 values given to a model for 256"),
    ],
)
def test_a_family_that_needs_its_own_size_gives_the_reason(name, options, reason):
    config = registry.model_config(name, image_size=224, **options)
    batch = PatchBatch(jnp.zeros((1, 12, 768)), jnp.asarray([[3, 4]], jnp.int32))
    definition, weights = registry.abstract_weights(config)
    with pytest.raises((ConfigError, ValueError), match=reason):
        jax.eval_shape(lambda weights: nnx.merge(definition, *weights)(batch), weights)
