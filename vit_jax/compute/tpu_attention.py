"""Attention of short sequences on TPUs: Pallas kernels that keep rows of logits in the fast memory,
forward and backward. XLA writes float32 logits to the slow one and reads them again.

A program of the grid has one image and some of its heads, and all keys; of a long sequence a block of
queries at a time. Queries, keys and values are read from the arrays that the projection writes,
(B, N, H·C), without a copy by heads, and gradients are written the same way. Logits have keys along
sublanes and queries along lanes: the softmax's maxima and sums are then plain vector operations, and
results of narrow heads, (C, queries), fill tiles.

    B/16 at 384 px: N = 577 tokens, 12 heads of 64, in 6 groups of two. Program (image i, group 1):

    slow memory: q, k, v of image i     fast memory: heads 2 and 3 of them, (N, 128), which share a tile
      +-----+-----+- -+-------+           logits (keys, queries): k · (q, zeros in place of head 3)ᵀ
    N | 0 1 | 2 3 |...| 10 11 |  ---->    exponentials of them; meanwhile the logits of head 3
      +-----+-----+- -+-------+           result (64, queries): vᵀ of head 2 · exponentials / their sums
       128 lanes                          the same of head 3
    slow memory: out, as wide as q      <----  (N, 128): both results, transposed
                 logsumexp              <----  (2, N)
"""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning, recompute
from vit_jax.compute.tpu_attention_grid import HEAD_SIZES, LANES, TOKENS, Grid, program_shape
from vit_jax.compute.tpu_attention_mask import Mask

LOG2_E = math.log2(math.e)


