"""What every family promises, whatever is in it: `docs/extending.md` says it to who writes one."""

import dataclasses
import functools
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.conftest import apply, parameters, statistics
from tests.repeats import slow_unless
from vit_jax.base import patterns, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.devices import meshes
from vit_jax.interchange import fitting, formats
from vit_jax.models import classifier, layer_features, registry
from vit_jax.models.contract import ModelOutput

BATCH, CLASSES = 8, 5
COMMON = dict(num_classes=CLASSES, remat="none", unroll=1, dtype_on_cpu="same")
# By family: a listed name, options that make it tiny, and its parameters, counted by hand.
TINY = {
    "vit": (
        "ViT-mu/16",
        dict(image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, heads=2),
        # patches, positions, class token, blocks, last norm, head
        49 * 16 + 7 * 16 + 16 + 2 * (4 * 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16) + 32 + 17 * 5,
    ),
    "hybrid": (
        "R+ViT-Ti/16",
        dict(image_size=(16, 24), patch=1, units=(1,), width_factor=0.5, depth=2, width=16,
             mlp_dim=32, heads=2),
        # as above, over (4, 6) patches of 128 channels; root and unit of the ResNet
        129 * 16 + 25 * 16 + 16 + 2 * (4 * 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16) + 32 + 17 * 5
        + (147 * 32 + 64) + (32 * 32 + 9 * 32 * 32 + 32 * 128 + 128 + 256 + 32 * 128 + 256),
    ),
    "mixer": (
        "Mixer-S/32",
        dict(image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, token_mlp_dim=8),
        49 * 16 + 2 * (7 * 8 + 9 * 6 + 17 * 32 + 33 * 16 + 4 * 16) + 32 + 17 * 5,
    ),
    "resnet": (
        "BiT-R50x1",
        dict(image_size=(16, 24), units=(2,), width_factor=0.5),
        # root, first unit with its shortcut, second unit, last norm, head
        147 * 32 + (64 + 32 * 32 + 64 + 9 * 32 * 32 + 64 + 32 * 128 + 32 * 128)
        + (256 + 128 * 32 + 64 + 9 * 32 * 32 + 64 + 32 * 128) + 256 + 129 * 5,
    ),
    "deepvit": (
        "DeepViT-S",
        dict(image_size=(8, 12), patch=4, stages=(1, 1), width=16, mlp_dim=32, heads=2,
             conv_stem=False),
        # as a ViT; Θ of the second block, its bias and norm
        49 * 16 + 7 * 16 + 16 + 2 * (4 * 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16) + 32 + 17 * 5
        + (2 * 2 + 2 + 2 * 2),
    ),
    "localvit": (
        "LocalViT-T",
        dict(image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, heads=2, reduction=8),
        # patches, positions, class token, blocks' attention and norm, last norm, head
        49 * 16 + 7 * 16 + 16 + 2 * (4 * 17 * 16 + 2 * 16) + 32 + 17 * 5
        # MLPs: three convolutions and their norms, squeeze-excite
        + 2 * (16 * 32 + 9 * 32 + 32 * 16 + 2 * (32 + 32 + 16) + 33 * 4 + 5 * 32),
    ),
    "crossvit": (
        "CrossViT-S",
        dict(image_size=(8, 12), large_image_size=(6, 9), patch=3, width=16, mlp_dim=32, heads=2,
             small_patch=4, small_width=8, small_mlp_dim=16, depths=((1, 2),)),
        # of each branch: patches, class token and positions, blocks, last norm, head
        49 * 8 + 8 * 8 + (4 * 9 * 8 + 9 * 16 + 17 * 8 + 4 * 8) + 16 + 9 * 5
        + 28 * 16 + 8 * 16 + 2 * (4 * 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16) + 32 + 17 * 5
        # class tokens in the other branch: two projections with their norms, norm, attention
        + (16 + 9 * 16 + 32 + 17 * 8) + 32 + 4 * 17 * 16
        + (32 + 17 * 8 + 16 + 9 * 16) + 16 + 4 * 9 * 8,
    ),
    "t2t": (
        "T2T-ViT-7",
        dict(image_size=(8, 12), first_split=(3, 2, 1), token_width=8, random_features=4, depth=2,
             width=16, mlp_dim=32, heads=2),
        # two layers between the splits, the last of these, class token, blocks, last norm, head
        sum(2 * n + (n + 1) * 24 + 3 * 9 * 8 + 16 for n in (27, 72)) + 73 * 16
        + 16 + 2 * (16 * 48 + 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16) + 32 + 17 * 5,
    ),
    "cait": (
        "CaiT-XXS24",
        dict(image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, heads=2),
        # patches, positions, class token, all blocks with LayerScale, two mixings of heads, last norm, head
        49 * 16 + 6 * 16 + 16 + 4 * (4 * 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16 + 2 * 16) + 2 * 2 * (2 * 2 + 2)
        + 32 + 17 * 5,
    ),
    "radio": (
        "C-RADIOv4-H/16",
        dict(image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, heads=2, table_side=4,
             registers=0),
        # patches without a bias, the table of positions, three class tokens, blocks, a head of two class tokens
        48 * 16 + 16 * 16 + 3 * 16 + 2 * (4 * 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16) + 33 * 5,
    ),
    "dynamic_vit": (
        "DVT-DeiT-S",
        dict(image_size=(8, 12), grids=((2, 3), (4, 6)), depth=2, width=16, mlp_dim=32, heads=2,
             feature_width=4, feature_hidden=8),
        # as two ViTs of patches of 4 and of 2
        49 * 16 + 13 * 16 + (7 + 25) * 16
        + 2 * (16 + 2 * (4 * 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16) + 32 + 17 * 5)
        # features into two layers, relations of 2 x 2 maps
        + 2 * (2 * 4 + 4 * 32 + 32 + 17 * 8 + 9 * 4) + (5 * 12 + 13 * 4),
    ),
    "feed_forward": (
        "FF-Ti/16",
        dict(image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, token_mlp_dim=8,
             position_grid=(2, 2)),
        # patches, positions, class token, blocks over channels and over tokens, last norm, head
        49 * 16 + 5 * 16 + 16 + 2 * (17 * 32 + 33 * 16 + 32) + 2 * (8 * 8 + 9 * 7 + 14) + 32 + 17 * 5,
    ),
    "efficientnet": (
        "EfficientNet-B0",
        dict(image_size=(16, 24), units=(1, 2), width_factor=0.25),
        # root, first block, two blocks of 48 channels inside, last convolution, head
        27 * 8 + 16 + (9 * 8 + 16 + 9 * 2 + 3 * 8 + 8 * 8 + 16)
        + 2 * (8 * 48 + 96 + 9 * 48 + 96 + 49 * 2 + 3 * 48 + 48 * 8 + 16)
        + 8 * 320 + 640 + 321 * 5,
    ),
    "axial_vit": (
        "Axial-ViT-B/16",
        dict(image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, heads=2),
        # as a ViT without class token, whose blocks have everything twice
        49 * 16 + 6 * 16 + 2 * 2 * (4 * 17 * 16 + 17 * 32 + 33 * 16 + 4 * 16) + 32 + 17 * 5,
    ),
    "axial_resnet": (
        "AxialResNet-50",
        # Norms of fewer places, or of one channel each, blow rounding up.
        dict(image_size=(20, 36), units=(2,), heads=8),
        # root, first unit with its shortcut, second unit, head
        147 * 64 + 128 + (64 * 64 + 128 + 64 * 256 + 512 + 64 * 256 + 512)
        + (256 * 64 + 128 + 64 * 256 + 512) + 257 * 5
        # in both units attention along columns of 5 and rows of 9
        + 2 * (2 * (64 * 128 + 256 + 128) + 16 * 9 + 16 * 17),
    ),
}  # fmt: skip
# Features beside those of one token of the output: of a CrossViT's other branch, of a C-RADIO's second class token.
BESIDE = {"crossvit": 8, "radio": 16}
FAMILIES = list(registry.FAMILIES)
# How it is compiled matters where layers are put together: in stacks, beside stacks, with statistics.
QUICK = ("vit", "resnet", "t2t", "efficientnet", "dynamic_vit")
SOME = slow_unless(QUICK, FAMILIES)
# These are put together from what others cut over a mesh: attention, MLPs, convolutions.
COMPOSED = (
    "hybrid", "deepvit", "localvit", "t2t", "dynamic_vit", "axial_vit", "axial_resnet", "radio", "feed_forward",
)  # fmt: skip
CUT = slow_unless([f for f in FAMILIES if f not in COMPOSED], FAMILIES)


