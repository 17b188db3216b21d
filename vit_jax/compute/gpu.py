"""What GPUs compute their own way, and how XLA compiles for them. They spend the time of a ViT on products and
on passes over the memory: what is here avoids passes that XLA would make. Judged by compiled programs
(docs/notes/2026-11-24-gpu-programs.md) and on one GPU (2026-11-26-first-gpus.md). Fused attention is in
`cudnn.py`; memory that is set aside for a run is in `devices/gpus.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.compute import attend, learned, norms, partitioning, recompute
from vit_jax.compute import dense as plain

# What differs from XLA's defaults, of a program that trains; each is worth 1 % of a step on an H200:
# - Collectives run beside products instead of between them. NVIDIA's own JAX images set it.
# - Products are cuBLASLt's, which add biases and residuals while they write; Triton's leave that to another pass.
# Nothing of NCCL is set: it chooses protocols and buffers by the network that it finds.
COMPILER_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
}


@partitioning.in_rows.on("gpu")
def in_rows(x: jax.Array) -> jax.Array:
    """Where layers are unrolled, XLA would store tokens with the batch last, and transpose them for every product."""
    return _pinned(x) if x.ndim == 3 else x


@jax.custom_vjp
def _pinned(x):
    """Of each device's own tokens: XLA would gather those of all for an operation that it does not know. The gradient
    is pinned the same way: that of `shard_map` would be summed over `tensor`, where x is replicated.
    """
    return partitioning.by_batch(
        lambda x: with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2))), x
    )


_pinned.defvjp(lambda x: (_pinned(x), None), lambda _, dx: (_pinned(dx),))


@recompute.unshared.on("gpu")
def unshared(arrays):
    """XLA shares what the backward pass computes again with the forward pass, and stores it: float32 where the
    array itself has 16 bits.
    """
    return jax.lax.optimization_barrier(arrays)


@attend.project.on("gpu")
def project(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, *, implementation: str = "xla"
) -> tuple[jax.Array, ...]:
    """A product each, since attention reads queries, keys and values from arrays of their own: slices of one product
    are copied.
    """
    biases = [None] * kernel.shape[1] if bias is None else bias
    return tuple(plain.dense(x, kernel[:, i], biases[i]) for i in range(kernel.shape[1]))


@plain.dense.on("gpu")
def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """As one product with a vector of biases, which the product's kernel adds, whatever axes the features have.
    Gradients of kernel and bias are summed in float32, over tokens and over devices; automatic differentiation would
    sum them in the dtype of x (`gradients_in` does so over devices).
    """
    features = kernel.shape[1:]
    flat = None if bias is None else bias.reshape(-1)
    return _dense(x, kernel.reshape(len(kernel), -1), flat).reshape(*x.shape[:-1], *features)


@jax.custom_vjp
def _dense(x, kernel, bias):
    return _dense_forward(x, kernel, bias)[0]


def _dense_forward(x, kernel, bias):
    rounded = recompute.named(kernel.astype(x.dtype), recompute.PRODUCT)
    y = recompute.named(plain.dense.plain(x, rounded, bias), recompute.PRODUCT)
    return y, (x, rounded, bias)


def _dense_backward(saved, dy):
    x, kernel, bias = saved
    # Else XLA would sum up dy as it was before it was rounded, and store that too.
    dy = jax.lax.optimization_barrier(dy)
    tokens = tuple(range(x.ndim - 1))
    dtype = plain.gradient_dtype()
    dkernel = jnp.tensordot(x, dy, (tokens, tokens), preferred_element_type=dtype)
    return dy @ kernel.T, dkernel.astype(jnp.float32), None if bias is None else _sum(dy)


_dense.defvjp(_dense_forward, _dense_backward)


@learned.per_example.on("gpu")
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def per_example(rows: jax.Array, batch: int) -> jax.Array:
    """A copy for each example, fused into what takes it. The gradient is summed in float32, over examples and over
    devices; automatic differentiation would sum it in the dtype of the rows.
    """
    return jnp.broadcast_to(rows, (batch, *rows.shape[1:]))


per_example.defvjp(
    lambda rows, batch: (per_example(rows, batch), None),
    lambda batch, _, dy: (_sum(dy, (0,))[None].astype(dy.dtype),),
)


def _sum(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The sum over these axes, or all but the last, in float32, on every device. What sums up its elements, such as the
    check for finite gradients, is not merged with it: XLA would read x once more for that.
    """
    axes = tuple(range(x.ndim - 1)) if axes is None else axes
    total = x.sum(axes, dtype=jnp.float32)
    return jax.lax.optimization_barrier(partitioning.replicated(total))


def _with_affine(forward, normed, backward):
    """A norm that stores x and its statistics alone for the backward pass. Differentiated by itself, the product
    with the scale would store the normed x in float32.

    Args:
      forward, normed, backward: of the norm without scale and bias, see `norms.LAYER`.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
    def norm(x, scale, bias, epsilon, dtype):
        return norm_forward(x, scale, bias, epsilon, dtype)[0]

    def norm_forward(x, scale, bias, epsilon, dtype):
        y, saved = forward(x, epsilon)
        y = y * scale
        return (y if bias is None else y + bias).astype(dtype), (saved, scale, bias)

    def norm_backward(epsilon, dtype, saved, dy):
        saved, scale, bias = saved
        saved, dy = recompute.unshared(saved), dy.astype(jnp.float32)
        (dx,) = backward(epsilon, saved, dy * scale)
        return dx, _sum(dy * normed(*saved)), None if bias is None else _sum(dy)

    norm.defvjp(norm_forward, norm_backward)
    return norm


_layer_norm, _rms_norm = _with_affine(*norms.LAYER), _with_affine(*norms.RMS)


@norms.layer_norm.on("gpu")
def layer_norm(x, scale, bias, *, epsilon, dtype):
    """As `norms.layer_norm`; only x and its statistics are stored, see `_with_affine`."""
    return _layer_norm(x, scale, bias, epsilon, dtype)


@norms.rms_norm.on("gpu")
def rms_norm(x, scale, *, epsilon, dtype):
    """As `norms.rms_norm`; only x and its statistics are stored, see `_with_affine`."""
    return _rms_norm(x, scale, None, epsilon, dtype)
