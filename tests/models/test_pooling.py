"""Pooling of tokens and of layers, against NumPy float64 and loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.conftest import statistics
from tests.repeats import slow_unless
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import fitting, formats
from vit_jax.models import pooling, registry

TOKENS = np.random.default_rng(0).standard_normal((3, 6, 8)).astype(np.float32)


def test_the_class_token_is_the_first():
    np.testing.assert_array_equal(pooling.token(TOKENS), TOKENS[:, 0])


def test_mean_is_over_tokens():
    np.testing.assert_allclose(pooling.mean(TOKENS), TOKENS.astype(np.float64).mean(1), atol=1e-6)


def test_the_mean_of_bfloat16_tokens_is_summed_in_float32():
    # 2048 ones and as many threes: a bfloat16 sum would stop growing at 256 and at 512.
    tokens = jnp.asarray(np.repeat([1, 3], 2048)[None, :, None], jnp.bfloat16)
    assert float(pooling.mean(tokens)[0, 0]) == 2


def test_attention_pooling_is_its_formula():
    """x = attention(probe, tokens); x + mlp(norm(x)) (Scaling ViT §3.2; facts: big_vision's
    MAPHead).
    """
    options = dict(epsilon=1e-6, activation="gelu_tanh", dtype=jnp.float32)
    definition, state = nnx.split(
        nnx.eval_shape(lambda: pooling.AttentionPooling(8, 2, 16, **options, rngs=nnx.Rngs(0)))
    )
    rng = np.random.default_rng(1)
    state = jax.tree.map(
        lambda p: rng.normal(0.1, 0.5, p.shape).astype(np.float32), nnx.to_pure_dict(state)
    )
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), state)

    qkv, bias = p["attention"]["qkv"]["kernel"], p["attention"]["qkv"]["bias"]
    q = np.einsum("d,dhc->hc", p["probe"][0, 0], qkv[:, 0]) + bias[0]
    k, v = (np.einsum("bnd,dhc->bnhc", TOKENS, qkv[:, i]) + bias[i] for i in (1, 2))
    weights = np.exp(np.einsum("hc,bnhc->bhn", q, k) / np.sqrt(4))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("bhn,bnhc->bhc", weights, v)
    x = (
        np.einsum("bhc,hcd->bd", heads, p["attention"]["out"]["kernel"])
        + p["attention"]["out"]["bias"]
    )
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    y = (y * p["norm"]["scale"] + p["norm"]["bias"]) @ p["mlp"]["up"]["kernel"] + p["mlp"]["up"][
        "bias"
    ]
    y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    expected = x + y @ p["mlp"]["down"]["kernel"] + p["mlp"]["down"]["bias"]

    pooled = jax.jit(lambda state, tokens: nnx.merge(definition, state)(tokens))(state, TOKENS)
    assert pooled.shape == (3, 8)
    np.testing.assert_allclose(pooled, expected, atol=1e-5)


def gem(p, tokens):
    return (np.maximum(np.asarray(tokens, np.float64), 1e-6) ** p).mean(1) ** (1 / p)


@jax.jit
def gem_of(p, tokens):
    pool = pooling.GeM()
    pool.p[...] = jnp.full((1,), p)
    return pool(tokens)


def test_the_generalised_mean_of_power_1_is_the_mean_and_of_a_large_one_the_largest():
    positive = np.abs(TOKENS)
    np.testing.assert_allclose(gem_of(1, positive), pooling.mean(positive), rtol=1e-6)
    np.testing.assert_allclose(gem_of(400, positive), positive.max(1), rtol=6e-3)
    np.testing.assert_allclose(pooling.GeM()(TOKENS), gem(3, TOKENS), rtol=1e-5)
    assert pooling.GeM()(TOKENS.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("p", [0.5, 3, 9])
def test_the_gradients_of_a_generalised_mean_are_those_of_differences(p):
    """Also where a channel has negative tokens alone."""
    rng = np.random.default_rng(2)
    tokens = TOKENS.copy()
    tokens[:, :, 0] = -1
    target = rng.standard_normal((3, 8))
    way = np.where(tokens > 0, rng.standard_normal(tokens.shape), 0)
    loss = lambda p, tokens: jnp.sum(gem_of(p, tokens) * target)  # noqa: E731
    of_power, of_tokens = jax.jit(jax.grad(loss, (0, 1)))(float(p), tokens)
    ends = [
        [np.sum(gem(p + h, tokens) * target), np.sum(gem(p, tokens + h * way) * target)]
        for h in (1e-6, -1e-6)
    ]
    expected = np.subtract(*ends) / 2e-6
    np.testing.assert_allclose([of_power, np.sum(of_tokens * way)], expected, rtol=1e-3)
    assert not np.asarray(of_tokens)[tokens < 0].any()


FAMILIES = {
    "vit": ("ViT-mu/16", dict(depth=3, heads=2)),
    "mixer": ("Mixer-S/16", dict(depth=3, token_mlp_dim=8)),
    "feed_forward": ("FF-Ti/16", dict(depth=3, token_mlp_dim=8, position_grid=(3, 3))),
    "deepvit": ("DeepViT-16", dict(stages=(1, 2), heads=2)),
    "axial_vit": ("Axial-ViT-B/16", dict(depth=3, heads=2)),
    "localvit": ("LocalViT-T", dict(depth=3, heads=2, reduction=8)),
}
SIZES = dict(image_size=12, patch=4, width=16, mlp_dim=32, num_classes=5, unroll=1)


def of_family(family, **options):
    """Three layers, all read."""
    name, own = FAMILIES[family]
    return registry.model_config(name, **SIZES | own | dict(weighted_layers=True) | options)


def gradients(kit, config, params, key=None):
    """Of every parameter, and the output."""

    def loss(params):
        output = kit.apply(config, params, kit.images, key, capture=key is None)
        return jnp.square(output.logits - 1).sum(), output

    return jax.jit(jax.grad(loss, has_aux=True))(params)


def split_weights(params, family):
    """The layers' weights, and all other parameters."""
    rest = params["encoder"] if family == "vit" else params
    ours, rest = rest["layer_weights"], {n: x for n, x in rest.items() if n != "layer_weights"}
    return ours, params | {"encoder": rest} if family == "vit" else rest


