"""Every quantity against NumPy in float64, hand-made answers, or networkx."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.inspection import references
from vit_jax.inspection import (
    attention,
    collapse,
    distance,
    features,
    filters,
    health,
    leaving,
    maps,
    mixing,
    positions,
)
from vit_jax.inspection.contract import NEGATIVE, InspectionContext, InspectOptions
from vit_jax.inspection.flow import flow
from vit_jax.inspection.observe import Observed, Stream
from vit_jax.models import registry
from vit_jax.models.layout import Layout


def softmax(shape, seed=0):
    logits = 2 * np.random.default_rng(seed).standard_normal(shape)
    weights = np.exp(logits)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


GRID, SIZE, TOKENS = (2, 3), (32.0, 60.0), 8  # with two learned tokens before the patches


def test_attention_distance_is_the_authors_on_oblong_patches_and_learned_tokens():
    weights = softmax((2, 3, TOKENS, TOKENS))
    found = attention.attention_distance(jnp.asarray(weights), GRID, SIZE)
    wanted = [[references.distance(head, GRID, SIZE) for head in image] for image in weights]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_attention_to_itself_alone_has_distance_0_and_to_the_class_token_counts_nothing():
    identity, to_class = np.eye(7), np.zeros((7, 7))
    to_class[:, 0] = 1
    for weights in (identity, to_class):
        assert attention.attention_distance(jnp.asarray(weights), GRID, SIZE) == 0


def test_distances_can_be_normalised_over_patches_or_count_the_class_token_in_the_centre():
    weights = softmax((7, 7))
    patches = weights[1:, 1:] / weights[1:, 1:].sum(-1, keepdims=True)
    whole = np.pad(patches, ((1, 0), (1, 0)))
    found = attention.attention_distance(jnp.asarray(weights), GRID, SIZE, renormalise=True)
    np.testing.assert_allclose(found, references.distance(whole, GRID, SIZE), rtol=1e-5)
    looks_at_class = np.zeros((7, 7), np.float32)
    looks_at_class[:, 0] = 1
    found = attention.attention_distance(jnp.asarray(looks_at_class), GRID, SIZE, with_class=True)
    # Two rows 8 pixels off the centre, columns 20, 0 and 20 off it; the class token itself at 0.
    wanted = 2 * (2 * np.hypot(8, 20) + 8) / 7
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_rollout_of_attention_to_itself_is_the_identity_and_of_a_hand_made_map_exact():
    eyes = jnp.broadcast_to(jnp.eye(3), (4, 3, 3))
    np.testing.assert_array_equal(attention.rollout(eyes)[-1], np.eye(3))
    # All take the second token: (A + I) / 2 twice leaves a quarter of each own token.
    second = jnp.zeros((2, 3, 3)).at[:, :, 1].set(1)
    wanted = [[0.25, 0.75, 0], [0, 1, 0], [0, 0.75, 0.25]]
    np.testing.assert_array_equal(attention.rollout(second)[-1], wanted)


def test_rollout_entropy_and_similarity_are_those_of_float64():
    weights = softmax((3, 2, TOKENS, TOKENS))
    means = jnp.asarray(weights).mean(1)
    np.testing.assert_allclose(
        attention.rollout(means)[-1], references.rollout(weights), rtol=1e-5, atol=1e-7
    )
    found = attention.entropy(jnp.asarray(weights))
    np.testing.assert_allclose(found, references.entropy(weights), rtol=1e-5)
    found = attention.similarity(jnp.asarray(weights))
    np.testing.assert_allclose(found, references.similarity(weights), rtol=1e-5)


def test_the_range_of_logits_is_found_from_weights():
    logits = np.random.default_rng(0).standard_normal((4, 5, 9)) * 5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    wanted = (logits.max(-1) - logits.mean(-1)).max(-1)
    np.testing.assert_allclose(attention.logit_range(jnp.asarray(weights)), wanted, rtol=1e-5)


def test_negative_weights_have_no_entropy_and_no_logits():
    weights = jnp.array([[0.5, 0.5], [1.2, -0.2]])
    assert np.isnan(attention.entropy(weights)) and np.isnan(attention.logit_range(weights))


def test_the_class_token_is_read_or_the_mean_of_patches():
    weights = softmax((TOKENS, TOKENS))
    of_class = attention.attention_read(jnp.asarray(weights), GRID, class_token=True)
    np.testing.assert_array_equal(of_class, weights[0, 2:])
    of_all = attention.attention_read(jnp.asarray(weights), GRID, class_token=False)
    np.testing.assert_allclose(of_all, weights[2:, 2:].mean(0), rtol=1e-6)


@pytest.mark.parametrize("grid", [(4, 4), (7, 7), (3, 5)])
def test_the_centre_gets_its_share_of_an_even_map_and_four_times_it_of_one_inside(grid):
    even = np.ones(grid[0] * grid[1])
    np.testing.assert_allclose(attention.centre_share(even, grid), 1)
    inside = np.zeros(grid)
    inside[grid[0] // 2, grid[1] // 2] = 1
    np.testing.assert_allclose(attention.centre_share(inside.ravel(), grid), 4)


def test_flow_is_that_of_networkx_and_of_a_hand_made_graph():
    import networkx

    weights = softmax((2, 4, 4), seed=3)
    graph, capacity = networkx.DiGraph(), weights.astype(np.float64) + np.eye(4)
    capacity /= capacity.sum(-1, keepdims=True)
    for layer, query, key in np.ndindex(capacity.shape):
        weight = capacity[layer, query, key]
        graph.add_edge((layer + 1, query), (layer, key), capacity=weight)
    wanted = [networkx.maximum_flow_value(graph, (2, 0), (0, key)) for key in range(4)]
    np.testing.assert_allclose(flow(weights), wanted, rtol=0, atol=1e-6)
    # Half stays and half swaps in each layer: two paths of a half to both tokens.
    swaps = np.broadcast_to([[0.0, 1.0], [1.0, 0.0]], (2, 2, 2))
    np.testing.assert_allclose(flow(swaps), [1, 1], atol=1e-6)


def test_the_spread_is_over_heads_after_the_mean_over_images():
    values = np.array([[[1.0, 5.0], [3.0, 7.0]]])
    np.testing.assert_allclose(distance.spread(values), [2.0])


def test_principal_components_of_filters_and_their_shares():
    kernel = np.random.default_rng(0).standard_normal((4, 4, 3, 20)).astype(np.float32)
    components, shares = filters.components_of_filters(kernel, 5)
    x = kernel.reshape(48, 20).T.astype(np.float64)
    values, vectors = np.linalg.eigh(np.cov(x.T))
    np.testing.assert_allclose(shares, values[::-1][:5] / values.sum(), rtol=1e-5)
    found = np.abs(components.reshape(5, -1) @ vectors[:, ::-1][:, :5])
    np.testing.assert_allclose(found, np.eye(5), atol=1e-5)


def test_similarity_of_positions_is_a_cosine_also_of_distances():
    table = np.random.default_rng(0).standard_normal((6, 10))
    wanted = np.array([[a @ b / np.sqrt(a @ a * (b @ b)) for b in table] for a in table])
    np.testing.assert_allclose(positions.similarity(table), wanted, rtol=1e-12)
    # Two rows of three patches: 11 distances in the row of all, 0 in the middle.
    relative = np.random.default_rng(0).standard_normal((11, 4))
    found = positions.offsets(relative, (2, 3))
    assert found.shape == (3, 5) and found[1, 2] == pytest.approx(1)
    a, b = relative[5], relative[5 + 3 - 2]  # one down, two to the left
    np.testing.assert_allclose(found[2, 0], a @ b / np.sqrt(a @ a * (b @ b)))


@pytest.mark.parametrize("kind", ["learned2d", "factorized"])
def test_positions_of_columns_and_rows_are_shown_as_the_table_they_make(kind):
    config = registry.model_config("ViT-mu/16", image_size=(32, 48), position=kind)
    width = config.width // (2 if kind == "learned2d" else 1)
    x, y = (np.random.default_rng(n).standard_normal((1, n, width)) for n in (3, 2))
    weights = ({"position": {"x": x, "y": y, "tokens": np.zeros((1, 1, config.width))}},)
    ((_, what, table, grid),) = positions.tables(SimpleNamespace(weights=weights, config=config))
    assert (what, grid, table.shape) == ("patches", (2, 3), (6, config.width))
    column, row = x[0, 1], y[0, 1]  # of the fifth patch
    wanted = np.concatenate([column, row]) if kind == "learned2d" else column + row
    np.testing.assert_allclose(table[4], wanted)


def test_biases_of_distances_are_shown_as_the_mean_of_the_heads():
    config = registry.model_config("ViT-mu/16", image_size=(32, 48), position="bias2d")
    table = np.random.default_rng(0).standard_normal((1, 3 * 5 + 3, config.heads))
    weights = ({"encoder": {"layers": {"position": table}}},)
    section = positions.inspect(SimpleNamespace(weights=weights, config=config))
    (shown,) = section.numbers.values()
    np.testing.assert_allclose(shown, table[0, :15].mean(1).reshape(3, 5))
    assert "added to attention's logits" in section.text


def test_effective_rank_outliers_and_silent_channels():
    orthogonal = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 12)))[0]
    centred = orthogonal - orthogonal.mean(0)
    sizes = np.linalg.svd(centred)[1]
    shares = sizes[sizes > 1e-12] / sizes.sum()
    wanted = np.exp(-(shares * np.log(shares)).sum())
    assert health.effective_rank(orthogonal) == pytest.approx(wanted, rel=1e-5)
    line = np.outer(np.arange(5.0), [1, 2, 3])
    assert health.effective_rank(line) == pytest.approx(1)
    assert health.effective_rank(np.ones((5, 3))) == 1
    norms = np.array([[[1.0, 1.0, 4.0]], [[2.0, 5.0, 2.0]]])
    np.testing.assert_array_equal(health.outliers(norms)[:, 0], [[0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(health.silent([[1, 1, 0.001], [1, 1, 0.5]]), [1, 0])


def test_blocks_are_alike_where_their_maps_are():
    first, other = softmax((1, 2, 4, 4)), softmax((1, 2, 4, 4), seed=1)
    weights = jnp.asarray(np.concatenate([first, first, 1 - other]))
    assert collapse.alike(np.asarray(attention.similarity(weights))) == 1


def test_features_of_two_kinds_of_patches_have_two_colours():
    tokens = np.zeros((4, 6))
    tokens[::2, 1] = 3
    found, shares = features.colours(tokens)
    assert shares[0] == pytest.approx(1)
    np.testing.assert_allclose(np.abs(found[::2, 0] - found[1::2, 0]), 1)


def test_the_share_of_variance_within_images_is_that_of_an_analysis_of_variance():
    tokens = np.random.default_rng(0).normal(size=(3, 5, 7)) + np.arange(3)[:, None, None]
    means, whole = tokens.mean(1, keepdims=True), tokens.mean((0, 1))
    within = ((tokens - means) ** 2).sum()
    between = 5 * ((means - whole) ** 2).sum()
    np.testing.assert_allclose(features.share_within(tokens), within / (within + between))


def test_an_overlay_is_bright_where_the_mask_is():
    image = np.full((32, 32, 3), 200, np.uint8)
    mask = np.zeros((4, 4))
    mask[1, 1] = 5
    found = maps.overlay(image, mask)
    bright = np.unravel_index(found[..., 0].argmax(), (32, 32))
    assert found.max() == 200 and found[31, 31, 0] < 5 and all(8 <= x < 16 for x in bright)


def test_patches_of_a_hybrid_are_as_many_pixels_wide_as_its_maps_are_coarse():
    sizes = dict(image_size=64, patch=1, units=(1, 1), num_classes=2)
    assert mixing.patch_in_pixels(registry.model_config("R26+ViT-S/32", **sizes)) == 8
    assert mixing.patch_in_pixels(registry.model_config("Mixer-S/32", image_size=64)) == 32
    assert mixing.patch_in_pixels(registry.model_config("BiT-R50x1", image_size=64)) is None


def test_images_leave_at_the_first_exit_that_is_sure_enough():
    confidences = np.array([[0.9, 0.5, 0.1], [0.2, 0.8, 0.3], [0.4, 0.4, 0.4]])
    np.testing.assert_array_equal(leaving.leaves_at(confidences, (0.9, 0.8)), [0, 1, 2])


def test_of_images_that_leave_only_the_surest_are_held():
    def judge(images):
        sure = images[:, 0, 0, 0] / 100
        return np.stack([sure, np.ones(len(images))]), np.zeros((2, len(images)), int)

    images = np.arange(100, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, -1)
    found = leaving.Leaving(judge, (0.5,))
    for start in range(0, 100, 7):
        found.add(images[start : start + 7])
    assert found.confidences.shape == found.best.shape == (2, 100)
    assert [number for number, _ in found.surest(0)] == list(range(99, 91, -1))
    assert [number for number, _ in found.surest(1)] == list(range(8))
    assert all(image[0, 0, 0] == number for number, image in found.surest(0))


def subject_of(distance, renormalised, entropy, mean_read=None):
    """Three images that a model of two layers and four heads looked at."""
    layout = Layout("attention", GRID, SIZE, False)
    stream = Stream(
        layout, distance, renormalised, None, entropy, None, None, mean_read, None, None, None
    )
    observed = Observed({"attention": stream}, {}, {}, None, None)
    return InspectionContext(
        None,
        None,
        np.zeros((3, 8, 8, 3)),
        ["a", "b", "c"],
        observed,
        None,
        None,
        None,
        InspectOptions(),
    )


def test_layers_with_negative_weights_are_left_out_of_distances_and_centres_and_it_is_said():
    ones, map_of = np.ones((2, 3, 4)), np.ones(GRID[0] * GRID[1])
    entropy = ones * np.array([1.0, np.nan])[:, None, None]
    context = subject_of(ones, ones, entropy, np.stack([map_of, -map_of]))
    section = maps.inspect_means(context)
    np.testing.assert_allclose(section.numbers["attention/centre_attention"], [1, np.nan])
    assert "Attention, mean over 3 images: 1.00 in layer 1" in section.text
    assert NEGATIVE in section.text and NEGATIVE in distance.inspect(context).text
    proper = subject_of(ones, ones, ones, np.stack([map_of, map_of]))
    assert NEGATIVE not in maps.inspect_means(proper).text + distance.inspect(proper).text


def test_ways_to_count_that_give_the_same_are_not_drawn():
    def drawn(renormalised):
        context = subject_of(np.ones((2, 3, 4)), renormalised, np.ones((2, 3, 4)))
        return "attention_distance_variants" in distance.inspect(context).figures

    assert drawn(np.full((2, 3, 4), 2.0)) and not drawn(np.ones((2, 3, 4)))
