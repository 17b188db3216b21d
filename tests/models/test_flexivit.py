"""Kernels for patches of other sizes, and timm's FlexiViTs at several: beside float64 and timm's own resampling."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests import lazily, without_torchvision
from tests.data.test_patch_sizes import PUBLISHED
from tests.interchange.test_timm import randomize, save, their_logits
from tests.models import oracles
from vit_jax.models import patch_kernels, registry, resized
from vit_jax.models.embeddings import interpolate
from vit_jax.models.patch_kernels import resize_patch_embedding

torch = lazily.Package("torch")


@pytest.fixture(scope="module")
def timm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    without_torchvision.timm_models()
    return without_torchvision.imported("timm")


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize("new", [n for n in PUBLISHED if n >= 8])
def test_a_kernel_of_8_pixels_answers_enlarged_patches_exactly(new, method):
    """Those of float64, resized along both sides."""
    random = np.random.default_rng(0)
    patch, kernel = random.standard_normal((8, 8)), random.standard_normal((8, 8, 1, 4))
    resize = (
        patch_kernels.antialiased_cubic if method == "bicubic" else patch_kernels.half_pixel_linear
    )
    enlarged = resize(new, 8) @ patch @ resize(new, 8).T
    answers = np.einsum("pq,pqcd->d", enlarged, resize_patch_embedding(kernel, new, method=method))
    np.testing.assert_allclose(answers, np.einsum("pq,pqcd->d", patch, kernel), atol=1e-12, rtol=0)


@pytest.mark.parametrize("new", [30, 24, 15, 8])
def test_kernels_of_the_bicubic_rule_are_timms(timm, new):
    """In float64: rounded to float32 in between, as timm does, its own are up to 4e-6 from these."""
    from timm.layers import patch_embed

    kernel = np.random.default_rng(0).standard_normal((16, 16, 1, 2))
    matrix = patch_embed._compute_resize_matrix(
        (16, 16), (new, new), "bicubic", True, "cpu", torch.float64
    )
    expected = torch.linalg.pinv(matrix.T).numpy() @ kernel.reshape(256, -1)
    found = resize_patch_embedding(kernel, new, method="bicubic").reshape(expected.shape)
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)


def test_a_model_in_a_step_has_the_kernel_and_the_positions_of_one_fitted_on_the_host():
    config = registry.model_config(
        "ViT-mu/8", image_size=24, depth=1, width=32, heads=2, mlp_dim=64, num_classes=3
    )
    model = registry.build(config, rngs=nnx.Rngs(0))
    for patch in (4, 12):
        target = resized.config_at(config, 24, patch)
        fitted = resized.resized(model, config, target, resized.SCHEDULED)
        kernel = resize_patch_embedding(np.asarray(model.embedding.kernel[...]), patch)
        np.testing.assert_allclose(fitted.embedding.kernel[...], kernel, atol=1e-5)
        table = np.asarray(model.position[...])
        table = interpolate(table, target.grid, method="bilinear", prefix=1)
        np.testing.assert_allclose(fitted.position[...], table, atol=1e-6)


@pytest.mark.parametrize("patch", [48, 24, 16, 8])
def test_a_flexivit_of_timm_answers_at_each_patch_size_as_there(timm, tmp_path, patch):
    """A narrow one; resized there by timm's `set_input_size`."""
    sizes = dict(embed_dim=48, depth=1, num_heads=3, num_classes=5)
    model = randomize(timm.create_model("flexivit_small", **sizes))
    path = save(model, tmp_path / "small.safetensors")
    told = dict(
        heads=3, activation="gelu", position_of_class=False
    )  # by the name, at its own width
    options = dict(image_size=240, patch=patch, resize="bicubic")
    ours = vit_jax.load(path, **told, **options)
    model.set_input_size(img_size=240, patch_size=patch)
    x = np.random.default_rng(0).uniform(-1, 1, (2, 240, 240, 3)).astype(np.float32)
    expected = their_logits(model, x)
    assert expected.std() > 0.05
    oracles.assert_close(jax.jit(lambda m, x: m(x).logits)(ours, jnp.asarray(x)), expected)