@functools.cache
def tiny(family, **options):
    name, own, _ = TINY[family]
    return registry.model_config(name, **COMMON | own | options)


@functools.cache
def weights(family):
    return parameters(tiny(family))


def images(config, batch=BATCH):
    shape = (batch, *config.height_width, config.channels)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def logits_of(output):
    """Of all heads or exits."""
    return output.logits if output.exits is None else output.exits


def learn(config, params, x, **options):
    """The gradient of the logits, each weighed differently, and the output."""

    def loss(params):
        output = apply(config, params, x, **options)
        logits = logits_of(output)
        weighed = logits * jnp.sin(1.0 + jnp.arange(logits.size).reshape(logits.shape))
        return jnp.sum(weighed), output

    return jax.grad(loss, has_aux=True)(params)


def learned(config, params, x):
    """Logits and their gradient, by the model as in training."""
    gradient, output = jax.jit(functools.partial(learn, config))(params, x)
    return logits_of(output), gradient


@functools.cache
def with_layers(family):
    """The gradient, the output with what layers compute, and the last layer: one program for most tests of a family."""
    config = tiny(family)

    @jax.jit
    def program(params, x):
        gradient, output = learn(config, params, x, capture=True)
        model = nnx.merge(registry.abstract(config)[0], params, statistics(config))
        return gradient, output, *layer_features.select(model, output.intermediates, [-1])

    return program(weights(family), images(config))


