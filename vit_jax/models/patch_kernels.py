"""The kernel of a patch embedding for patches of other sizes. Positions for other grids are in `embeddings`."""

import numpy as np


def resize_patch_embedding(
    kernel: np.ndarray, new_patch: int | tuple[int, int], *, method: str = "bilinear"
) -> np.ndarray:
    """The patch embedding for patches of another size (FlexiViT, arXiv 2212.08013 §3.4, "pseudo-inverse resize").

    Of all kernels it is the one whose products with patches resized from the old size to the new come nearest to those
    of the old kernel with the old patches; to larger patches they are equal. Never resize what was resized: start from
    the original.

    Args:
      kernel: (P, Q, C, D).
      new_patch: height and width, or one number for both.
      method: how patches are resized, see `patch_matrix`.

    Returns:
      (p, q, C, D) in the dtype of `kernel`, computed in float64.
    """
    new = (new_patch, new_patch) if isinstance(new_patch, int) else tuple(new_patch)
    if new == kernel.shape[:2]:
        return kernel
    # The resize acts on rows and columns apart, and so does its pseudo-inverse.
    rows, columns = (
        patch_matrix(n, old, method) for n, old in zip(new, kernel.shape[:2], strict=True)
    )
    return np.einsum(
        "pP,qQ,PQcd->pqcd", rows, columns, kernel.astype(np.float64), optimize=True
    ).astype(kernel.dtype)


def patch_matrix(new: int, old: int, method: str) -> np.ndarray:
    """(new, old) float64: what `resize_patch_embedding` multiplies a side of a kernel by.

    Args:
      method: of `embeddings.interpolate`. With `bicubic` patches are resized by it with antialiasing, as timm does;
        with all others bilinearly without, as big_vision does.
    """
    resize = antialiased_cubic if method == "bicubic" else half_pixel_linear
    return np.linalg.pinv(resize(new, old).T)


def antialiased_cubic(new: int, old: int) -> np.ndarray:
    """(new, old) float64 weights as `embeddings.antialiased_linear`, of Keys' cubic with a = -1/2."""
    at = (np.arange(new) + 0.5) * old / new - 0.5
    x = np.abs(at[:, None] - np.arange(old)) / max(old / new, 1)
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * (x**3 - 5 * x**2 + 8 * x - 4)
    weights = np.where(x <= 1, near, np.where(x < 2, far, 0))
    return weights / weights.sum(1, keepdims=True)


def half_pixel_linear(new: int, old: int) -> np.ndarray:
    """(new, old) weights of linear interpolation at the centres of `new` pixels that cover `old` ones."""
    at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old)))
