"""The parts that ViTs got after 2020 (norms, gates, scales, rotary positions, …): whole networks against NumPy in
float64, on meshes and with recomputation, and parameters counted as published.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.compute import rope
from vit_jax.devices import meshes
from vit_jax.interchange.conversions import vit_arguments
from vit_jax.models import published, registry, vit
from vit_jax.models.zoo import vit_zoo
from vit_jax.recipes import user_files

SMALL = dict(image_size=(12, 8), depth=2, heads=2, width=16, num_classes=5)
NETWORKS = {
    "everything before": SMALL
    | dict(
        norm="rms", qk_norm=True, attention_inner_norm=True, mlp_inner_norm=True, gated_mlp=True,
        activation="silu", layer_scale="all", key_bias=False, projection_bias=False, rope="axial",
        rope_theta=50.0, rope_grid=(6, 2), rope_offset=1.0, pre_norm=True, patch_norm=True,
        patch_bias=False, registers=2, position_of_registers=True, keep_class_token=True,
        pool="mean", last_norm="pooled",
    ),
    "norms after": SMALL
    | dict(
        norm_after=True, activation="quick_gelu", rope="mixed", layer_scale="attention",
        last_norm="none", registers=1, position="none",
    ),
    "class token and mean": SMALL
    | dict(
        rope="centred", rope_theta=100.0, position_of_class=False, registers=1, pool="token_mean",
        activation="gelu",
    ),
}  # fmt: skip


def forward(config, parameters, images):
    """Logits by the papers' equations, in float64, one option at a time."""
    p = dict(zip(patterns.names(parameters), jax.tree.leaves(parameters), strict=True))
    p = {name: np.asarray(value, np.float64) for name, value in p.items()}

    def affine(x, name, layer=None, kind="kernel"):
        kernel, bias = p[f"{name}/{kind}"], p.get(f"{name}/bias")
        if layer is not None:
            kernel, bias = kernel[layer], None if bias is None else bias[layer]
        y = np.tensordot(x, kernel, 1)
        return y if bias is None else y + bias

    def norm(x, name, layer=None, kind=config.norm):
        scale = p[f"{name}/scale"] if layer is None else p[f"{name}/scale"][layer]
        if kind == "rms":
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.epsilon) * scale
        x = x - x.mean(-1, keepdims=True)
        bias = p[f"{name}/bias"] if layer is None else p[f"{name}/bias"][layer]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.epsilon) * scale + bias

    def activate(x):
        return {
            "silu": lambda: x / (1 + np.exp(-x)),
            "quick_gelu": lambda: x / (1 + np.exp(-1.702 * x)),
            "gelu": lambda: x / 2 * (1 + scipy.special.erf(x / np.sqrt(2))),
        }[config.activation]()

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    def turned(x, layer):
        """The patches' channels, as complex numbers."""
        size = x.shape[-1]
        if config.rope == "mixed":
            angles = np.asarray(rope.mixed_angles(config.grid, p["rope"]))[layer]
        elif config.rope == "centred":
            angles = rope.centred_angles(config.grid, size, theta=config.rope_theta)[:, None]
        else:
            angles = rope.axial_angles(
                config.grid, size, theta=50.0, offset=1.0, trained_grid=(6, 2)
            )[:, None]
        others, patches = np.split(x, [x.shape[1] - len(angles)], axis=1)
        pairs = patches[..., : size // 2] + 1j * patches[..., size // 2 :]
        pairs = pairs * np.exp(1j * angles)
        patches = np.concatenate([pairs.real, pairs.imag], axis=-1)
        return np.concatenate([others, patches], axis=1)

    (rows, columns), patch, n = config.grid, config.patch, len(images)
    x = images.astype(np.float64).reshape(n, rows, patch, columns, patch, 3)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows * columns, -1)
    x = x @ p["embedding/kernel"].reshape(-1, config.width) + p.get("embedding/bias", 0)
    x = norm(x, "patch_norm") if config.patch_norm else x
    learned = [p["class_token"], *([p["registers"]] if config.registers else [])]
    x = np.concatenate([*(np.repeat(t, n, 0) for t in learned), x], axis=1)
    if "position" in p:
        x[:, x.shape[1] - p["position"].shape[1] :] += p["position"]
    x = norm(x, "pre_norm") if config.pre_norm else x
    for layer in range(config.depth):
        at = "encoder/layers/attention"
        y = x if config.norm_after else norm(x, f"{at}_norm", layer)
        q, k, v = np.moveaxis(np.tensordot(y, p[f"{at}/qkv/kernel"][layer], 1), 2, 0)
        bias = p[f"{at}/qkv/bias"][layer]
        q, v = q + bias[0], v + bias[-1]
        k = k if len(bias) == 2 else k + bias[1]
        if config.qk_norm:
            q, k = norm(q, f"{at}/query_norm", layer), norm(k, f"{at}/key_norm", layer)
        q, k = turned(q, layer), turned(k, layer)
        logits = np.einsum("bqhc,bkhc->bhqk", q, k) / np.sqrt(q.shape[-1])
        heads = np.einsum("bhqk,bkhc->bqhc", softmax(logits), v)
        if config.attention_inner_norm:
            flat = norm(heads.reshape(*heads.shape[:2], -1), f"{at}/inner_norm", layer)
            heads = flat.reshape(heads.shape)
        y = np.einsum("bqhc,hcd->bqd", heads, p[f"{at}/out/kernel"][layer])
        y = y + (p[f"{at}/out/bias"][layer] if config.projection_bias else 0)
        y = norm(y, f"{at}_norm", layer) if config.norm_after else y
        x = x + y * (1 if config.layer_scale == "none" else p[f"{at}_scale/scale"][layer])
        mlp = "encoder/layers/mlp"
        y = affine(x if config.norm_after else norm(x, f"{mlp}_norm", layer), f"{mlp}/up", layer)
        y = activate(y[..., 0, :]) * y[..., 1, :] if config.gated_mlp else activate(y)
        y = norm(y, f"{mlp}/norm", layer) if config.mlp_inner_norm else y
        y = affine(y, f"{mlp}/down", layer)
        y = norm(y, f"{mlp}_norm", layer) if config.norm_after else y
        x = x + y * (p[f"{mlp}_scale/scale"][layer] if config.layer_scale == "all" else 1)
    x = norm(x, "encoder/norm") if config.last_norm == "tokens" else x
    skipped = 0 if config.pool_prefix else 1 + config.registers
    if config.pool == "token":
        x = x[:, 0]
    elif config.pool == "token_mean":
        x = np.concatenate([x[:, 0], x[:, skipped:].mean(1)], -1)
    elif config.pool == "mean":
        x = x[:, skipped:].mean(1)
    else:
        at = "pool/attention"
        kernel, bias = p[f"{at}/qkv/kernel"], p[f"{at}/qkv/bias"]
        probe = np.repeat(p["pool/probe"], n, 0)
        q = np.tensordot(probe, kernel[:, 0], 1) + bias[0]
        k, v = (np.tensordot(x[:, skipped:], kernel[:, i], 1) + bias[i] for i in (1, 2))
        weights = softmax(np.einsum("bqhc,bkhc->bhqk", q, k) / np.sqrt(q.shape[-1]))
        heads = np.einsum("bhqk,bkhc->bqhc", weights, v)
        x = np.einsum("bqhc,hcd->bqd", heads, p[f"{at}/out/kernel"]) + p[f"{at}/out/bias"]
        x = x + affine(activate(affine(norm(x, "pool/norm"), "pool/mlp/up")), "pool/mlp/down")
        x = x[:, 0]
    x = norm(x, "pool_norm") if config.last_norm == "pooled" else x
    return affine(x, "head")