def expected(family):
    """What `learned` is compared with."""
    gradient, output, _ = with_layers(family)
    return logits_of(output), gradient


def assert_close(found, expected):
    """Trees that differ by rounding alone; gradients of each parameter relative to its largest."""
    for name, one, other in zip(
        patterns.names(expected), *map(jax.tree.leaves, (found, expected)), strict=True
    ):
        one, other = np.asarray(one), np.asarray(other)
        atol = 1e-4 * max(np.abs(other).max(), 1e-2)
        np.testing.assert_allclose(one, other, atol=atol, err_msg=name)


def test_every_family_is_in_this_test():
    assert list(TINY) == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_listed_name_is_the_familys_and_says_what_it_costs(family):
    module = registry.FAMILIES[family]
    for name in module.VARIANTS:
        assert registry.family_named(name) is module
    assert module.options_from_name("Nobody-S/4") is None
    config = tiny(family)
    assert registry.family_of(config) is module and config.flops() > 0 and config.tokens > 0
    # A config goes through JSON, as in the description of a checkpoint.
    assert registry.model_config(TINY[family][0], **dataclasses.asdict(config)) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_exactly_and_lie_where_layers_are_said_to_be(family):
    config = tiny(family)
    params = registry.abstract(config)[1]
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == TINY[family][2]
    assert registry.count_parameters(config) == TINY[family][2]
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
    names = patterns.names(params)
    shapes = dict(zip(names, (x.shape for x in jax.tree.leaves(params)), strict=True))
    assert {shapes[name][-2] for name in config.image_kernels} <= {config.channels}
    for prefix, count in config.layers.items():
        of_layer = [shape for name, shape in shapes.items() if name.startswith(f"{prefix}/")]
        assert of_layer
        if prefix.endswith("layers"):
            assert {shape[0] for shape in of_layer} == {count}


