"""Features of teachers brought to one scale, so that no teacher and no channel outweighs others.

Statistics are of all rows of a batch, on all devices and in all its parts (`config.accumulate`). They are state of the
objective: a resumed run continues with them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from flax import nnx

from vit_jax.base.errors import ConfigError

_LEAST = 1e-6  # added to deviations


class Moments(nnx.Module):
    """Mean and deviation of each channel, as they run: x -> (x - mean) / deviation (UNIC; naver/unic).

    A batch is standardised by what came before it, the first one by mean 0 and deviation 1.
    """

    def __init__(self, width: int):
        self.mean, self.std = nnx.Variable(jnp.zeros(width)), nnx.Variable(jnp.ones(width))

    @property
    def is_ready(self) -> jax.Array:
        """Whether its results can be learned from."""
        return jnp.bool_(True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(…, D) -> the same, float32."""
        return (x.astype(jnp.float32) - self.mean[...]) / (self.std[...] + _LEAST)

    def observe(self, x: jax.Array) -> dict[str, jax.Array]:
        """Observations of a part of a batch (…, D): its rows, their mean and their squared deviations."""
        x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
        mean = x.mean(0)
        return {
            "rows": jnp.float32(len(x)),
            "mean": mean,
            "squares": jnp.square(x - mean).sum(0),
        }

    def update(self, observed: dict[str, jax.Array], weight: jax.Array) -> None:
        """Moves towards the moments of a batch, of the deviation the unbiased estimate.

        Args:
          observed: the results of `observe`, stacked over equal parts of the batch: (parts, …) each.
          weight: of the batch.
        """
        rows = observed["rows"]
        means = observed["mean"]
        mean = means.mean(0)
        between = (rows[:, None] * jnp.square(means - mean)).sum(0)
        squares = observed["squares"].sum(0) + between
        std = jnp.sqrt(squares / (rows.sum(0) - 1)) + _LEAST
        for variable, now in ((self.mean, mean), (self.std, std)):
            variable[...] = (1 - weight) * variable[...] + weight * now


class PhiS(nnx.Module):
    """PHI standardisation (PHI-S, arXiv 2410.01680 §3): a rotation after which all channels have the same variance,
    and one scale for all of them, so that distances keep their proportions. Invertible.

    For the first `batches` batches it only collects their covariance Σ = U diag(e) Uᵀ; then it stays
    y = H Uᵀ (x - mean) / √mean(e), where H is a Hadamard matrix with rows of length 1.
    """

    def __init__(self, width: int, batches: int):
        hadamard(width)
        self.batches = batches
        self.mean, self.matrix = (
            nnx.Variable(jnp.zeros(width)),
            nnx.Variable(jnp.zeros((width,) * 2)),
        )
        self.seen = nnx.Variable(jnp.int32(0))

    @property
    def is_ready(self) -> jax.Array:
        """Whether its results can be learned from."""
        return self.seen[...] >= self.batches

    def __call__(self, x: jax.Array) -> jax.Array:
        """(…, D) -> the same, float32."""
        centred = x.astype(jnp.float32) - self.mean[...]
        return jnp.einsum(
            "...d,ed->...e", centred, self.matrix[...], precision=jax.lax.Precision.HIGHEST
        )

    def observe(self, x: jax.Array) -> dict[str, jax.Array]:
        """Observations of a part of a batch (…, D): its mean and covariance; zeros once PHI-S is ready."""
        x = x.astype(jnp.float32).reshape(-1, x.shape[-1])

        def moments() -> tuple[jax.Array, jax.Array]:
            batch_mean = x.mean(0)
            return batch_mean, _products(x - batch_mean)

        def zeros() -> tuple[jax.Array, jax.Array]:
            return jnp.zeros_like(self.mean[...]), jnp.zeros_like(self.matrix[...])

        mean, within = jax.lax.cond(self.is_ready, zeros, moments)
        return {"mean": mean, "within": within}

    def update(self, observed: dict[str, jax.Array], weight: jax.Array) -> None:
        """Collects a batch, while it is not ready; all batches count the same.

        Args:
          observed: the results of `observe`, stacked over equal parts of the batch: (parts, …) each.
          weight: unused, `Moments` takes it.
        """
        seen, mean, matrix = self.seen[...], self.mean[...], self.matrix[...]

        def collect() -> tuple[jax.Array, jax.Array]:
            # Chan's way: nothing large is subtracted from anything large.
            batch_mean = observed["mean"].mean(0)
            within = observed["within"].mean(0) + _products(observed["mean"] - batch_mean)
            apart = batch_mean - mean
            share = 1 / (seen + 1)
            covariance = (1 - share) * (matrix + share * jnp.outer(apart, apart)) + share * within
            return mean + share * apart, covariance

        def finish(mean: jax.Array, covariance: jax.Array) -> tuple[jax.Array, jax.Array]:
            return mean, phi_s(covariance)

        def look() -> tuple[jax.Array, jax.Array]:
            return jax.lax.cond(seen + 1 == self.batches, finish, lambda *x: x, *collect())

        self.mean[...], self.matrix[...] = jax.lax.cond(self.is_ready, lambda: (mean, matrix), look)
        self.seen[...] = jnp.minimum(seen + 1, self.batches)