def fits(tokens: int, heads: int, size: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether the kernels take `heads` heads of `size` channels, of `tokens` queries and as many
    keys, on the devices of the mesh that is set.
    """
    known = size in HEAD_SIZES and tokens in TOKENS
    return known and program_shape(tokens, _local(heads), size, dtype) is not None


def packs(tokens: int, heads: int, size: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether `attend_packed` takes them: a program has all heads, and they fill tiles."""
    whole = heads * size % LANES == 0 and _local(heads) == heads
    return whole and program_shape(tokens, heads, size, dtype) == (heads, tokens)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """softmax(q kᵀ / √C) v.

    Args:
      q, k, v: (B, N, H, C).
      lengths: (B,) int32, at least 1: how many leading keys of each image count. Others have weight 0, and
        their gradients and those of their values are 0.
    """
    flat = tuple(x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    return _attend(flat, None, lengths, q.shape[-1]).reshape(q.shape)


def attend_packed(
    qkv: jax.Array, bias: jax.Array | None, size: int, lengths: jax.Array | None = None
) -> jax.Array:
    """Attention of queries, keys and values in one array. The kernel sums up the gradient of their
    bias too, while it has theirs in the fast memory.

    Args:
      qkv: (B, N, 3·H·C), to which the bias is not added yet: queries of all heads, keys, values.
      bias: (3·H·C,) or `None`.
      size: C.
      lengths: as in `attend`.

    Returns:
      (B, N, H·C).
    """
    return _attend((qkv,), bias, lengths, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(projected, bias, lengths, size):
    """`projected` is (queries, keys, values), or (all of them,) as `attend_packed` has it."""
    return _forward(projected, bias, lengths, size)[0]


def _forward(projected, bias, lengths, size):
    if bias is not None:
        projected = tuple(x + bias.astype(x.dtype) for x in projected)
    out, logsumexp = _per_device(_forward_call, projected, lengths, size, out_axes=(2, 1))
    out = recompute.named(out, recompute.ATTENTION)
    logsumexp = recompute.named(logsumexp, recompute.ATTENTION)
    return out, (projected, bias, lengths, out, logsumexp)


def _backward(size, saved, dout):
    projected, bias, lengths, out, logsumexp = saved
    gradients = _per_device(
        _backward_call,
        (*projected, out, logsumexp, dout),
        lengths,
        size,
        out_axes=(2,) * (3 if len(projected) == 3 else 2),
    )
    if len(projected) == 3:
        return tuple(gradients), None, None
    gradient, sums = gradients
    # Of each image: XLA adds them up over the images.
    return (gradient,), None if bias is None else sums.sum((0, 1)).astype(bias.dtype), None


_attend.defvjp(_forward, _backward)


def _per_device(call, arrays, lengths, size, out_axes):
    """The call with each device's images and heads; packed ones are not sharded by heads."""
    packed = len(arrays) in (1, 4)
    # Of (B, groups, heads, N), heads lie along axis 1.
    axes = [1 if x.ndim == 4 else 2 for x in arrays]
    given = [] if lengths is None else [lengths]
    return partitioning.per_device(
        functools.partial(call, len(given), size),
        *given,
        *arrays,
        heads=1 if packed else arrays[0].shape[2] // size,
        axes=[*(None for _ in given), *axes],
        out_axes=out_axes,
    )


def _forward_call(has_lengths, size, *arrays):
    """-> (B, N, H·C), and base-2 logarithms of the softmax's denominators, (B, groups, heads, N)."""
    lengths, projected = arrays[:has_lengths], arrays[has_lengths:]
    grid = Grid(projected, size)
    results = [grid.of_queries(), grid.rows()]
    return grid.call(
        _forward_kernel, "short_attention", lengths, projected, grid.projected(), results
    )


def _backward_call(has_lengths, size, *arrays):
    """-> gradients of what was projected; where it is packed, also their sums over the tokens
    (B, 1, 3·H·C) float32.
    """
    lengths, arrays = arrays[:has_lengths], arrays[has_lengths:]
    *projected, _, _, _ = arrays
    grid = Grid(projected, size)
    saved = [grid.of_queries()[1], grid.rows()[1], grid.of_queries()[1]]
    gradients = [grid.of_queries(), grid.of_keys(), grid.of_keys()]
    return grid.call(
        _backward_kernel,
        "short_attention_backward",
        lengths,
        arrays,
        [*grid.projected(), *saved],
        [grid.packed(), grid.sums()] if grid.packs else gradients,
        grid.sums_over_blocks(),
    )


def _forward_kernel(length, q_ref, k_ref, v_ref, out_ref, logsumexp_ref, *, size):
    tiles = {}
    mask = Mask.of(length, k_ref)

    def logits(head):
        lanes = head.lanes
        keys, queries = mask.keys(head, k_ref[:, lanes]), mask.queries(head, q_ref[:, lanes])
        return mask.logits(head, _product(keys, queries, 1, 1) * _scale(size))

    def softmax(head, logits):
        largest = logits.max(0, keepdims=True)
        exponentials = jnp.exp2(logits - largest)
        total = exponentials.sum(0, keepdims=True)
        logsumexp_ref[head.row] = largest + jnp.log(total) * LOG2_E
        return exponentials.astype(v_ref.dtype), 1 / total

    def result(head, exponentials, inverse):
        if head.is_first:
            tiles[head.tile] = v_ref[:, head.lanes].T, []
        v, heads = tiles[head.tile]
        heads.append(_product(v[head.channels], exponentials, 1, 0) * inverse)
        if head.is_last:
            out_ref[:, head.lanes] = jnp.concatenate(heads, axis=0).astype(out_ref.dtype).T

    _pipeline(_heads(q_ref, size), logits, softmax, result)


def _backward_kernel(length, q_ref, k_ref, v_ref, out_ref, logsumexp_ref, dout_ref, *results, size):
    tiles = {}
    mask = Mask.of(length, k_ref)
    real = _rows_of_tokens(q_ref, k_ref)

    def products(head):
        lanes = head.lanes
        q, dout = real(q_ref[:, lanes]), head.only(real(dout_ref[:, lanes]))
        if head.is_first:
            out = real(out_ref[:, lanes]).astype(jnp.float32)
            terms = out * real(dout_ref[:, lanes]).astype(jnp.float32)
            tiles[head.tile] = k_ref[:, lanes].T, terms.T, [], [], []
        keys, queries = mask.keys(head, k_ref[:, lanes]), mask.queries(head, q)
        logits = mask.logits(head, _product(keys, queries, 1, 1) * _scale(size))
        return head.only(q), dout, logits, _product(v_ref[:, lanes], dout, 1, 1)

    def softmax(head, products):
        q, dout, logits, dp = products
        terms = tiles[head.tile][1]
        p = jnp.exp2(logits - real(logsumexp_ref[head.row], axis=1))
        dlogits = p * (dp - terms[head.channels].sum(0, keepdims=True)) * size**-0.5
        return q, dout, p.astype(q.dtype), dlogits.astype(q.dtype)

    def gradients(head, q, dout, p, dlogits):
        k, _, dq, dk, dv = tiles[head.tile]
        dq.append(_product(k[head.channels], dlogits, 1, 0))
        dk.append(_product(dlogits, q, 1, 0))
        dv.append(_product(p, dout, 1, 0))
        if head.is_last:
            dq = jnp.concatenate(dq, axis=0).astype(q.dtype).T
            store((dq, sum(dk), sum(dv)), head.lanes)

    with _store(results, q_ref.shape[1]) as store:
        _pipeline(_heads(q_ref, size), products, softmax, gradients)


def _rows_of_tokens(q_ref, k_ref):
    """A function that puts zeros in place of what a block of queries has beyond the last token, which
    may be anything.
    """
    from jax.experimental import pallas as pl

    queries, tokens = len(q_ref), len(k_ref)
    if tokens % queries == 0:
        return lambda x, axis=0: x
    left = tokens - pl.program_id(2) * queries

    def real(x, axis=0):
        is_token = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < left
        return jnp.where(is_token, x, jnp.zeros_like(x))

    return real


@contextlib.contextmanager
def _store(results, width):
    """A function that stores gradients of queries, keys and values in an array each; or in one, and
    their sums over the tokens. Those of keys and values are added up over blocks of queries, if
    there are several.
    """
    from jax.experimental import pallas as pl

    def store(gradients, lanes):
        for ref, gradient in zip(results[:3], gradients, strict=True):
            ref[:, lanes] = gradient.astype(ref.dtype)

    def store_packed(gradients, lanes):
        packed, sums = results
        for i, gradient in enumerate(gradients):
            lanes_there = slice(i * width + lanes.start, i * width + lanes.stop)
            packed[:, lanes_there] = gradient.astype(packed.dtype)
            sums[:, lanes_there] = gradient.astype(sums.dtype).sum(0, keepdims=True)

    if len(results) < 5:
        yield store if len(results) == 3 else store_packed
        return
    dq_ref, *of_keys, dk_sum, dv_sum = results

    def add(gradients, lanes):
        dq, dk, dv = gradients
        dq_ref[:, lanes] = dq
        dk_sum[:, lanes] += dk
        dv_sum[:, lanes] += dv

    @pl.when(pl.program_id(2) == 0)
    def begin():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    yield add

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def end():
        for ref, total in zip(of_keys, (dk_sum, dv_sum), strict=True):
            ref[...] = total[...].astype(ref.dtype)


@dataclasses.dataclass(frozen=True)
class _Head:
    """A head of a program, in a tile of lanes that it may share.

    Attributes:
      index: of all heads of the program.
      size: C.
      tile: indices of the heads that share the lanes.
    """

    index: int
    size: int
    tile: range

    @property
    def lanes(self) -> slice:
        """Of the tile, in the arrays."""
        return slice(self.tile.start * self.size, self.tile.stop * self.size)

    @property
    def channels(self) -> slice:
        """Of the head, in the tile."""
        first = (self.index - self.tile.start) * self.size
        return slice(first, first + self.size)

    @property
    def row(self) -> slice:
        return slice(self.index, self.index + 1)

    @property
    def is_first(self) -> bool:
        return self.index == self.tile[0]

    @property
    def is_last(self) -> bool:
        return self.index == self.tile[-1]

    @property
    def free_lane(self) -> int:
        """Of the tile, one of another head's."""
        return self.size if self.is_first else 0

    def only(self, x: jax.Array, others: jax.Array | float = 0.0) -> jax.Array:
        """x (N, lanes of the tile) with zeros, or `others`, in place of the other heads: a product over the
        whole tile costs as much as over one head, and nothing is shifted.
        """
        if len(self.tile) == 1:
            return x
        owner = self.tile.start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) // self.size
        return jnp.where(owner == self.index, x, jnp.asarray(others, x.dtype))


def _heads(ref, size):
    """Four heads of 32 or two of 64 share a tile; others, which begin anywhere, are by themselves."""
    heads, together = ref.shape[1] // size, LANES // size if LANES % size == 0 else 1
    tiles = [range(i, min(i + together, heads)) for i in range(0, heads, together)]
    return [_Head(index, size, tile) for tile in tiles for index in tile]


def _pipeline(heads, before, softmax, after):
    """Of every head: products, the softmax, products with it. The products of the heads before and
    after are in the program beside a softmax: matrix and vector units work at the same time.
    """
    previous, upcoming = None, before(heads[0])
    for head, following in zip(heads, (*heads[1:], None), strict=True):
        current, upcoming = upcoming, before(following) if following else None
        if previous:
            after(*previous)
        previous = head, *softmax(head, current)
    after(*previous)


def _product(a, b, axis_of_a, axis_of_b):
    contracted = (((axis_of_a,), (axis_of_b,)), ((), ()))
    return jax.lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)


def _scale(size):
    """1/√C in powers of two: of 2^x there is an instruction."""
    return size**-0.5 * LOG2_E


def _local(heads: int) -> int:
    """Heads of one device."""
    shards = dict(jax.sharding.get_abstract_mesh().shape).get("tensor", 1)
    return heads // shards if heads % shards == 0 else heads