@pytest.mark.parametrize("family", ["vit", "t2t", "crossvit"])
def test_parameters_are_drawn_with_the_keys_of_flax(family):
    programs = [
        jax.jit(lambda r=r: nnx.state(registry.build(tiny(family), rngs=r(0)), nnx.Param)).lower()
        for r in (nnx.Rngs, registry.Rngs)
    ]
    assert programs[0].as_text() == programs[1].as_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_images_become_logits_features_and_tokens(family):
    config = tiny(family)
    arguments = weights(family), images(config)
    output = jax.eval_shape(functools.partial(apply, config), *arguments)
    _, captured, _ = with_layers(family)
    assert isinstance(captured, ModelOutput) and output.intermediates == {}
    for found in (output, captured):
        assert found.logits.shape == (BATCH, CLASSES) and found.logits.dtype == jnp.float32
        assert found.features.ndim == 2 and found.features.shape[0] == BATCH
        width = found.features.shape[1] - BESIDE.get(family, 0)
        assert found.tokens.shape == (BATCH, config.tokens, width)
        assert found.exits is None or found.exits.shape[1:] == found.logits.shape
    assert captured.intermediates and all(x.size for x in captured.intermediates.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_after_the_last_norm_is_what_the_head_reads(family):
    config, (_, found, last) = tiny(family), with_layers(family)
    assert last.name in layer_features.check_layers(config, (-1,))
    patches = found.tokens[:, -math.prod(last.grid) :]
    assert last.map.shape[1:3] == last.grid
    if family == "efficientnet":  # A convolution comes after its last stage.
        assert last.patches.shape[:2] == patches.shape[:2]
    else:
        np.testing.assert_allclose(last.patches, patches, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [("cait", {}), ("vit", {"position": "bias2d"}), ("vit", {"token_merging": 2})],
)
def test_batches_of_any_size_are_traced_as_exports_do(family, options):
    config = dataclasses.replace(tiny(family), **options)
    definition, weights = registry.abstract_weights(config)
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, *config.height_width, 3), jnp.float32)
    output = jax.eval_shape(lambda w, x: nnx.merge(definition, *w)(x), weights, x)
    assert output.logits.shape == (batch, CLASSES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_gradient(family):
    gradient, *_ = with_layers(family)
    leaves = zip(patterns.names(gradient), jax.tree.leaves(gradient), strict=True)
    without = {name for name, leaf in leaves if np.abs(leaf).max() < 1e-5}
    # What a token MLP adds to all channels alike, each norm over channels takes away; what is added
    # to all of a softmax's logits alike, this does.
    useless = {
        "mixer": {"layers/token_mlp/down/bias"},
        "dynamic_vit": {"exit_2/relations/down/bias"},
        "cait": {"layers/attention/before/bias"},
    }
    assert without == useless.get(family, set())


@pytest.mark.parametrize("family", SOME)
def test_recomputing_and_unrolling_change_nothing(family):
    config = tiny(family, remat="full", unroll=0)
    assert_close(learned(config, weights(family), images(config)), expected(family))


@pytest.mark.parametrize("family", SOME)
def test_bfloat16_rounds_the_body_but_not_parameters_or_logits(family):
    config = tiny(family, dtype="bfloat16")
    like = registry.abstract(config)[1]
    assert {x.dtype for x in jax.tree.leaves(like)} == {np.dtype("float32")}
    output = jax.jit(functools.partial(apply, config))(weights(family), images(config))
    assert output.logits.dtype == jnp.float32 and output.tokens.dtype == jnp.bfloat16
    logits = np.asarray(expected(family)[0])
    found = logits_of(output)
    np.testing.assert_allclose(found, logits, atol=0.1 * np.abs(logits).max())
    assert np.abs(found - logits).max() > 1e-5


@pytest.mark.parametrize("family", CUT)
def test_a_model_cut_over_data_fsdp_and_tensor_learns_what_one_device_learns(family):
    config, made = tiny(family), meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    shardings = meshes.shardings(
        weights(family), made, fsdp_min_size=0, tensor_rules=config.tensor_rules
    )
    cut = {axis for s in jax.tree.leaves(shardings) for axis in s.spec if axis}
    # A ResNet has nothing that one all-reduce would join again.
    assert cut == ({"fsdp"} if family.endswith("resnet") else {"fsdp", "tensor"})
    params = jax.device_put(weights(family), shardings)
    x = jax.device_put(images(config), meshes.batch_sharding(made))
    with jax.set_mesh(made):
        found = learned(config, params, x)
    assert_close(found, expected(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_loaded_bit_by_bit(family, tmp_path):
    config = tiny(family)
    written = formats.LoadedCheckpoint(config, weights(family), variables=statistics(config))
    formats.write_checkpoint(written, tmp_path / "run", "orbax")
    found = formats.read_checkpoint(tmp_path / "run")
    assert found.model_config == config
    arrays = ((x.params, x.variables) for x in (found, written))
    for one, other in zip(*map(jax.tree.leaves, arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_classes_there_is_no_head_and_the_rest_is_the_same(family):
    config = tiny(family)
    headless = tiny(family, num_classes=0)
    like = registry.abstract(headless)[1]
    dropped = set(patterns.names(weights(family))) - set(patterns.names(like))
    assert (
        dropped
        == {name for name in patterns.names(weights(family)) if "head" in name.split("/")}
        == set(patterns.matching(config.reset_patterns(headless), patterns.names(weights(family))))
        == set(patterns.matching((classifier.HEADS,), patterns.names(weights(family))))
    )
    leaves = dict(
        zip(patterns.names(weights(family)), jax.tree.leaves(weights(family)), strict=True)
    )
    params = patterns.map_named(lambda name, _: leaves[name], like)
    output = jax.eval_shape(functools.partial(apply, headless), params, images(config))
    assert output.logits is None and output.features.shape[0] == BATCH


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_to_another_resolution_or_are_refused_in_a_sentence(family):
    """Twice as wide all but two: a Mixer, whose weights are of tokens, goes to twice the height as well alone."""
    config = tiny(family)
    height, width = config.height_width
    both, wide = (2 * height, 2 * width), (height, 2 * width)
    refused = {"mixer": (wide,), "feed_forward": (both, wide)}.get(family, ())
    larger = (both, wide) if refused else (wide,)
    for size in larger:
        target = dataclasses.replace(config, image_size=size, **config.options_for_image_size(size))
        like = registry.abstract(target)[1]
        arguments = weights(family), config, like, target
        if size in refused:
            with pytest.raises(
                ConfigError, match=f"fit images of {sizes.size_text(size)} .*What fits is"
            ):
                fitting.adapt(*arguments, reset=(), resize="bilinear")
            continue
        params = fitting.adapt(*arguments, reset=(), resize="bilinear")
        output = jax.eval_shape(functools.partial(apply, target), params, images(target, 1))
        assert output.logits.shape == (1, CLASSES)
        assert output.tokens.shape[1] == target.tokens > config.tokens


@pytest.mark.parametrize(
    "old, new",
    [
        ("fit", "fit_parameter"),
        ("at_size", "options_for_image_size"),
        ("starts_anew", "reset_patterns"),
        ("knows_places", "knows_positions"),
    ],
)
def test_a_family_with_a_method_of_an_earlier_version_is_refused_by_the_name_of_the_new_one(
    old, new
):
    class Family:
        NAME = "mine"
        Config = type(
            "Config",
            (classifier.ClassifierConfig,),
            {old: property(lambda self: None) if old == "knows_places" else lambda self: None},
        )

    with pytest.raises(ConfigError, match=f"family mine defines Config.{old}: .* {new} now"):
        registry.register(Family)
    assert Family not in registry.FAMILIES
