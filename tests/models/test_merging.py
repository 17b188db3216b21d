"""Token merging against loops in NumPy that follow the paper (arXiv 2210.09461 §3), and gradients against PyTorch's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import lazily
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import registry
from vit_jax.models.zoo import merging

torch = lazily.Package("torch")
SMALL = dict(image_size=(12, 20), remat="none", registers=1)


def images(config):
    shape = (2, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def merged(x, sizes, metric, count, first):
    """One image's tokens as a list of (members, size, token), pair by pair."""
    groups = [[i] for i in range(len(x))]
    half = [i for i in range(first, len(x)) if i % 2 == 0]
    other = [i for i in range(first, len(x)) if i % 2]
    cosine = metric @ metric.T / np.outer(*2 * [np.linalg.norm(metric, axis=1)])
    partners = {i: max(other, key=lambda j: cosine[i, j]) for i in half}
    alike = sorted(half, key=lambda i: -cosine[i, partners[i]])
    going = alike[:count]
    for i in going:
        groups[partners[i]].append(i)
    staying = sorted(alike[count:]) if first else alike[count:]
    kept = [*range(first), *staying, *other]
    total = [sum(sizes[i] for i in groups[k]) for k in kept]
    means = [sum(sizes[i] * x[i] for i in groups[k]) / n for k, n in zip(kept, total, strict=True)]
    return [groups[k] for k in kept], np.array(total), np.array(means)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_pairs_that_are_most_alike_become_their_mean(first):
    rng = np.random.default_rng(0)
    x, metric = rng.standard_normal((2, 9, 4)), rng.standard_normal((2, 9, 3))
    sizes, places = rng.integers(1, 5, (2, 9)).astype(float), np.tile(np.arange(9)[::-1], (2, 1))
    found = merging.merge(*(jnp.asarray(a) for a in (x, sizes, places, metric)), 2, first)
    for image in range(2):
        groups, total, means = merged(x[image], sizes[image], metric[image], 2, first)
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


def of_pytorch(config, params, x):
    """The logits as the authors' code has them (bipartite_soft_matching, merge_wavg, proportional attention), of
    PyTorch's tensors, so that it has its own derivatives; of a ViT with mean pooling.
    """
    d, c, p = config.width, config.width // config.heads, config.patch
    rows, columns = config.grid

    def norm(x, w):
        return torch.nn.functional.layer_norm(x, (d,), w["scale"], w["bias"], config.epsilon)

    cut = x.reshape(len(x), rows, p, columns, p, 3).permute(0, 1, 3, 2, 4, 5)
    x = cut.reshape(len(x), rows * columns, -1) @ params["embedding"]["kernel"].reshape(-1, d)
    x = x + params["embedding"]["bias"] + params["position"]
    size = torch.ones(*x.shape[:2], 1, dtype=x.dtype)
    for number, r in enumerate(merging.counts(config)):
        w = jax.tree.map(lambda leaf, i=number: leaf[i], params["encoder"]["layers"])
        qkv = torch.einsum(
            "bnd,dihc->bnihc", norm(x, w["attention_norm"]), w["attention"]["qkv"]["kernel"]
        )
        q, k, v = (qkv + w["attention"]["qkv"]["bias"]).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-2, -1) * c**-0.5
        logits = logits + size.log()[:, None, None, :, 0] if number else logits
        out = (logits.softmax(-1) @ v).transpose(1, 2)
        x = (
            x
            + torch.einsum("bnhc,hcd->bnd", out, w["attention"]["out"]["kernel"])
            + w["attention"]["out"]["bias"]
        )
        with torch.no_grad():
            metric = k.mean(1) / k.mean(1).norm(dim=-1, keepdim=True)
            scores = metric[:, ::2] @ metric[:, 1::2].transpose(-1, -2)
            best, to = scores.max(-1)
            order = best.argsort(dim=-1, descending=True)[..., None]
            going, staying = order[:, :r], order[:, r:]  # without a class token not in their places
            to = to[..., None].gather(1, going)

        def merged(y, going=going, staying=staying, to=to):
            half, other = y[:, ::2], y[:, 1::2]
            wide = lambda index: index.expand(-1, -1, y.shape[-1])  # noqa: E731
            stays, goes = half.gather(1, wide(staying)), half.gather(1, wide(going))
            return torch.cat([stays, other.scatter_add(1, wide(to), goes)], 1)

        x, size = merged(x * size), merged(size)
        x = x / size
        y = torch.nn.functional.gelu(
            norm(x, w["mlp_norm"]) @ w["mlp"]["up"]["kernel"] + w["mlp"]["up"]["bias"],
            approximate="tanh",
        )
        x = x + y @ w["mlp"]["down"]["kernel"] + w["mlp"]["down"]["bias"]
    x = norm(x, params["encoder"]["norm"])
    pooled = (x * size).sum(1) / size.sum(1)  # the mean over patches, each of which has its token
    return pooled @ params["head"]["kernel"] + params["head"]["bias"]


def test_gradients_are_those_of_the_authors_formula(kit):
    """With what the backward pass stores and without; of a grid that is not square."""
    config = kit.config(image_size=(12, 20), remat="none", pool="mean", token_merging=3)
    params, x = kit.parameters(config), images(config)

    @functools.partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def ours(params, config):
        return (nnx.merge(registry.abstract(config)[0], params)(x).logits ** 2).sum()

    leaves = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf), requires_grad=True), params)
    loss = (of_pytorch(config, leaves, torch.tensor(x)) ** 2).sum()
    loss.backward()
    expected = jax.tree.map(lambda leaf: leaf.grad.numpy(), leaves)
    for remat in ("none", "save_products"):
        value, gradients = ours(params, dataclasses.replace(config, remat=remat))
        np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
        for name, gradient in patterns.named(gradients).items():
            wanted = patterns.named(expected)[name]
            np.testing.assert_allclose(
                gradient, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max(), err_msg=name
            )


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