def images(config):
    shape = (8, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_are_those_of_the_definitions(kit, name):
    config = kit.config(**NETWORKS[name])
    parameters, x = kit.parameters(config), images(config)
    expected = forward(config, parameters, x)
    assert expected.std() > 0.1
    np.testing.assert_allclose(kit.run(config, parameters, x).logits, expected, atol=1e-5)


def test_gradients_are_the_same_on_a_mesh_with_recomputation(kit):
    config = kit.config(**NETWORKS["everything before"], remat="none")
    parameters, x = kit.parameters(config), images(config)

    def gradients(config, parameters):
        definition = registry.abstract(config)[0]

        def loss(p, x):
            return jnp.square(nnx.merge(definition, p)(x).logits).sum()

        return jax.jit(jax.grad(loss))(parameters, x)

    expected = gradients(config, parameters)
    mesh = meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])
    shardings = meshes.shardings(parameters, mesh, fsdp_min_size=64)
    up = shardings["encoder"]["layers"]["mlp"]["up"]["kernel"]
    assert "tensor" in jax.tree.leaves(tuple(up.spec))
    with jax.set_mesh(mesh):
        cut = jax.tree.map(jax.device_put, parameters, shardings)
        other = kit.config(**NETWORKS["everything before"], remat="save_attention")
        found = gradients(other, cut)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        np.testing.assert_allclose(b, a, atol=1e-4 * max(1, np.abs(a).max()), err_msg=str(path))


