"""How the attention of `tpu_attention` is split: the programs of a kernel's grid, which have some heads
of an image and some of its queries each, and what they see of the arrays.
"""

import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from vit_jax.compute import platform

HEAD_SIZES = range(16, 129, 8)
TOKENS = range(8, 2561)
LANES = 128
# Beyond this, programs of heads that share one tile alone: wider ones need more fast memory than there is.
MOST_OF_WIDE_ROWS = 2304
# Logits of one program, whose code is unrolled over them: if it has more heads than fill tiles, and at
# most.
UNROLLED = 16 * 288**2
MOST_UNROLLED = 2 * 1408**2
# Fast memory that a program may take, in bytes: of a core TPU v4 has 16 MiB, v5e and v6e 128, v5p and later ones
# 64; v2 and v3 do not multiply bfloat16.
DEFAULT_MEMORY = 48 * 2**20
MEMORY = {
    "TPU v2": 0,
    "TPU v3": 0,
    "TPU v4": 14 * 2**20,
    "TPU v5 lite": 104 * 2**20,
    "TPU v6 lite": 104 * 2**20,
}
# What a program is given where little more is left: compiled, it may take up to 1.6 MiB more than `_needed` counts.
LIMITS = {"TPU v4": 15 * 2**20}


class Grid:
    """Images by groups of heads by blocks of queries, and how a program of it sees the arrays:
    (shape, block) each.
    """

    def __init__(self, projected, size):
        from jax.experimental import pallas as pl

        self.images, self.tokens, width = projected[0].shape
        self.packs, self.size, self.dtype = len(projected) == 1, size, projected[0].dtype
        self.width = width // 3 if self.packs else width
        heads = self.width // size
        self.heads, self.queries = program_shape(self.tokens, heads, size, self.dtype)
        self.groups, self.blocks = heads // self.heads, -(-self.tokens // self.queries)
        of_program = self.tokens, self.queries, self.heads * size, self.dtype
        needed = _needed(*of_program)
        self.buffers_of_keys = 2 if needed <= _memory() else 1
        # XLA keeps other arrays in what is left.
        needed = _needed(*of_program, self.buffers_of_keys)
        self.memory = LIMITS.get(
            platform.device_kind(), max(needed, min(_memory(), DEFAULT_MEMORY))
        )
        self.block = pl.BlockSpec

    def of_queries(self):
        """(B, N, H·C): queries, results and their gradients, a block of tokens."""
        shape = (self.images, self.tokens, self.width)
        block = (None, self.queries, self.width // self.groups)
        return jax.ShapeDtypeStruct(shape, self.dtype), self.block(block, lambda i, g, b: (i, b, g))

    def of_keys(self):
        """(B, N, H·C): keys, values and their gradients, all tokens."""
        from jax.experimental import pallas as pl

        shape = (self.images, self.tokens, self.width)
        block = (None, self.tokens, self.width // self.groups)
        once = {} if self.buffers_of_keys == 2 else {"pipeline_mode": pl.Buffered(1)}
        return jax.ShapeDtypeStruct(shape, self.dtype), self.block(
            block, lambda i, g, b: (i, 0, g), **once
        )

    def packed(self):
        """(B, N, 3·H·C), in one group."""
        shape = (self.images, self.tokens, 3 * self.width)
        block = self.block((None, *shape[1:]), lambda i, g, b: (i, 0, 0))
        return jax.ShapeDtypeStruct(shape, self.dtype), block

    def rows(self):
        """(B, groups, heads, N) float32."""
        shape = (self.images, self.groups, self.heads, self.tokens)
        block = (None, None, self.heads, self.queries)
        return jax.ShapeDtypeStruct(shape, jnp.float32), self.block(
            block, lambda i, g, b: (i, g, 0, b)
        )

    def sums(self):
        """(B, 1, 3·H·C) float32."""
        shape = (self.images, 1, 3 * self.width)
        block = self.block((None, *shape[1:]), lambda i, g, b: (i, 0, 0))
        return jax.ShapeDtypeStruct(shape, jnp.float32), block

    def projected(self):
        """Blocks of queries, keys and values: of three arrays, or parts of one."""
        if not self.packs:
            return [self.of_queries()[1], self.of_keys()[1], self.of_keys()[1]]
        shape = (None, self.tokens, self.width)
        return [self.block(shape, lambda i, g, b, part=part: (i, 0, part)) for part in range(3)]

    def sums_over_blocks(self):
        """Fast memory in which gradients of keys and values are added up, block by block: (N, lanes)
        float32 each.
        """
        from jax.experimental.pallas import tpu as pltpu

        if self.blocks == 1:
            return []
        return [pltpu.VMEM((self.tokens, self.width // self.groups), jnp.float32)] * 2

    def call(self, kernel, name, lengths, arrays, blocks, results, scratch=()):
        """Runs the kernel; what is packed, it sees as three parts. Its first argument is the image's length,
        `None` if `lengths` is empty.
        """
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        def with_length(lengths_ref, *refs):
            kernel(lengths_ref[pl.program_id(0)], *refs, size=self.size)

        arrays = (arrays[0],) * 2 + tuple(arrays) if self.packs else arrays
        scalars = [self.block(memory_space=pltpu.SMEM)] * len(lengths)
        return pl.pallas_call(
            with_length if lengths else functools.partial(kernel, None, size=self.size),
            grid=(self.images, self.groups, self.blocks),
            in_specs=[*scalars, *blocks],
            out_shape=[shape for shape, _ in results],
            out_specs=[block for _, block in results],
            scratch_shapes=scratch,
            name=name,
            interpret=platform.current() != "tpu",
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=self.memory,
            ),
        )(*lengths, *arrays)


def program_shape(
    tokens: int, heads: int, size: int, dtype: jax.typing.DTypeLike
) -> tuple[int, int] | None:
    """How many heads and queries a program has; `None` if nothing fits the fast memory.

    Heads are all, or as many as fill tiles: the most of which all logits are little code, else the
    fewest. Queries are all, or a multiple of `LANES`.
    """
    counts = [n for n in range(1, heads) if heads % n == 0 and n * size % LANES == 0] + [heads]
    if tokens > MOST_OF_WIDE_ROWS:
        counts = [n for n in counts if n * size <= LANES]
    little = [n for n in counts if n * tokens**2 <= UNROLLED]
    counts = [*reversed(little), *(n for n in counts if n not in little)]
    # Where blocks of queries share the keys, these may be buffered once.
    for buffers, count, queries in itertools.product((2, 1), counts, _lengths(tokens)):
        if buffers == 1 and queries == tokens:
            continue
        code = count * tokens * queries
        needed = _needed(tokens, queries, count * size, dtype, buffers)
        if needed <= _memory() and (code <= MOST_UNROLLED or queries <= LANES):
            return count, queries
    return None


def _lengths(tokens: int) -> Iterator[int]:
    """Of blocks of queries: all tokens, then the shortest that make two blocks, three and so on."""
    yield tokens
    for count in range(2, math.ceil(tokens / LANES) + 1):
        yield math.ceil(tokens / count / LANES) * LANES


def _needed(
    tokens: int,
    queries: int,
    channels: int,
    dtype: jax.typing.DTypeLike,
    buffers_of_keys: int = 2,
) -> int:
    """Bytes of fast memory of a program of the backward pass: four blocks of queries and four of keys,
    twice each since the next program's arrive meanwhile, or of keys once; four of them in float32; logits and
    gradients of logits.
    """
    rows, columns, channels = (-(-n // LANES) * LANES for n in (tokens, queries, channels))
    size = jnp.dtype(dtype).itemsize
    blocks = channels * (columns * (4 * 2 * size + 8) + rows * (4 * buffers_of_keys * size + 8))
    return blocks + 16 * rows * columns


def _memory() -> int:
    """Bytes of fast memory for a program, on the devices of the mesh that is set."""
    return MEMORY.get(platform.device_kind(), DEFAULT_MEMORY)
