"""Orthogonalization by matrix products alone: of U S Vᵀ about U Vᵀ, by an odd polynomial of the
singular values, applied several times.
"""

import jax
import jax.numpy as jnp

# A triple (a, b, c) for each step X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X, and what the Frobenius norm is
# multiplied by before X is divided by it: rounding must not bring a singular value above 1.
POLYNOMIALS = {
    # arXiv 2505.16932, Algorithm 1, for singular values from 1e-3 on, safety 1e-2.
    "polar_express": (
        (
            (8.237312490495555, -23.157747414558198, 16.680568411445915),
            (4.082441999064835, -2.893047735332586, 0.5252849256975648),
            (3.9263479922546582, -2.8547468034765298, 0.5318022422894988),
            (3.2982187133085143, -2.424541981026706, 0.48632008358844075),
            (2.2970369434552573, -1.63662558125903, 0.4002628455953627),
        ),
        1.01,
    ),
    # kellerjordan.github.io/posts/muon
    "jordan": (((3.4445, -4.7750, 2.0315),) * 5, 1.0),
}
# Of matrices that are wider, the last two steps are one product, by their Gram matrix: 80 instead of 90 D³ for
# D x 4D. No more of them: what bfloat16 rounds in a Gram matrix that is computed from the one before makes later
# steps expand what they should shrink. Two of the first three steps in one made singular values of 10⁵.
_WIDE = 1.5
_TOGETHER = 2
_SMALLEST_NORM = 1e-20


def orthogonalize(x: jax.Array, polynomial: str) -> jax.Array:
    """(N, m, n) with m <= n to about orthonormal rows, in float32; products are computed in the dtype of x.

    A step multiplies X from the left by P = a + b A + c A², a polynomial of A = X Xᵀ. The next A is
    then P A P: two steps can be one (m, m) matrix, which X is multiplied by at their end.
    """
    triples, safety = POLYNOMIALS[polynomial]
    wide = x.shape[2] > _WIDE * x.shape[1]
    together = _TOGETHER if wide else 1
    parts = [*([t] for t in triples[:-together]), triples[-together:]]
    dtype, identity = x.dtype, jnp.eye(x.shape[1])
    x = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(x), (1, 2), keepdims=True))
    x /= jnp.maximum(safety * norm, _SMALLEST_NORM)
    for some in parts:
        gram, factor = _product(x, x.mT, dtype), None
        for i, (a, b, c) in enumerate(some):
            p = a * identity + b * gram + c * _product(gram, gram, dtype)
            factor = p if factor is None else _product(p, factor, dtype)
            if i + 1 < len(some):
                gram = _product(_product(p, gram, dtype), p, dtype)
        x = _product(factor, x, dtype)
    return x


def flops(m: int, n: int) -> int:
    """Operations of `orthogonalize` for one (m, n) matrix, a multiply-add counted as 2."""
    if n <= _WIDE * m:
        return 5 * (4 * m * m * n + 2 * m**3)
    return 16 * m * m * n + 16 * m**3


def _product(a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """a b, summed in float32."""
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.matmul(
        a.astype(dtype), b.astype(dtype), precision=exact, preferred_element_type=jnp.float32
    )