# Families of equal blocks have the sum from one class; `vit` has its own.
@pytest.mark.parametrize("family", slow_unless(["vit", "mixer", "axial_vit"], FAMILIES))
def test_the_last_norm_reads_the_weighted_sum_of_all_layers(kit, family):
    config = of_family(family)
    weights, rest = split_weights(kit.parameters(config), family)

    def loss(weights):
        whole = {"layer_weights": weights}
        whole = {"encoder": rest["encoder"] | whole} if family == "vit" else whole
        output = kit.apply(config, rest | whole, kit.images, capture=True)
        return jnp.square(output.logits - 1).sum(), output

    found, output = jax.jit(jax.grad(loss, has_aux=True))(weights)
    norm = (rest["encoder"] if family == "vit" else rest)["norm"]

    def read(weights):
        shares = weights["gain"] * jax.nn.softmax(weights["scores"])
        x = jnp.einsum("l,lbnd->bnd", shares, output.intermediates["blocks"])
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        x = x * norm["scale"] + norm["bias"]
        x = x.mean(1) if family in ("mixer", "axial_vit") else x[:, 0]
        logits = x @ rest["head"]["kernel"] + rest["head"]["bias"]
        return jnp.square(logits - 1).sum(), logits

    expected, logits = jax.jit(jax.grad(read, has_aux=True))(weights)
    np.testing.assert_allclose(output.logits, logits, atol=1e-5)
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-4, atol=1e-5)
    # The norm takes a factor away, so that of its gradient little is left beside rounding.
    np.testing.assert_allclose(found["gain"], expected["gain"], atol=2e-4)


@pytest.mark.parametrize("family", slow_unless(["vit"], ["vit", "mixer"]))
def test_all_weight_on_one_layer_is_the_network_that_ends_with_it(kit, family):
    config = of_family(family)
    shorter = of_family(family, weighted_layers=False, depth=2)
    params = kit.parameters(config)
    weights, rest = split_weights(params, family)
    weights |= {"scores": np.array([0, 200, 0], np.float32), "gain": np.ones(1, np.float32)}

    def first(tree):
        two = lambda name, x: x[:2] if patterns.is_stacked(name) else x  # noqa: E731
        return patterns.map_named(two, tree)

    expected, output = gradients(kit, shorter, first(rest))
    (params["encoder"] if family == "vit" else params)["layer_weights"] = weights
    found, ours = gradients(kit, config, params)
    found = split_weights(found, family)[1]
    np.testing.assert_allclose(ours.logits, output.logits, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-7),
        first(found),
        expected,
    )
    layers = (found["encoder"] if family == "vit" else found)["layers"]
    assert not any(np.any(x[2]) for x in jax.tree.leaves(layers))


