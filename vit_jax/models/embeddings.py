"""From images to tokens: patch embedding, position embeddings, and the interpolation of images and positions."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.compute.dense import dense
from vit_jax.compute.learned import per_example
from vit_jax.models.contract import PatchBatch

METHODS = ("scipy", "bilinear", "bicubic", "torch", "dinov2")  # of `interpolate`


class PatchEmbedding(nnx.Module):
    """Non-overlapping patches, each mapped linearly to a token (ViT Eq. 1).

    `kernel` (P, P, C, D) is laid out as the convolution of the published checkpoints, but used as one matrix product.
    """

    def __init__(
        self,
        patch: int,
        channels: int,
        width: int,
        *,
        bias: bool = True,
        crop: bool = False,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        # Flax's convolution default, as the official code has it.
        init = nnx.initializers.lecun_normal(in_axis=(0, 1, 2), out_axis=3)
        self.kernel = nnx.Param(init(rngs.params(), (patch, patch, channels, width)))
        self.bias = nnx.Param(jnp.zeros((width,))) if bias else None
        self.dtype, self.crop = dtype, crop

    def __call__(self, images: jax.Array | PatchBatch) -> jax.Array:
        """images (B, H, W, C) -> tokens (B, H/P · W/P, D), row by row; with `crop` rounded down. Of a `PatchBatch`
        (B, N, D).
        """
        patch = self.kernel.shape[0]
        if isinstance(images, PatchBatch):
            return self.embed(images.patches)
        if self.crop:
            images = images[
                :, : images.shape[1] // patch * patch, : images.shape[2] // patch * patch
            ]
        _, h, w, _ = images.shape
        if h % patch or w % patch:
            raise ValueError(f"images of {h}x{w} cannot be split into patches of {patch}x{patch}")
        return self.embed(cut_patches(images.astype(self.dtype), (h // patch, w // patch)))

    def embed(self, patches: jax.Array) -> jax.Array:
        """Patches (B, N, P * P * C), as `cut_patches` gives them -> tokens (B, N, D)."""
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        return dense(patches.astype(self.dtype), kernel.reshape(-1, kernel.shape[-1]), bias)


def flops(config) -> int:
    """Operations of the patch embedding of one image, a multiply-add counted as 2.

    Args:
      config: of a family with patches.
    """
    rows, columns = config.grid
    return 2 * rows * columns * config.patch**2 * config.channels * config.width


def cut_patches(images: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """Images (B, H, W, C) as the patches of a grid, row by row: (B, rows * columns, H/rows * W/columns * C), a patch's
    pixels row by row, their channels last.
    """
    b, height, width, channels = images.shape
    (rows, columns), (h, w) = grid, (height // grid[0], width // grid[1])
    cut = images.reshape(b, rows, h, columns, w, channels)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, h * w * channels)


def draw_position(shape: tuple[int, ...], rngs: nnx.Rngs) -> nnx.Param:
    """Learned positions as they begin: normal with 0.02."""
    return nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))


def prepend(learned: list[jax.Array], x: jax.Array) -> jax.Array:
    """Learned tokens (1, n, D), the same for every example, before x (B, N, D)."""
    batch = x.shape[0]
    tokens = [jnp.broadcast_to(per_example(t, batch), (batch, *t.shape[1:])) for t in learned]
    return jnp.concatenate([*tokens, x], axis=1)


class ConvolutionalStem(nnx.Module):
    """Convolutions `conv1`, `conv2`, … with ReLUs between them, from images to tokens."""

    def __init__(
        self, channels: int, layers: list[tuple[int, int, int, int]], *, dtype, rngs: nnx.Rngs
    ):
        """`layers` are (output channels, side of the kernel, stride, zeros around) of each."""
        self.names = [f"conv{i + 1}" for i in range(len(layers))]
        for name, (outputs, side, stride, padding) in zip(self.names, layers, strict=True):
            window = dict(kernel_size=(side, side), strides=stride, padding=padding)
            setattr(self, name, nnx.Conv(channels, outputs, **window, dtype=dtype, rngs=rngs))
            channels = outputs

    def __call__(self, images: jax.Array) -> jax.Array:
        """images (B, H, W, C) -> tokens (B, N, D), row by row."""
        first, *others = (getattr(self, name) for name in self.names)
        x = first(images)
        for layer in others:
            x = layer(nnx.relu(x))
        return x.reshape(x.shape[0], -1, x.shape[-1])


def resize_images(images: jax.Array, new: tuple[int, int]) -> jax.Array:
    """Resizes images (B, H, W, C) to (height, width) `new` as PyTorch's bicubic `interpolate` does: no
    antialiasing, half-pixel centres, repeated borders, Keys' kernel with a = -0.75.
    """
    if images.shape[1:3] == new:
        return images
    rows, columns = (_bicubic(*sides) for sides in zip(new, images.shape[1:3], strict=True))
    # Accelerators round the operands of products by default.
    exact = jax.lax.Precision.HIGHEST
    x = jnp.einsum("xw,bhwc->bhxc", columns, images.astype(jnp.float32), precision=exact)
    return jnp.einsum("yh,bhxc->byxc", rows, x, precision=exact)


def sincos_2d(
    grid: tuple[int, int], width: int, temperature: float = 10_000.0, periods: int | None = None
) -> np.ndarray:
    """Fixed 2-D sine-cosine position embedding (1, h·w, D) float32 of MoCo v3, as in arXiv 2205.01580 and big_vision.

    A quarter of the channels each: sin x·ω, cos x·ω, sin y·ω, cos y·ω with ω_k = temperature^(−k / periods);
    `periods` is D/4 − 1, and D/4 in MAE.
    """
    if width % 4 or width < 8:
        raise ValueError(
            f"2-D sine-cosine position embeddings need a width of 8 or more that 4 divides, not {width}"
        )
    y, x = (axis.ravel() for axis in np.mgrid[: grid[0], : grid[1]])
    omega = temperature ** (-np.arange(width // 4) / (periods or width // 4 - 1))
    return sines(y, x, omega)[None].astype(np.float32)


def sines(rows, columns, omega: np.ndarray):
    """Sines and cosines of columns and rows (…, N), arrays of JAX or NumPy, as in `sincos_2d`: (…, N, D)."""
    xp = np if isinstance(rows, np.ndarray) else jnp
    y, x = (axis[..., None] * omega for axis in (rows, columns))
    return xp.concatenate([xp.sin(x), xp.cos(x), xp.sin(y), xp.cos(y)], axis=-1)


def spread_sincos_2d(
    grid: tuple[int, int], width: int, places: tuple[int, int] | None
) -> np.ndarray:
    """`sincos_2d` of the grid `places` spread over `grid`, as a learned table would be; `None`: that of `grid`."""
    table = sincos_2d(places or grid, width)
    return interpolate(table, grid, method="bilinear", old_grid=places or grid)


def sinusoids(rows: int, width: int) -> np.ndarray:
    """Fixed position embedding (1, rows, D) float32 over the row number (arXiv 1706.03762 §3.5): of a
    pair of channels 2i, 2i + 1 the sine and the cosine of row / 10000^(2i / D).
    """
    angles = np.arange(rows)[:, None] / 10_000 ** (np.arange(width) // 2 * 2 / width)
    table = np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles))
    return table[None].astype(np.float32)


def interpolate(
    table: np.ndarray,
    new_grid: tuple[int, int],
    *,
    method: str = "scipy",
    prefix: int = 0,
    old_grid: tuple[int, int] | None = None,
) -> np.ndarray:
    """Position embeddings for another resolution (ViT §3.2, "Fine-tuning and higher resolution").

    Args:
      table: (1, prefix + h·w, D) position embeddings, rows for class or register tokens first.
      new_grid: (h, w) in patches.
      method: `scipy`: linear between corner-aligned grid points, as the official code's scipy.ndimage.zoom(order=1).
        For some sizes (28 to 14, 15 to 30) SciPy's rounding steps off the grid and zeroes the last row and column;
        here it does not.
        `bilinear`, `bicubic`: half-pixel centres with antialiasing, what timm and big_vision's NaFlex do.
        `torch`: bicubic by PyTorch without antialiasing, what transformers does; `dinov2`: the same with DINOv2's
        scale factor, (new + 0.1) / old, which its models without registers were published with.
      prefix: rows kept as they are.
      old_grid: (h, w) of the table; by default square.

    Returns:
      (1, prefix + new h · new w, D) in the dtype of `table`.

    Raises:
      ValueError: unknown method, or `table` is not `prefix` rows and an old grid.
    """
    if method not in METHODS:
        raise ValueError(
            f"position embeddings cannot be resized by {method!r}; known: {', '.join(METHODS)}"
        )
    rows = table.shape[1] - prefix
    side = round(rows**0.5)
    old_grid = tuple(old_grid or (side, side))
    if table.shape[0] != 1 or old_grid[0] * old_grid[1] != rows:
        grid = "x".join(map(str, old_grid))
        raise ValueError(
            f"position embedding {table.shape} with {prefix} extra rows is no {grid} grid: give old_grid"
        )
    if old_grid == tuple(new_grid):
        return table
    width = table.shape[-1]
    kept, grid = table[:, :prefix], table[0, prefix:].reshape(*old_grid, width)
    if method == "scipy":
        grid = np.einsum(
            "yh,xw,hwd->yxd", *map(corner_aligned, new_grid, old_grid), grid.astype(np.float64)
        )
    elif method in ("torch", "dinov2"):
        offset = 0.1 if method == "dinov2" else 0.0
        sides = zip(new_grid, old_grid, strict=True)
        matrices = [pytorch_cubic(new, old, old / (new + offset)) for new, old in sides]
        # One side after the other: both at once take minutes for the matrices of `resized` between large grids.
        grid = np.einsum("yh,xw,hwd->yxd", *matrices, grid.astype(np.float64), optimize=True)
    elif method == "bilinear":
        matrices = map(antialiased_linear, new_grid, old_grid)
        grid = np.einsum("yh,xw,hwd->yxd", *matrices, grid.astype(np.float64), optimize=True)
    else:
        shape = (*new_grid, width)
        grid = jax.image.resize(grid, shape, "cubic", antialias=True)
    grid = np.asarray(grid, table.dtype).reshape(1, -1, width)
    return np.concatenate([kept, grid], axis=1)


def antialiased_linear(new: int, old: int) -> np.ndarray:
    """(new, old) float64 weights of linear interpolation at half-pixel centres, each a mean over all old points that
    it covers where there are fewer new ones.
    """
    at = (np.arange(new) + 0.5) * old / new - 0.5
    weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)) / max(old / new, 1))
    return weights / weights.sum(1, keepdims=True)


def pytorch_cubic(new: int, old: int, step: float) -> np.ndarray:
    """(new, old) float64: PyTorch's bicubic interpolation of a side, without antialiasing: Keys' cubic with
    a = -3/4 through the four nearest points, those at the border repeated.

    Args:
      step: from one new point to the next, in old ones.
    """
    places = (np.arange(new) + 0.5) * step - 0.5
    first = np.floor(places).astype(int) - 1
    matrix = np.zeros((new, old))
    for i in range(4):
        distance, a = np.abs(places - (first + i)), -0.75
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        columns = np.clip(first + i, 0, old - 1)
        np.add.at(matrix, (np.arange(new), columns), np.where(distance <= 1, near, far))
    return matrix


def _bicubic(new: int, old: int) -> np.ndarray:
    """(new, old) weights of `resize_images` along an axis."""
    at = (np.arange(new) + 0.5) * old / new - 0.5
    weights = np.zeros((new, old))
    for tap in range(-1, 3):
        pixel = np.floor(at).astype(int) + tap
        x = np.abs(at - pixel)
        near, far = 1.25 * x**3 - 2.25 * x**2 + 1, -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
        np.add.at(weights, (np.arange(new), pixel.clip(0, old - 1)), np.where(x <= 1, near, far))
    return weights.astype(np.float32)


def corner_aligned(new: int, old: int) -> np.ndarray:
    """(new, old) weights of linear interpolation at `new` points spread evenly from the first to the last of `old`."""
    at = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)))
