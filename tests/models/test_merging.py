"""Token merging against loops in NumPy that follow the paper (arXiv 2210.09461 §3)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.models.zoo import merging

SMALL = dict(image_size=(12, 20), remat="none", registers=1)


def images(config):
    shape = (2, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def merged(x, sizes, metric, count, first):
    """One image's tokens as a list of (members, size, token), pair by pair."""
    groups = [[i] for i in range(len(x))]
    half = range(first + 1, len(x), 2)
    cosine = metric @ metric.T / np.outer(*2 * [np.linalg.norm(metric, axis=1)])
    partners = {i: max(range(first, len(x), 2), key=lambda j: cosine[i, j]) for i in half}
    going = sorted(half, key=lambda i: -cosine[i, partners[i]])[:count]
    for i in going:
        groups[partners[i]].append(i)
    kept = [*range(first), *(i for i in half if i not in going), *range(first, len(x), 2)]
    total = [sum(sizes[i] for i in groups[k]) for k in kept]
    means = [sum(sizes[i] * x[i] for i in groups[k]) / n for k, n in zip(kept, total, strict=True)]
    return [groups[k] for k in kept], np.array(total), np.array(means)


def test_the_pairs_that_are_most_alike_become_their_mean():
    rng = np.random.default_rng(0)
    x, metric = rng.standard_normal((2, 9, 4)), rng.standard_normal((2, 9, 3))
    sizes, places = rng.integers(1, 5, (2, 9)).astype(float), np.tile(np.arange(9)[::-1], (2, 1))
    found = merging.merge(*(jnp.asarray(a) for a in (x, sizes, places, metric)), 2, 2)
    for image in range(2):
        groups, total, means = merged(x[image], sizes[image], metric[image], 2, 2)
        np.testing.assert_allclose(found[0][image], means, rtol=1e-5)
        np.testing.assert_allclose(found[1][image], total)
        where = [next(k for k, group in enumerate(groups) if i in group) for i in places[image]]
        np.testing.assert_array_equal(found[2][image], where)


def test_a_vit_with_merged_patches_gives_a_token_for_each_patch(kit):
    config = kit.config(**SMALL, pool="mean", token_merging=4)
    params = kit.parameters(config)
    output = kit.run(config, params, images(config), capture=True)
    assert [*merging.counts(config)] == [4, 4, 3] and output.tokens.shape == (2, 15, 16)
    weights = output.intermediates["attention"]
    assert weights.shape == (3, 2, 2, 16, 16)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    # Patches that are one token are alike in all that is captured after they were merged.
    blocks = output.intermediates["blocks"]
    assert [len(np.unique(b[0, 1:].round(5), axis=0)) for b in blocks] == [11, 7, 4]
    np.testing.assert_allclose(output.features, output.tokens.mean(1), atol=1e-5)
    plain = kit.run(dataclasses.replace(config, token_merging=0), params, images(config))
    assert 0.01 < np.abs(plain.logits - output.logits).max() < 2


def test_equal_patches_are_merged_without_a_trace(kit):
    """Every patch is there twice, and without positions both are one token: after the first block nothing changes but
    the number of tokens, and the second one's attention is what it is among all of them.
    """
    config = kit.config(
        image_size=(12, 16), depth=2, remat="none", position="none", token_merging=6
    )
    params, x = kit.parameters(config), images(config)
    x = np.repeat(x.reshape(2, 12, 4, 4, 3)[:, :, ::2], 2, axis=2).reshape(2, 12, 16, 3)
    plain = kit.run(dataclasses.replace(config, token_merging=0), params, x, capture=True)
    found = kit.run(config, params, x, capture=True)
    for name, layer in (("blocks", 0), ("attention", 0), ("attention", 1)):
        arrays = [output.intermediates[name][layer] for output in (found, plain)]
        np.testing.assert_allclose(*arrays, atol=1e-5)


def test_fewer_tokens_are_fewer_operations():
    config = registry.model_config("DeiT-Ti/16", token_merging=13)
    share = config.flops() / dataclasses.replace(config, token_merging=0).flops()
    assert [*merging.counts(config)] == [13] * 12 and 0.5 < share < 0.65


@pytest.mark.parametrize(
    "options",
    [dict(rope="axial"), dict(position="relative"), dict(parallel=True), dict(norm_after=True)],
)
def test_what_does_not_go_with_it_is_refused(kit, options):
    with pytest.raises(ConfigError, match="token_merging=2 merges tokens .* does not go with"):
        kit.config(**options, token_merging=2)