def test_new_networks_begin_with_these_scales_and_frequencies(kit):
    config = kit.config(**NETWORKS["norms after"], layer_scale_init=0.25)
    parameters = jax.jit(lambda key: registry.initialize(config, key))(jax.random.key(0))
    block = parameters["encoder"]["layers"]
    assert (block["attention_scale"]["scale"] == 0.25).all() and "mlp_scale" not in block
    lengths = np.hypot(*parameters["rope"])  # (L, H, C/2)
    usual = config.rope_theta ** -(np.arange(2) / 2)
    np.testing.assert_allclose(lengths, np.broadcast_to([*usual, *usual], (2, 2, 4)), rtol=1e-5)
    assert not np.allclose(parameters["rope"][:, 0], parameters["rope"][:, 1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(parallel=True, norm_after=True), "model.parallel .* model.norm_after .* take one"),
        (dict(rope="axial", heads=8), "heads of 2 channels, .* cannot be split in four"),
        (dict(distilled=True, last_norm="none"), "model.distilled .* model.last_norm=tokens"),
        (
            dict(registers=1, position_of_registers=True, position_of_class=False),
            "needs model.position_of_class",
        ),
        (dict(pool="map", map_heads=3), "16 cannot be split into model.map_heads=3"),
        (dict(rope_grid=(1, 2, 3)), "rope_grid"),
    ],
)
def test_parts_that_do_not_fit_are_errors_that_say_so(kit, options, words):
    with pytest.raises(ConfigError, match=words):
        kit.config(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            dict(block_branches=2, position="relative"),
            "model.block_branches=2 .* set model.position_at=stem",
        ),
        (dict(differential=True, rope="axial"), "model.differential does not go with rope=axial"),
        (dict(differential=True, width=18, heads=6, mlp_dim=8), "heads of 3 channels .* not even"),
        (dict(differential=True, attention="short"), "set model.attention=xla"),
    ],
)
def test_blocks_that_do_not_fit_are_errors_that_say_so(kit, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.abstract(kit.config(**options))


def test_two_attentions_and_mlps_in_a_block_are_twice_the_parameters_and_operations(kit):
    def block(branches):
        one, two = (kit.config(block_branches=branches, depth=depth) for depth in (1, 2))
        flops = two.block_flops(two.tokens) - one.block_flops(one.tokens)
        return np.array([registry.count_parameters(two) - registry.count_parameters(one), flops])

    np.testing.assert_array_equal(block(2), 2 * block(0))


def parameters_of(name, **options):
    """Of a published architecture of timm without a head."""
    known = published.architectures()[name]
    found = vit_arguments.from_arguments(known.kind, known.arguments)
    found = {n: x for n, x in found.items() if n in vit_zoo.Config.__dataclass_fields__}
    tags = list(known.tags.values())
    config = vit_zoo.Config(tags[0].image_size, **found | {"num_classes": 0} | options)
    return registry.count_parameters(config)


def test_parameters_are_as_many_as_published():
    """All published counts have a mask token, which no network here has."""
    dinov2 = {"small": 22_056_576, "base": 86_580_480, "large": 304_368_640, "giant": 1_136_480_768}
    widths = {"small": 384, "base": 768, "large": 1024, "giant": 1536}
    for size, count in dinov2.items():
        assert parameters_of(f"vit_{size}_patch14_dinov2") + widths[size] == count
    registers = {"small": 22_058_112, "base": 86_583_552, "large": 304_372_736}
    for size, count in registers.items():
        # The published class token has a position of its own.
        found = parameters_of(f"vit_{size}_patch14_reg4_dinov2", position_of_class=True)
        assert found + widths[size] == count
    dinov3 = {
        "small": (21_601_152, 384), "small_plus": (28_697_472, 384), "base": (85_669_632, 768),
        "large": (303_154_176, 1024), "huge_plus": (840_633_600, 1280),
    }  # fmt: skip
    for size, (count, width) in dinov3.items():
        found = parameters_of(f"vit_{size}_patch16_dinov3_qkvb", key_bias=True)
        assert found + width == count
    assert parameters_of("vit_base_patch16_dinov3_qkvb") + 768 == 85_660_416  # Hugging Face
    assert parameters_of("vit_base_patch16_dinov3") == 85_641_216  # timm
    # Its crops have last norms of their own.
    assert parameters_of("vit_7b_patch16_dinov3") + 4096 + 2 * 4096 == 6_716_043_264


def test_parameters_of_vit_5_are_as_many_as_published():
    options = dict(
        norm="rms", qk_norm=True, qkv_bias=False, layer_scale="all", registers=4, rope="axial",
        position_of_class=False, activation="gelu",
    )  # fmt: skip
    published = {"S": 22_039_144, "B": 86_543_080, "L": 304_258_024}
    for size, count in published.items():
        config = registry.model_config(f"ViT-{size}/16", image_size=224, **options)
        assert registry.count_parameters(config) == count


def test_weights_begin_as_in_deits_code():
    options = dict(image_size=32, num_classes=10, init="deit", head_init="normal", registers=4)
    config = registry.model_config("ViT-S/16", depth=2, **options)
    params = jax.device_get(
        jax.jit(lambda key: registry.initialize(config, key))(jax.random.key(0))
    )
    layers = params["encoder"]["layers"]
    for kernel in (layers["attention"]["qkv"]["kernel"], layers["mlp"]["up"]["kernel"]):
        np.testing.assert_allclose(np.std(kernel), 0.02, rtol=0.01)
    for token in ("class_token", "registers", "position"):
        np.testing.assert_allclose(np.std(params[token]), 0.02, rtol=0.1)
    bound = 1 / np.sqrt(16 * 16 * 3)  # of PyTorch's convolutions
    for part in params["embedding"].values():
        assert bound * 0.97 < np.abs(part).max() <= bound
        np.testing.assert_allclose(np.std(part), bound / np.sqrt(3), rtol=0.1)


@pytest.mark.parametrize("recipe", ["deit.py:S", "distill.py:DeiT-S/16", "dino.py:S/16"])
def test_recipes_whose_authors_draw_so_begin_so(recipe):
    model = user_files.load_config(recipe).model
    named = registry.model_config(model.name).init
    assert (model.init or named) == "deit"  # None: as named


PAPER = [
    {}, dict(pool="mean", registers=2, representation=8), dict(distilled=True),
    dict(pool="map", position="sincos2d", dropout=0.2, drop_path=0.3),
]  # fmt: skip


@pytest.mark.parametrize("options", PAPER, ids=str)
def test_a_vit_of_the_paper_is_the_published_one_without_what_others_added(kit, options):
    """`vit` is what runs, and what `vit_zoo` extends: parameters, draws and outputs are one program."""
    config, programs = kit.config(**options), []
    key = jax.random.key(1) if "dropout" in options else None
    built = nnx.eval_shape(lambda: registry.build(config, rngs=nnx.Rngs(0)))
    assert type(built) is vit.VisionTransformer
    for kind in (vit.VisionTransformer, vit_zoo.PublishedViT):

        def run(x, key, kind=kind):
            model = kind(config, rngs=nnx.Rngs(0))
            rngs = None if key is None else nnx.Rngs(dropout=key)
            out = model(x, deterministic=key is None, rngs=rngs, capture=True)
            return registry.split(model)[1].params, vars(out)

        programs.append(jax.make_jaxpr(run, return_shape=True)(kit.images, key))
    (one, outputs), (other, others) = programs
    assert str(one) == str(other) and outputs == others
    jax.tree.map(np.testing.assert_array_equal, one.consts, other.consts)


def test_any_option_of_published_weights_takes_the_published_model(kit):
    changed = dict(
        rope="axial", last_norm="pooled", qkv_bias=False, position="relative", pool="gem"
    )
    for name, value in changed.items():
        model = nnx.eval_shape(
            lambda o={name: value}: registry.build(kit.config(**o), rngs=nnx.Rngs(0))
        )
        assert type(model) is vit_zoo.PublishedViT, name
