"""Patches, sine-cosine positions and interpolation against PyTorch, SciPy and loops over the formulas."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from flax import nnx

from vit_jax.models.embeddings import PatchEmbedding, interpolate, sincos_2d

GRIDS = [(7, 12), (14, 24), (14, 7), (16, 10), (24, 14), (1, 3), (5, 1)]


def table(rows, width=4, seed=0):
    return np.random.default_rng(seed).standard_normal((1, rows, width)).astype(np.float32)


def test_patches_are_a_convolution_with_stride_and_kernel_alike():
    torch = pytest.importorskip("torch")
    layer = PatchEmbedding(4, 3, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(5.0)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 8, 12, 3)).astype(np.float32)
    kernel = torch.from_numpy(np.asarray(layer.kernel, np.float64)).permute(3, 2, 0, 1)
    pixels = torch.from_numpy(images.astype(np.float64)).permute(0, 3, 1, 2)
    expected = torch.nn.functional.conv2d(
        pixels, kernel, torch.arange(5.0, dtype=torch.float64), stride=4
    )
    np.testing.assert_allclose(layer(images), expected.flatten(2).transpose(1, 2), atol=2e-6)


def test_images_that_patches_do_not_divide_are_an_error():
    layer = PatchEmbedding(4, 3, 5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="images of 8x10 cannot be split into patches of 4x4"):
        layer(np.zeros((1, 8, 10, 3)))


def test_sincos_is_its_formula_on_a_grid_that_is_not_square():
    """[sin x w, cos x w, sin y w, cos y w], w_k = 10000^(-k / (D/4 - 1)), rows of patches first (formats §1)."""
    width, quarter = 16, 4
    expected = np.zeros((2 * 3, width))
    for y in range(2):
        for x in range(3):
            for k in range(quarter):
                w = 10_000 ** (-k / (quarter - 1))
                values = np.sin(x * w), np.cos(x * w), np.sin(y * w), np.cos(y * w)
                expected[y * 3 + x, k::quarter] = values
    result = sincos_2d((2, 3), width)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result[0], expected, atol=1e-7)


@pytest.mark.parametrize("width", [4, 10])
def test_sincos_needs_a_width_that_four_divides(width):
    with pytest.raises(ValueError, match=f"not {width}"):
        sincos_2d((2, 2), width)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_scipy_is_zoom_of_order_one(old, new):
    before = table(old * old)
    expected = scipy.ndimage.zoom(before.reshape(old, old, -1), (new / old, new / old, 1), order=1)
    np.testing.assert_allclose(
        interpolate(before, (new, new)), expected.reshape(1, new * new, -1), atol=1e-6
    )


def test_scipy_keeps_the_last_row_where_zoom_loses_it_to_rounding():
    before = np.ones((1, 28 * 28, 1), np.float32)
    zoomed = scipy.ndimage.zoom(before.reshape(28, 28), 14 / 28, order=1)
    assert (
        zoomed[-1].max() == 0
    )  # What is not copied; if this fails, SciPy was mended: drop the note in `interpolate`.
    np.testing.assert_allclose(interpolate(before, (14, 14)), 1, atol=1e-6)


@pytest.mark.parametrize("grids", ["7_12", "14_24", "14_7", "16_10", "24_14", "12_32"])
def test_scipy_is_what_the_official_loader_does(shared_data, grids):
    oracle = np.load(shared_data / "oracle" / "posemb_resize.io.npz")
    side = int(grids.split("_")[1])
    resized = interpolate(oracle[f"{grids}/in"], (side, side), prefix=1)
    np.testing.assert_allclose(resized, oracle[f"{grids}/out"], atol=1e-6)


@pytest.mark.parametrize("method", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("old", "new"), [*(((a, a), (b, b)) for a, b in GRIDS), ((6, 4), (9, 5)), ((6, 4), (3, 7))]
)
def test_bilinear_and_bicubic_are_antialiased_as_in_torch_up_to_the_edges(method, old, new):
    torch = pytest.importorskip("torch")
    before = table(old[0] * old[1])
    pixels = torch.from_numpy(before).reshape(1, *old, -1).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(
        pixels, size=new, mode=method, antialias=True, align_corners=False
    )
    resized = interpolate(before, new, method=method, old_grid=old)
    # Values of size 1, both sides in float32; the largest difference seen is 1.5e-6.
    np.testing.assert_allclose(resized[0], expected[0].flatten(1).T, atol=4e-6)


def test_a_grid_that_is_not_square_is_interpolated_along_each_axis():
    y, x = np.mgrid[:3, :5].astype(np.float32)
    before = np.stack([y / 2, x / 4], axis=-1).reshape(1, 15, 2)
    after = interpolate(before, (7, 2), old_grid=(3, 5))
    y, x = np.meshgrid(np.linspace(0, 1, 7), np.linspace(0, 1, 2), indexing="ij")
    np.testing.assert_allclose(after[0], np.stack([y.ravel(), x.ravel()], axis=-1), atol=1e-6)


@pytest.mark.parametrize("method", ["scipy", "bilinear", "bicubic"])
def test_prefix_rows_and_type_are_kept(method):
    before = table(2 + 9).astype(jnp.bfloat16)
    after = interpolate(before, (5, 4), method=method, prefix=2)
    assert after.shape == (1, 2 + 20, 4) and after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(after[:, :2], before[:, :2])


def test_the_same_grid_is_left_alone():
    before = table(1 + 12)
    np.testing.assert_array_equal(
        interpolate(before, [3, 4], prefix=1, old_grid=[3, 4], method="bicubic"), before
    )


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (10, {}, "is no 3x3 grid: give old_grid"),
        (9, {"prefix": 1}, "with 1 extra rows"),
        (9, {"old_grid": (2, 4)}, "is no 2x4 grid"),
        (
            9,
            {"method": "nearest"},
            "cannot be resized by 'nearest'; known: scipy, bilinear, bicubic",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(rows, options, words):
    with pytest.raises(ValueError, match=words):
        interpolate(table(rows), (6, 6), **options)


def test_two_tables_at_once_are_an_error_rather_than_one_lost():
    with pytest.raises(ValueError, match=r"\(2, 9, 4\)"):
        interpolate(np.repeat(table(9), 2, axis=0), (6, 6))