def _products(centred: jax.Array) -> jax.Array:
    """The mean of the outer products of rows: (N, D) -> (D, D)."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("nd,ne->de", centred, centred, precision=exact) / len(centred)


def phi_s(covariance: jax.Array) -> jax.Array:
    """The matrix of PHI standardisation for a covariance (D, D)."""
    values, vectors = jnp.linalg.eigh(covariance)
    scale = jnp.sqrt(jnp.maximum(values, 0).mean() + jnp.finfo(values.dtype).tiny)
    exact = jax.lax.Precision.HIGHEST
    return jnp.matmul(hadamard(len(covariance)), vectors.T, precision=exact) / scale


def hadamard(size: int) -> np.ndarray:
    """An orthogonal matrix (size, size) float32 whose elements have one magnitude: Sylvester's doubling of a matrix
    of Paley's first or second kind (1933), which exist for all usual widths of ViTs.

    Raises:
      ConfigError: none of this size is built this way.
    """
    half = size
    while half >= 1:
        if (core := _paley(half)) is not None:
            doubled = scipy.linalg.hadamard(size // half)
            return (np.kron(doubled, core) / math.sqrt(size)).astype(np.float32)
        if half % 2:
            break
        half //= 2
    raise ConfigError(
        f"config.objective.standardize=phi_s: there is no Hadamard matrix of {size} rows here, which is a teacher's "
        "width; set it to moments"
    )


def _paley(size: int) -> np.ndarray | None:
    """A Hadamard matrix of ones and minus ones of 1, 2, q + 1 or 2 (q + 1) rows, q a prime; else `None`."""
    if size in (1, 2):
        return scipy.linalg.hadamard(size)
    if size % 4:
        return None
    if _is_prime(size - 1):  # which is 3 modulo 4
        skew = _jacobsthal(size - 1)
        matrix = np.ones((size, size), int)
        matrix[1:, 1:] = skew + np.eye(size - 1, dtype=int)
        matrix[1:, 0] = -1
        return matrix
    if (prime := size // 2 - 1) % 4 == 1 and _is_prime(prime):
        symmetric = np.ones((prime + 1,) * 2, int)
        symmetric[0, 0], symmetric[1:, 1:] = 0, _jacobsthal(prime)
        diagonal = np.eye(prime + 1, dtype=int)
        return np.kron(symmetric, [[1, 1], [1, -1]]) + np.kron(diagonal, [[1, -1], [-1, -1]])
    return None


def _jacobsthal(prime: int) -> np.ndarray:
    """1 where the difference of column and row is a square modulo a prime, -1 where it is none, 0 where it is 0."""
    squares = np.full(prime, -1)
    squares[np.arange(prime) ** 2 % prime] = 1
    squares[0] = 0
    return squares[(np.arange(prime)[None] - np.arange(prime)[:, None]) % prime]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % i for i in range(2, math.isqrt(number) + 1))