def test_how_layers_are_compiled_changes_nothing_of_their_sum(kit):
    options = dict(drop_path=0.5, pool="gem")
    key = jax.random.key(0)
    plain, other = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradients(kit, config, params, key))])
        for how in (dict(remat="none"), dict(remat="full", unroll=2))
        for config in [of_family("vit", **options, **how)]
        for params in [kit.parameters(config)]
    )
    # A third power triples what is rounded.
    assert np.linalg.norm(other - plain) <= 3e-6 * np.linalg.norm(plain)


def test_the_sum_of_layers_costs_the_backward_pass_no_further_copy_of_their_outputs(kit):
    def stored(**options):
        config = kit.config(remat="full", depth=8, **options)
        params = registry.abstract(config)[1]
        apply = lambda p: kit.apply(config, p, kit.images).tokens  # noqa: E731
        _, back = jax.eval_shape(lambda p: jax.vjp(apply, p), params)
        return sum(x.size for x in jax.tree.leaves(back))

    config = kit.config()
    output = len(kit.images) * config.tokens * config.width
    assert stored(weighted_layers=True) - stored() < 4 * output


@pytest.mark.parametrize(
    ("family", "pool"),
    slow_unless(
        [("vit", "gem"), ("mixer", "map")],
        [("vit", "gem"), ("vit", "map"), ("mixer", "map"), ("deepvit", "map"), ("localvit", "gem")],
    ),
)
def test_what_is_pooled_are_the_normalised_tokens(kit, family, pool):
    config = of_family(family, weighted_layers=False, pool=pool)
    params = kit.parameters(config)
    output = kit.run(config, params, kit.images)
    model = nnx.merge(registry.abstract(config)[0], params, statistics(config))
    assert output.tokens.shape == (4, 9, 16)
    pooled = nnx.jit(lambda pool, tokens: pool(tokens))(model.pool, output.tokens)
    np.testing.assert_allclose(output.features, pooled, rtol=1e-4, atol=1e-5)


FORMATS = [("vit", format) for format in ("official", "big_vision", "timm", "huggingface")]
FORMATS += [
    ("mixer", "official"),
    ("mixer", "timm"),
    ("deepvit", "authors"),
    ("localvit", "authors"),
]


@pytest.mark.parametrize(("family", "format"), FORMATS)
def test_no_other_code_has_generalised_means_or_sums_of_layers(kit, tmp_path, family, format):
    for options in ({}, dict(weighted_layers=False, pool="gem")):
        activation = "gelu" if format == "timm" else "gelu_tanh"
        if format != "authors":
            options |= dict(epsilon=1e-6, activation=activation)
        config = of_family(family, **options)
        checkpoint = formats.LoadedCheckpoint(config, kit.parameters(config))
        with pytest.raises(CheckpointError, match="no weighted_layers|pool.*gem|of the last layer"):
            formats.write_checkpoint(checkpoint, tmp_path / "x.npz", format)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_may_be_fine_tuned_by_what_its_layers_say(kit):
    source = kit.config()
    target = kit.config(weighted_layers=True)
    params, fresh = kit.parameters(source), registry.abstract(target)[1]
    adjust = functools.partial(fitting.adapt, params, source, fresh, target, resize="scipy")
    with pytest.raises(ConfigError, match=r"layer_weights/gain \(1,\) is not in the checkpoint"):
        adjust(reset=())
    found = adjust(reset=["head/.*", ".*layer_weights/.*"])
    new, rest = split_weights(found, "vit")
    assert new == fresh["encoder"]["layer_weights"]  # which are shapes
    np.testing.assert_array_equal(rest["class_token"], params["class_token"])


def test_attention_pooling_of_a_mixer_has_heads_of_64_channels():
    with pytest.raises(ConfigError, match="a head for 64 channels, 3 in all, and model width 200"):
        registry.model_config("Mixer-S/16", width=200, pool="map")
    with pytest.raises(ConfigError, match="'token' is not one of mean, gem, map"):
        registry.model_config("Mixer-S/16", pool="token")
