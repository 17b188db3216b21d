"""What TPUs compute their own way. They lay out an array's last axis in tiles of 128 and spend the
time of XLA's attention on passes over logits and on copies: so there tokens come last. The kernels
are in `tpu_attention.py` (short sequences) and `splash.py` (long ones).
"""

import jax
import jax.numpy as jnp

from vit_jax.compute import attend
from vit_jax.compute.dense import dense, product

# What differs from XLA's defaults, of a program that trains:
# - A product of a gathered kernel, or one whose result is scattered, is computed whole. XLA would take some,
#   mostly of narrow models, in as many windows as there are shards, each beside a transfer. So small, they
#   take longer than what they hide: by either count of docs/notes/2026-11-24-small-vit-on-tpus.md.
COMPILER_OPTIONS = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}

# Of the checker of silent data corruption in libtpu: every program is run again, and the run ends if results
# differ. Where a chip has two cores, they change roles; else instructions are issued to other units.
_CHECKER_OPTIONS = {
    "xla_tpu_enable_sdc_checker": True,
    "xla_tpu_sdc_check_repeat_count": 1,
    "xla_tpu_sdc_check_halt_on_detection": True,
}
_TWO_CORES = ("v4", "v5")  # a v5p calls itself v5


def checker_options(kind: str) -> dict[str, bool | int]:
    """XLA's options for a program that finds wrong results by itself, on TPUs of this kind."""
    two = kind.removeprefix("TPU ") in _TWO_CORES
    own = "xla_tpu_sdc_checker_alternate_megacore_cores" if two else "xla_tpu_sdc_replicate_llo"
    return _CHECKER_OPTIONS | {own: True}


@attend.project.on("tpu")
def project(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, *, implementation: str = "xla"
) -> tuple[jax.Array, ...]:
    """As products to H·C features, since axes smaller than a tile are padded. For plain attention
    they are of the kernel with the tokens, so that tokens are written last, as its products read
    them: the other order may need a copy. Pallas reads tokens in rows.
    """
    kernel = kernel.astype(x.dtype)
    _, count, heads, size = kernel.shape
    tokens = x.shape[1]
    chosen = attend.choose(
        implementation, queries=tokens, keys=tokens, heads=heads, head_size=size, dtype=x.dtype
    )
    kernels = [kernel[:, t].reshape(-1, heads * size) for t in range(count)]
    biases = [None] * count if bias is None else bias.astype(x.dtype).reshape(count, -1)

    def tokens_last(kernel, bias):
        y = jnp.tensordot(kernel, x, ((0,), (2,)))
        y = y if bias is None else y + bias[:, None, None]
        return y.reshape(heads, size, *x.shape[:2]).transpose(2, 3, 0, 1)

    def in_rows(kernel, bias):
        return dense(x, kernel, bias).reshape(*x.shape[:2], heads, size)

    own = in_rows if chosen == "short" else tokens_last
    return tuple(own(*both) for both in zip(kernels, biases, strict=True))


@attend.weighted_sums.on("tpu")
def weighted_sums(exponentials: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With a column of ones beside the values: one product, in which padding leaves room for it, gives
    both sums.
    """
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)
    sums = product(
        "bhqn,bnhc->bqhc", exponentials.astype(v.dtype), jnp.concatenate([v, ones], axis=-1)
    )
    return sums[..., :-1], sums[..., -1].swapaxes(1, 2)
