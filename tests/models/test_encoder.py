"""The stack of blocks: scan, rematerialisation, randomness, capture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.repeats import slow_unless
from vit_jax.compute import recompute
from vit_jax.models import registry
from vit_jax.models.vit import Encoder
from vit_jax.models.zoo.vit_zoo_blocks import PublishedEncoder

# Beside the plain scan. Of 3 blocks an unroll of 2 leaves one outside the loop, 0 all.
SCHEDULES = [
    *((remat, 1) for remat in recompute.POLICIES if remat != "none"),
    ("none", 2),
    ("none", 0),
    ("full", 2),
]
RANDOM = dict(dropout=0.2, attention_dropout=0.1, drop_path=0.3)


def gradient_of(kit, config):
    def loss(parameters, key):
        logits = kit.apply(config, parameters, kit.images, key).logits
        return jnp.square(logits - 1).sum(), logits

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.fixture(scope="module")
def plain(kit):
    """Gradients and logits of the plain scan."""
    config = kit.config(remat="none")
    return gradient_of(kit, config)(kit.parameters(config), None)


def assert_same(results, expected):
    for value, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(value - other) <= 1e-6 * np.linalg.norm(other) + 1e-7


@pytest.mark.parametrize(
    ("remat", "unroll"),
    slow_unless([s for s in SCHEDULES if s not in (("none", 2), ("full", 1))], SCHEDULES),
)
def test_how_blocks_are_compiled_changes_neither_outputs_nor_gradients(kit, plain, remat, unroll):
    config = kit.config(remat=remat, unroll=unroll)
    assert_same(gradient_of(kit, config)(kit.parameters(config), None), plain)


def test_recomputed_and_unrolled_blocks_throw_the_same_dice(kit):
    configs = (
        kit.config(drop_path=0.5, depth=2, **options)
        for options in ({}, dict(remat="full", unroll=0))
    )
    assert_same(
        *(gradient_of(kit, config)(kit.parameters(config), jax.random.key(0)) for config in configs)
    )


@pytest.mark.parametrize(
    ("remat", "unroll", "barrier"),
    [
        ("full", 1, False),
        ("full", 2, True),
        ("full", 7, True),
        ("full", 0, True),
        ("none", 0, False),
    ],
)
def test_recomputation_is_kept_apart_where_no_loop_does_it(kit, remat, unroll, barrier):
    """Without a barrier XLA merges recomputed blocks with those of the forward pass, and remat
    saves no memory.
    """
    config = kit.config(remat=remat, unroll=unroll)
    lowered = gradient_of(kit, config).lower(kit.parameters(config), None)
    assert ("optimization_barrier" in lowered.as_text()) == barrier


def test_remat_full_keeps_one_block_in_memory(kit):
    def memory(remat):
        config = kit.config(remat=remat, depth=8)
        compiled = gradient_of(kit, config).lower(kit.parameters(config), None).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory("full") < 0.4 * memory("none")


def test_all_blocks_are_applied_in_order_and_then_the_norm(kit):
    """The scan against a loop over the blocks one by one."""
    config = kit.config()
    encoder = encoder_of(config, kit.parameters(config)["encoder"])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, config.width)), jnp.float32)
    definition, stacked = nnx.split(encoder.layers)
    block = jax.jit(lambda parameters, x: nnx.merge(definition, parameters)(x, 0.0, None)[0])
    expected = x
    for i in range(config.depth):
        expected = block(jax.tree.map(lambda p, i=i: p[i], stacked), expected)
    tokens, captured = jax.jit(lambda x: encoder(x))(x)
    np.testing.assert_allclose(tokens, encoder.norm(expected), atol=1e-5)
    assert captured == {}


def test_capture_changes_nothing_and_returns_attention_that_sums_to_one(kit):
    config = kit.config(remat="full")
    parameters = kit.parameters(config)
    without, captured = (
        kit.run(config, parameters, kit.images, capture=capture) for capture in (False, True)
    )
    assert without.intermediates == {}
    np.testing.assert_array_equal(captured.logits, without.logits)
    attention, blocks = captured.intermediates["attention"], captured.intermediates["blocks"]
    assert attention.shape == (3, 4, 2, 10, 10) and blocks.shape == (3, 4, 10, 16)
    assert (attention >= 0).all()
    np.testing.assert_allclose(attention.sum(-1), 1, atol=1e-6)


def test_without_capture_the_scan_returns_only_tokens(kit):
    config = kit.config()
    text = str(
        jax.make_jaxpr(lambda p: kit.apply(config, p, kit.images).logits)(kit.parameters(config))
    )
    scanned = [line for line in text.splitlines() if "= scan[" in line]
    assert len(scanned) == 1
    results = scanned[0].split("=")[0].split()
    assert [result.split(":")[1] for result in results] == ["f32[4,10,16]"]


def encoder_of(config, parameters) -> Encoder | PublishedEncoder:
    kind = Encoder if config.drop_path_by == "depth" else PublishedEncoder
    definition, _ = nnx.split(
        nnx.eval_shape(lambda: kind(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    )
    return nnx.merge(definition, parameters)


def constant_blocks(kit, depth=3, width=8, **rates) -> Encoder:
    """Blocks whose attention adds 1 to the first half of the channels, and whose MLP adds 1 to the
    second half.
    """
    config = kit.config(depth=depth, width=width, **rates)
    zeros = jax.tree.map(
        lambda p: np.zeros(p.shape, p.dtype), registry.abstract(config)[1]["encoder"]
    )
    zeros["layers"]["attention"]["out"]["bias"][:, : width // 2] = 1
    zeros["layers"]["mlp"]["down"]["bias"][:, width // 2 :] = 1
    return encoder_of(config, zeros)


def added(encoder, examples, tokens, key):
    """What each block added: (layers, examples, tokens, half, D/2); half 0 by attention, 1 by the
    MLP.
    """
    x = jnp.zeros((examples, tokens, encoder.config.width))
    blocks = np.asarray(jax.jit(lambda key: encoder(x, key, capture=True)[1]["blocks"])(key))
    steps = np.diff(blocks, axis=0, prepend=0)
    return steps.reshape(*steps.shape[:3], 2, -1)


def correlations(masks):
    """Of each pair of the rows of `masks`."""
    return np.corrcoef(masks)[np.triu_indices(len(masks), 1)]


@pytest.mark.parametrize(
    ("by", "rates"), [("depth", (0, 0.25, 0.5)), ("constant", (0.5, 0.5, 0.5))]
)
def test_stochastic_depth_drops_whole_examples_at_the_rate_of_the_block_and_each_residual_by_its_own_dice(
    kit, by, rates
):
    examples = 4000
    blocks = constant_blocks(kit, drop_path=0.5, drop_path_by=by)
    steps = added(blocks, examples, 3, jax.random.key(0))
    assert (steps == steps[:, :, :1, :, :1]).all()
    kept = steps[:, :, 0, :, 0]
    for layer, rate in enumerate(rates):
        values = np.unique(np.round(kept[layer], 5))
        np.testing.assert_allclose(values, [1] if rate == 0 else [0, 1 / (1 - rate)], atol=1e-5)
        # Four standard deviations of the mean of a Bernoulli variable divided by its probability.
        spread = np.sqrt(rate / (1 - rate) / examples)
        np.testing.assert_allclose(kept[layer].mean(0), 1, atol=4 * spread + 1e-6)
    masks = kept[1:].transpose(0, 2, 1).reshape(4, examples)  # the first may drop nothing
    assert np.abs(correlations(masks)).max() < 4 / np.sqrt(examples)


def test_dropout_in_every_layer_has_its_own_dice_and_keeps_the_expectation(kit):
    steps = added(constant_blocks(kit, dropout=0.25), 200, 5, jax.random.key(0))
    values = np.unique(np.round(steps, 5))
    np.testing.assert_allclose(values, [0, 1 / 0.75], atol=1e-5)
    masks = steps.transpose(0, 3, 1, 2, 4).reshape(6, -1)
    size = masks.shape[1]
    np.testing.assert_allclose(masks.mean(1), 1, atol=4 * np.sqrt(0.25 / 0.75 / size))
    assert np.abs(correlations(masks)).max() < 4 / np.sqrt(size)


def test_deterministic_ignores_rates_and_random_runs_follow_their_key(kit):
    random, certain = kit.config(**RANDOM, depth=1), kit.config(depth=1)
    parameters = kit.parameters(certain)
    np.testing.assert_array_equal(
        kit.run(random, parameters, kit.images).logits,
        kit.run(certain, parameters, kit.images).logits,
    )
    run = jax.jit(lambda key: kit.apply(random, parameters, kit.images, key).logits)
    one, again, other = (np.asarray(run(jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (np.abs(one - other) > 1e-3).any(axis=1).all()


def test_a_random_model_without_randomness_given_is_an_error(kit):
    config = kit.config(drop_path=0.1)
    definition, _ = registry.abstract(config)
    with pytest.raises(ValueError, match="needs rngs unless deterministic=True"):
        nnx.merge(definition, kit.parameters(config))(kit.images, deterministic=False)
