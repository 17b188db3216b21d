"""Dynamic Vision Transformers against their authors' code, their formula in float64, and the networks
that they consist of.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.models import oracles
from tests.models.conftest import apply, parameters, run, statistics
from tests.models.test_t2t import soft_split, token_layer
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.interchange.conversions import translation
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.models import registry
from vit_jax.models.zoo import dynamic_vit, reuse, t2t, vit_zoo
from vit_jax.objectives.contract import Learner, ObjectiveContext
from vit_jax.objectives.supervised import Supervised, SupervisedOptions

# Trainable parameters, and G multiply-adds up to each exit, facts §13; published ones are within 2 %.
COSTS = [
    ("DVT-T2T-ViT-12", "none", 20_789_580, (0.47, 1.36, 3.12)),
    ("DVT-T2T-ViT-12", "feature", 22_332_108, (0.47, 1.41, 3.28)),
    ("DVT-T2T-ViT-12", "relation", 20_817_612, (0.47, 1.39, 3.30)),
    ("DVT-T2T-ViT-12", "both", 22_360_140, (0.47, 1.45, 3.46)),
    ("DVT-T2T-ViT-14", "none", 64_524_876, None),
    ("DVT-T2T-ViT-14", "both", 67_735_916, (1.20, 3.82, 9.26)),
    ("DVT-DeiT-S", "none", 67_257_912, None),
    ("DVT-DeiT-S", "both", 70_442_232, (1.14, 3.64, 8.80)),
]
REUSE = {
    "none": dict(feature_reuse=False, relation_reuse=False),
    "feature": dict(relation_reuse=False),
    "relation": dict(feature_reuse=False),
    "both": {},
}
NAMES = {"t2t": "DVT-T2T-ViT-12", "deit": "DVT-DeiT-S"}
TINY = dict(
    image_size=(8, 12), depth=2, width=16, mlp_dim=32, heads=2, feature_width=4, feature_hidden=8,
    num_classes=5, remat="none", unroll=1,
)  # fmt: skip
# Grids that are no multiples of each other; T2T's windows of 3 pixels, DeiT's of 4 and of 3, with zeros
# around the image.
ORDER = np.array([2, 0])
GRIDS = {"t2t": ((1, 2), (2, 3)), "deit": ((2, 3), (4, 5))}


def tiny(backbone="deit", **options):
    own = dict(token_width=8, random_features=4) if backbone == "t2t" else {}
    return registry.model_config(
        NAMES[backbone], **TINY | dict(grids=GRIDS[backbone]) | own | options
    )


def images(config, batch=3):
    shape = (batch, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def averaged(x, axis, new):
    """Every place repeated until there are enough, then means over `new` windows."""
    old = x.shape[axis]
    x = np.repeat(x, -(-new // old), axis)
    n = x.shape[axis]
    windows = [range(i * n // new, -(-(i + 1) * n // new)) for i in range(new)]
    return np.stack([x.take(w, axis).mean(axis) for w in windows], axis)


def resized(x, axis, old, new):
    """Patches row by row along an axis, which the class token leads, to another grid."""
    x = np.moveaxis(x, axis, 0)
    grid = averaged(averaged(x[1:].reshape(*old, *x.shape[1:]), 0, new[0]), 1, new[1])
    return np.moveaxis(np.concatenate([x[:1], grid.reshape(-1, *x.shape[1:])]), 0, axis)


def mapped(p, maps):
    """Attention logits (B, maps, M, M), mapped by an MLP."""
    mix = lambda p, x: np.einsum("bnqk,nm->bmqk", x, p["kernel"]) + p["bias"][:, None, None]  # noqa: E731
    return mix(p["down"], oracles.gelu(mix(p["up"], maps)))


def tokens_of(config, network, p, x):
    """Images to tokens without positions."""
    if config.backbone == "t2t":
        for name, split in zip(("first", "second"), network.splits, strict=False):
            x = token_layer(p[name], x, split)
        x = soft_split(x, *network.splits[2])
        return oracles.linear(p["project"], x.reshape(len(x), -1, x.shape[-1]))
    side, _, padding = network.windows
    after = [n * side - padding for n in network.grid]
    sides = [(padding, end - length) for end, length in zip(after, x.shape[1:3], strict=True)]
    return oracles.patches(p, np.pad(x, ((0, 0), *sides, (0, 0))))


def forward(config, p, x):
    """Logits of every exit in float64 (DVT §3; facts §13)."""
    exits, before, blocks, relations = [], None, None, None
    for name, network in zip(dynamic_vit.exit_names(config), config.networks, strict=True):
        logits, blocks, relations = one_exit(config, network, p[name], x, before, blocks, relations)
        exits.append(logits)
        before = network.grid
    return np.stack(exits)


def one_exit(config, network, p, images, before, blocks, relations):
    """Logits, and of each layer the tokens after it and its attention logits."""
    norm = functools.partial(oracles.layer_norm, epsilon=config.epsilon)
    x = tokens_of(config, network, p["embedding"], images)
    x = np.concatenate([np.repeat(p["class_token"], len(x), 0), x], 1) + p["position"]
    heads, biases = config.heads, None
    if relations is not None and config.relation_reuse:
        biases = mapped(p["relations"], np.concatenate(relations, 1))
    found, after = [], []
    for i in range(config.depth):
        block = oracles.layer(p["encoder"]["layers"], i)
        q, k, v = np.einsum(
            "bnd,dthc->tbhnc", norm(block["attention_norm"], x), block["attention"]["qkv"]["kernel"]
        )
        if "bias" in block["attention"]["qkv"]:
            q, k, v = (
                y + bias[:, None]
                for y, bias in zip((q, k, v), block["attention"]["qkv"]["bias"], strict=True)
            )
        logits = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
        bias = None if biases is None else biases[:, i * heads : (i + 1) * heads]
        if bias is not None:
            bias = resized(resized(bias, 3, before, network.grid), 2, before, network.grid)
        logits = logits if bias is None else logits + bias
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        x = y = x + oracles.attended(block["attention"], weights, v)
        if "features" in block:
            feature = norm(block["features"]["norm"], blocks[-1])
            mlp = block["features"]["mlp"]
            feature = oracles.linear(mlp["down"], oracles.gelu(oracles.linear(mlp["up"], feature)))
            feature = resized(feature, 1, before, network.grid)
            feature[:, 0] = 0
            y = np.concatenate([y, feature], -1)
        y = oracles.gelu(oracles.linear(block["mlp"]["up"], norm(block["mlp_norm"], y)))
        x = x + oracles.linear(block["mlp"]["down"], y)
        found.append(logits)
        after.append(x)
    return oracles.linear(p["head"], norm(p["encoder"]["norm"], x)[:, 0]), after, found


@functools.cache
def answers():
    """Config, parameters and images; the output; logits and what is carried of each exit by itself; and
    logits of the second for images in another order, with what they carry.
    """
    config = tiny()
    params = parameters(config)

    @jax.jit
    def answer(params, x):
        model = nnx.merge(registry.abstract(config)[0], params, statistics(config))
        first, carried = model.exit(0, x)
        second, nothing = model.exit(1, x, carried)
        shuffled, _ = model.exit(1, x[ORDER], jax.tree.map(lambda a: a[ORDER], carried))
        return model(x), (first, second), (carried, nothing), shuffled

    return config, params, images(config), jax.device_get(answer(params, images(config)))


@pytest.mark.parametrize(
    ("name", "reused", "count", "products"),
    [pytest.param(*case, marks=() if case[1] == "both" else pytest.mark.slow) for case in COSTS],
)
def test_parameters_and_multiply_adds_are_those_of_the_authors_code(name, reused, count, products):
    config = registry.model_config(name, **REUSE[reused])
    assert registry.count_parameters(config) == count
    assert len(config.exit_flops) == 3 and config.flops() == config.exit_flops[-1]
    if products:
        np.testing.assert_allclose(np.array(config.exit_flops) / 2e9, products, atol=0.0066)


@pytest.mark.parametrize(
    "name",
    [
        "dvt_t2t12_both",
        *(
            pytest.param(f"dvt_{name}", marks=pytest.mark.slow)
            for name in ("t2t12_none", "t2t12_feature", "t2t12_relation", "deit_both")
        ),
    ],
)
def test_logits_features_and_relations_are_those_of_the_authors_code(name, shared_data):
    path, _, expected, arguments = oracles.relative_of(shared_data, name)
    said = {} if arguments["relation_reuse"] else {"heads": arguments["num_heads"]}
    model = vit_jax.load(path, **said)
    assert model.config.heads == arguments["num_heads"] and model.config.image_size == 224

    @jax.jit
    def answer(x):
        found, carried = [], None
        for index in range(model.num_exits):
            logits, carried = model.exit(index, x, carried)
            found.append((logits, carried))
        return found

    for i, (logits, carried) in enumerate(jax.device_get(answer(expected["images"]))):
        oracles.assert_close(logits, expected[f"logits_{i}"])
        if "features" in carried:
            tokens = expected[f"tokens_{i}"][:, 1:]
            oracles.assert_close(carried["features"][:1], tokens)
        if "relations" in carried:
            found = carried["relations"][:1, :, :8]
            oracles.assert_close(found, expected[f"relations_{i}"])


def test_the_loss_and_its_gradients_are_those_of_the_authors_code(shared_data):
    path, _, theirs, _ = oracles.relative_of(shared_data, "dvt_deit_both_train")
    model = vit_jax.load(path)
    definition, weights = registry.split(model)
    objective = Supervised(
        SupervisedOptions(), ObjectiveContext(model.config, (0.5,) * 3, (0.5,) * 3, 1, int)
    )
    batch = {"image": theirs["images"], "label": theirs["targets"]}

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def learn(params):
        model = nnx.merge(definition, params, weights.variables)
        losses, _ = objective(Learner(model, None, None, 0), batch, nnx.Rngs(0))
        return losses.mean(), model(batch["image"]).exits

    (loss, exits), gradient = jax.device_get(learn(weights.params))
    for i, logits in enumerate(exits):
        np.testing.assert_allclose(logits, theirs[f"logits_{i}"], atol=1e-5)
    np.testing.assert_allclose(loss, theirs["loss"], rtol=1e-6)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(norm, theirs["grad_norm"], rtol=1e-5)
    of_authors = conversions_of(dynamic_vit)["authors"]
    found = dict(translation.to_theirs(of_authors.rules(model.config, {}), gradient))
    checked = [name for name in theirs if name.startswith("grad/")]
    assert len(checked) == 11
    for name in checked:
        expected = theirs[name]
        atol = 1e-5 * max(np.abs(expected).max(), 0.01)
        np.testing.assert_allclose(
            found[name.removeprefix("grad/")], expected, atol=atol, err_msg=name
        )


@pytest.mark.parametrize(
    "backbone", ["deit", pytest.param("t2t", marks=pytest.mark.slow)], ids=["DeiT", "T2T"]
)
def test_logits_are_those_of_the_formula_and_gradients_its_slopes(backbone):
    config = tiny(backbone)
    params, variables, x = parameters(config), statistics(config), images(config)
    weigh = np.sin(1.0 + np.arange(30)).reshape(2, 3, 5)

    def loss(params):
        exits = apply(config, params, x).exits
        return jnp.sum(exits * weigh), exits

    gradient, exits = jax.jit(jax.grad(loss, has_aux=True))(params)
    exact = functools.partial(oracles.in_float64, variables=variables)
    np.testing.assert_allclose(exits, forward(config, exact(params), x), atol=1e-5)

    gradients = dict(zip(patterns.names(gradient), jax.tree.leaves(gradient), strict=True))
    in_double = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    slopes = oracles.directional(lambda p: np.sum(forward(config, exact(p), x) * weigh), in_double)
    for name, direction, slope in slopes:
        found = np.sum(np.asarray(gradients[name], np.float64) * direction)
        scale = np.linalg.norm(gradients[name]) * np.linalg.norm(direction)
        assert found == pytest.approx(slope, abs=1e-4 * scale + 1e-6), name


def test_exits_one_by_one_are_those_of_the_full_forward_pass():
    config, _, _, (output, logits, (carried, nothing), shuffled) = answers()
    np.testing.assert_allclose(output.exits, logits, atol=1e-6)
    np.testing.assert_array_equal(output.logits, output.exits[-1])
    patches = config.networks[0].tokens - 1
    shapes = {"features": (3, patches, 16), "relations": (3, 4, patches + 1, patches + 1)}
    assert {name: x.shape for name, x in carried.items()} == shapes
    assert not jax.tree.leaves(nothing)
    # What is carried belongs to its image: in another order, and without some.
    np.testing.assert_allclose(shuffled, output.exits[1][ORDER], atol=1e-5)


@pytest.mark.parametrize("backbone", ["deit", pytest.param("t2t", marks=pytest.mark.slow)])
def test_without_reuse_each_exit_is_its_backbone_and_with_it_the_first_is(backbone):
    grids = GRIDS["t2t"] if backbone == "t2t" else ((2, 3), (4, 6))
    config = tiny(backbone, grids=grids, **REUSE["none"])
    both = tiny(backbone, grids=grids)
    params, variables = parameters(both), statistics(both)
    like = registry.abstract(config)[1]
    leaves = dict(zip(patterns.names(params), jax.tree.leaves(params), strict=True))
    shapes = patterns.map_named(lambda name, leaf: leaves[name].shape == leaf.shape, like)
    plain = parameters(config)
    plain = patterns.map_named(lambda name, fits, own: leaves[name] if fits else own, shapes, plain)
    family = {"t2t": t2t, "deit": vit_zoo}[backbone]

    @jax.jit
    def compare(params, plain, x):
        apart = []
        for name, network in zip(dynamic_vit.exit_names(config), config.networks, strict=True):
            abstract = nnx.eval_shape(lambda n=network: family.Model(n, rngs=nnx.Rngs(0)))
            definition = registry.split(abstract)[0]
            apart.append(nnx.merge(definition, plain[name], variables.get(name, {}))(x).logits)
        return apply(config, plain, x).exits, apart, apply(both, params, x).exits

    found, apart, reusing = compare(params, plain, images(config))
    oracles.assert_close(np.array(found), np.array(apart), 1e-6)
    oracles.assert_close(reusing[0], apart[0], 1e-6)
    assert np.abs(reusing[1] - apart[1]).max() > 1e-2


def test_what_is_reused_has_no_effect_when_its_mlp_gives_zeros():
    """Zeroed relations are no relations. Zeroed features are not quite none: the second norm counts
    them; but then an exit knows nothing of the one before.
    """
    config, without = tiny(), tiny(relation_reuse=False)
    params = parameters(config)

    def zeroed(name, x):
        ends = ("relations/down/kernel", "relations/down/bias")
        ends += ("features/mlp/down/kernel", "features/mlp/down/bias")
        return np.zeros_like(x) if name.endswith(ends) else x

    params = patterns.map_named(zeroed, params)
    second = {name: x for name, x in params["exit_2"].items() if name != "relations"}
    on = jax.jit(lambda p, x: apply(config, p, x).exits)
    off = jax.jit(lambda p, x: apply(without, p, x).exits)
    x = images(config)
    found = on(params, x)
    expected = np.array(off(params | {"exit_2": second}, x))
    oracles.assert_close(np.array(found), expected, 1e-6)
    other = params | {"exit_1": jax.tree.map(np.negative, params["exit_1"])}
    found_after = on(other, x)
    np.testing.assert_array_equal(found_after[1], found[1])
    assert np.abs(found_after[0] - found[0]).max() > 0.1


@pytest.mark.parametrize(("old", "new"), [(7, 10), (10, 14), (7, 14), (3, 5), (4, 4)])
def test_grids_are_resized_as_pytorch_repeats_and_averages(old, new):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(2, old * old, 3)).astype(np.float32)
    maps = torch.from_numpy(x.transpose(0, 2, 1).reshape(2, 3, old, old).copy())
    size = -(-new // old) * old
    expected = torch.nn.functional.interpolate(maps, (size, size), mode="nearest")
    expected = torch.nn.functional.adaptive_avg_pool2d(expected, (new, new)).numpy()
    found = np.einsum("nm,bmc->bnc", reuse.resizing((old, old), (new, new)), x)
    expected = expected.reshape(2, 3, -1).transpose(0, 2, 1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_stochastic_depth_is_on_in_training_alone():
    _, params, x, (exact, *_) = answers()
    config = tiny(drop_path=0.5)
    drawn = run(config, params, x, jax.random.key(0)).exits
    for i in range(2):
        assert np.abs(exact.exits[i] - drawn[i]).max() > 1e-3
    model = nnx.merge(registry.abstract(config)[0], params, statistics(config))
    with pytest.raises(ValueError, match="needs rngs unless deterministic=True"):
        model(x, deterministic=False)


@pytest.mark.parametrize(
    ("grids", "windows"),
    [
        ((7, 14), ((14, 8, 3), (7, 4, 2))),
        ((4, 7, 10, 14), ((27, 14, 0), (14, 8, 3), (11, 6, 5), (7, 4, 2))),
    ],
)
def test_any_rising_grids_that_images_give_get_their_windows(grids, windows):
    config = registry.model_config("DVT-T2T-ViT-12", grids=grids)
    found = tuple(network.windows for network in config.networks)
    assert found[-2:] == windows[-2:] and len(config.exit_flops) == len(grids)
    assert [network.grid for network in config.networks] == [(g, g) for g in grids]


@pytest.mark.parametrize(
    ("name", "size", "grids", "windows"),
    [
        ("DVT-T2T-ViT-12", 112, (4, 5, 7), ((14, 8, 3), (11, 6, 5), (7, 4, 2))),
        ("DVT-DeiT-S", 384, (12, 17, 24), ((32, 32, 0), (23, 23, 4), (16, 16, 0))),
    ],
)
def test_at_another_resolution_windows_stay_and_grids_change(name, size, grids, windows):
    found = registry.model_config(name).options_for_image_size(size)
    assert found == {"windows": windows, "grids": grids}
    assert registry.model_config(name, image_size=size, **found).grids == grids


def test_published_patches_of_deit_are_those_of_the_authors_code():
    config = registry.model_config("DVT-DeiT-S")
    windows = tuple(network.windows for network in config.networks)
    assert windows == ((32, 32, 0), (23, 23, 3), (16, 16, 0))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("DVT-T2T-ViT-13", {}, "there is no DVT of size 'T2T-ViT-13'; did you mean 'T2T-ViT-1"),
        ("DVT-DeiT-S", {"grids": (10, 7)}, "10,7: each exit must have more tokens than the previous one"),
        ("DVT-DeiT-S", {"grids": (7, 7)}, "7,7: each exit must have more tokens"),
        ("DVT-DeiT-S", {"grids": ((7, 10), (10, 7))}, "7x10,10x7: each exit must have more"),
        ("DVT-DeiT-S", {"grids": ()}, "each exit must have more tokens"),
        (
            "DVT-DeiT-S",
            {"grids": (7, 100)},
            "model.grids: images of 224 pixels cannot be split into 100x100 tokens by the windows of a "
            "deit backbone; nearest grids that fit: ",
        ),
        (
            "DVT-T2T-ViT-12",
            {"image_size": 32},
            "images of 32 pixels cannot be split into 7x7 tokens by the windows of a t2t backbone; nearest "
            "grids that fit: 4,5,8",
        ),
        (
            "DVT-DeiT-S",
            {"windows": ((32, 32, 0), (23, 23, 3))},
            "must be the side, stride and padding of windows for each of the 3 exits",
        ),
        (
            "DVT-DeiT-S",
            {"windows": ((32, 32, 0), (23, 23, 3), (8, 8, 0))},
            "model.windows = (8, 8, 0) cut images of 224 pixels into 28x28 tokens, not into the 14x14",
        ),
        (
            "DVT-DeiT-S",
            {"windows": ((32, 32, 0), (23, 20, 3), (16, 16, 0))},
            "patches of a deit backbone do not overlap",
        ),
        ("DVT-DeiT-S", {"position": "sinusoid"}, "set model.position=learned"),
        ("DVT-DeiT-S", {"width": (384, 256, 384)}, "model.width = (384, 256, 384) must be a whole"),
        ("DVT-DeiT-S", {"heads": 5}, "width 384 cannot be split into 5 heads"),
        ("DVT-DeiT-S", {"feature_source": "layers"}, "feature_source = 'layers', but only 'last' is still"),
    ],
)  # fmt: skip
def test_what_is_no_cascade_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        registry.model_config(name, **options)


def test_a_config_of_an_earlier_version_is_read_without_its_ablations():
    saved = {"feature_norm": True, "relation_source": "all"}
    assert registry.model_config("DVT-DeiT-S", **saved) == registry.model_config("DVT-DeiT-S")


@pytest.mark.slow
def test_a_small_one_learns_digits_by_the_recipes_smoke_argument(command, tmp_path):
    code, *_ = command("train", "--config=configs/dynamic_vit.py:smoke", f"--workdir={tmp_path}")
    assert code == 0
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/accuracy"] >= 0.95
