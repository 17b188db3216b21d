"""What policies store: counted in the program, and seen in what XLA makes of it."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from vit_jax.compute import recompute

DTYPES = [
    dict(dtype="float32"),
    dict(dtype="bfloat16", dtype_on_cpu="same"),
]


def gradient_of(kit, config):
    def loss(parameters, images):
        return jnp.square(kit.apply(config, parameters, images).logits).sum()

    images = jax.ShapeDtypeStruct(kit.images.shape, config.dtype)
    return jax.jit(jax.grad(loss)).trace(kit.parameters(config), images)


@pytest.mark.parametrize("options", DTYPES, ids=["float32", "bfloat16"])
def test_the_less_a_policy_stores_the_more_products_are_computed_again(kit, options):
    def products(remat):
        traced = gradient_of(kit, kit.config(remat=remat, **options))
        return str(traced.jaxpr).count(" dot_general[")

    counts = {remat: products(remat) for remat in recompute.POLICIES}
    # Of QKV and of attention's result; of what MLPs first multiply to; q kᵀ and its product with v.
    again = dict(none=0, save_products=2, save_attention=3, full=5)
    assert {remat: count - counts["none"] for remat, count in counts.items()} == again


@pytest.mark.parametrize("remat", ["save_products", "full"])
def test_a_loop_stores_bfloat16_without_converting_the_stack_in_every_round(kit, remat):
    config = kit.config(remat=remat, depth=5, dtype="bfloat16", dtype_on_cpu="same")
    program = gradient_of(kit, config).lower().compile().as_text()
    # But for norms' statistics, a number a token.
    stacks = set(re.findall(r"(\w+)\[5,4,10,(?!1\])", program))
    assert "u16" in stacks and not stacks & {"f32", "bf16"}


def test_a_policy_stores_no_more_than_the_one_before(kit):
    def memory(remat):
        config = kit.config(remat=remat, depth=8)
        compiled = gradient_of(kit, config).lower().compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [memory(remat) for remat in recompute.POLICIES if remat != "none"]
    assert all(more >= less for more, less in itertools.pairwise(sizes)) and sizes[-1] < sizes[0]
