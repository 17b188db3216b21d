"""Distillation token and registers against a second, plain way to compute them; patch resizing against its definition.

The oracle of patch resizing is big_vision's FlexiViT; timm, where it is installed (`pip install --no-deps timm`, its
`torchvision` stubbed as in `tests/interchange/test_timm.py`), has its own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.interchange.loading import load
from vit_jax.models import registry
from vit_jax.models.patch_kernels import resize_patch_embedding
from vit_jax.objectives.contract import Learner, ObjectiveContext
from vit_jax.objectives.supervised import Supervised, SupervisedOptions

# facts §18; parameters of the published files: with the token (D), its position (D) and its head (1000 D + 1000) more.
PARAMETERS = {
    "DeiT-Ti/16": (5_717_416, 5_910_800),
    "DeiT-S/16": (22_050_664, 22_436_432),
    "DeiT-B/16": (86_567_656, 87_338_192),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name):
    plain, distilled = PARAMETERS[name]
    assert registry.count_parameters(registry.model_config(name)) == plain
    assert registry.count_parameters(registry.model_config(name, distilled=True)) == distilled


def test_a_deit_is_a_vit_with_exact_gelu_and_first_weights_of_its_own():
    deit, vit = (vars(registry.model_config(f"{kind}-S/16")) for kind in ("DeiT", "ViT"))
    assert deit["epsilon"] == 1e-6
    assert deit == vit | {"activation": "gelu", "init": "deit"}


@pytest.mark.parametrize(
    ("options", "tokens", "rows", "prefix"),
    [
        ({"distilled": True}, 11, 11, 2),
        ({"distilled": True, "position_of_class": False}, 11, 9, 0),
        ({"distilled": True, "registers": 4}, 15, 11, 2),
        ({"registers": 4}, 14, 10, 1),
        ({"registers": 4, "pool": "mean"}, 13, 9, 0),
        ({"registers": 1, "pool": "map", "position": "sincos2d"}, 10, None, 0),
    ],
)
def test_rows_of_the_position_embedding_are_for_what_has_a_position(
    kit, options, tokens, rows, prefix
):
    config = kit.config(**options)
    assert (config.tokens, config.prefix) == (tokens, prefix)
    position = registry.abstract(config)[1].get("position")
    assert (None if position is None else position.shape[1]) == rows


def plain_encoder_input(config, p, images):
    """(B, N, D): patches and learned tokens by name, positions added one by one, then put in order."""
    patch, grid = config.patch, config.grid[0]
    cut = (
        images.reshape(len(images), grid, patch, grid, patch, 3)
        .swapaxes(2, 3)
        .reshape(len(images), grid**2, -1)
    )
    patches = cut @ p["embedding"]["kernel"].reshape(-1, config.width) + p["embedding"]["bias"]
    position = p["position"][0]
    read = [p[name] for name in ("class_token", "distillation_token") if name in p]
    if config.prefix:
        read = [token + row for token, row in zip(read, position, strict=False)]
    patches = patches + position[config.prefix :]
    learned = [np.broadcast_to(t, (len(images), *t.shape[1:])) for t in [*read, p["registers"]]]
    return np.concatenate([*learned, patches], axis=1)


@pytest.mark.parametrize(
    "options",
    [
        {"distilled": True},
        {"distilled": True, "position_of_class": False},
        {"pool": "token"},
        {"pool": "mean"},
    ],
)
def test_tokens_enter_as_class_distillation_registers_patches_and_registers_do_not_leave(
    kit, options
):
    config = kit.config(registers=3, **options)
    parameters = jax.tree.map(np.asarray, kit.parameters(config))
    # Blocks that add nothing show what they are given.
    for name in ("attention", "mlp"):
        layers = parameters["encoder"]["layers"][name]
        out = layers["out" if name == "attention" else "down"]
        out["kernel"][:], out["bias"][:] = 0, 0
    output = kit.run(config, parameters, kit.images, capture=True)
    x = plain_encoder_input(config, parameters, kit.images)
    np.testing.assert_allclose(output.intermediates["blocks"][0], x, atol=1e-5)
    norm = parameters["encoder"]["norm"]
    centred = x - x.mean(-1, keepdims=True)
    normed = (
        centred / np.sqrt(centred.var(-1, keepdims=True) + config.epsilon) * norm["scale"]
        + norm["bias"]
    )
    kept = np.delete(
        normed, np.s_[config.tokens_with_position : config.tokens_with_position + 3], axis=1
    )
    np.testing.assert_allclose(output.tokens, kept, atol=1e-5)
    if config.pool == "mean":
        np.testing.assert_allclose(output.features, kept.mean(axis=1), atol=1e-5)


def test_registers_are_attended_to(kit):
    config = kit.config(registers=2)
    parameters = kit.parameters(config)
    others = parameters | {"registers": -parameters["registers"]}
    before, after = (kit.run(config, p, kit.images).logits for p in (parameters, others))
    assert np.abs(before - after).max() > 1e-3


def test_registers_begin_small_and_the_distillation_token_does_not_begin_as_the_class_token():
    config = registry.model_config("ViT-Ti/16", depth=1, distilled=True, registers=4)
    p = jax.jit(lambda key: registry.initialize(config, key))(jax.random.key(0))
    assert np.std(p["registers"]) == pytest.approx(1e-6, rel=0.1)
    assert (
        np.std(p["distillation_token"]) == pytest.approx(0.02, rel=0.2)
        and not p["class_token"].any()
    )


def test_logits_are_the_mean_of_two_heads_which_are_also_given_apart(kit):
    config = kit.config(distilled=True)
    parameters = kit.parameters(config)
    output = kit.run(config, parameters, kit.images)
    for i, name in enumerate(("head", "head_distilled")):
        head = parameters[name]
        expected = output.tokens[:, i].astype(np.float64) @ head["kernel"] + head["bias"]
        np.testing.assert_allclose(output.exits[i], expected, atol=1e-5)
    np.testing.assert_allclose(output.logits, output.exits.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(output.features, output.tokens[:, :2].mean(axis=1), atol=1e-6)
    assert output.exits.dtype == output.logits.dtype == np.float32
    assert np.abs(output.exits[0] - output.exits[1]).max() > 0.1
    assert kit.run(kit.config(), kit.parameters(kit.config()), kit.images).exits is None


def test_a_distilled_model_without_head_has_features_only(kit):
    config = kit.config(distilled=True, num_classes=0)
    output = kit.run(config, kit.parameters(config), kit.images)
    assert output.logits is None and output.exits is None and output.features.shape == (4, 16)


def test_supervised_learning_moves_both_heads_and_both_tokens(kit):
    config = kit.config(distilled=True, depth=1)
    batch = {"image": kit.images, "label": jnp.eye(5)[jnp.array([0, 1, 2, 3])]}
    context = ObjectiveContext(config, (0.5,) * 3, (0.5,) * 3, 10, int)
    objective = Supervised(SupervisedOptions(), context)

    def loss(parameters):
        model = lambda images, **_: kit.apply(config, parameters, images)  # noqa: E731
        return objective(Learner(model, None, None, 0), batch, None)[0].mean()

    gradients = jax.jit(jax.grad(loss))(kit.parameters(config))
    for name, gradient in zip(patterns.names(gradients), jax.tree.leaves(gradients), strict=True):
        assert np.abs(gradient).max() > 0, name


def test_a_distillation_token_may_be_there_and_not_be_read(kit):
    both, one = (kit.config(distilled=True, distillation_head=head) for head in (True, False))
    parameters = kit.parameters(both)
    expected = kit.run(both, parameters, kit.images).exits[0]
    del parameters["head_distilled"]
    output = kit.run(one, parameters, kit.images)
    assert output.exits is None
    np.testing.assert_allclose(output.logits, expected, atol=1e-6)
    np.testing.assert_array_equal(output.features, output.tokens[:, 0])


@pytest.mark.parametrize("options", [{"pool": "mean"}, {"pool": "map"}, {"representation": 16}])
def test_a_distilled_model_reads_its_two_tokens_linearly(kit, options):
    with pytest.raises(ConfigError, match="model.pool=token and model.representation=0"):
        kit.config(distilled=True, **options)


def test_deit_comes_in_three_sizes():
    with pytest.raises(ConfigError, match="there is no DeiT of size 'L'"):
        registry.model_config("DeiT-L/16")


def resize_matrix(old, new):
    """(new h · new w, old h · old w): bilinear resize at half-pixel centres, its border repeated, pixel by pixel."""
    matrix = np.zeros((*new, *old))
    for y in range(new[0]):
        for x in range(new[1]):
            at = [
                min(max((i + 0.5) * o / n - 0.5, 0), o - 1)
                for i, o, n in zip((y, x), old, new, strict=True)
            ]
            for dy in (0, 1):
                for dx in (0, 1):
                    place = [
                        min(int(a) + d, o - 1) for a, d, o in zip(at, (dy, dx), old, strict=True)
                    ]
                    weight = np.prod(
                        [a % 1 if d else 1 - a % 1 for a, d in zip(at, (dy, dx), strict=True)]
                    )
                    matrix[y, x, place[0], place[1]] += weight
    return matrix.reshape(new[0] * new[1], old[0] * old[1])


@pytest.mark.parametrize(
    ("old", "new"), [((4, 4), (6, 6)), ((6, 4), (3, 5)), ((4, 4), (7, 3)), ((3, 5), (2, 2))]
)
def test_a_resized_kernel_is_the_least_squares_one(old, new):
    """arXiv 2212.08013: w' = argmin E (<x, w> - <Bx, w'>)², that is pinv(Bᵀ) w."""
    kernel = np.random.default_rng(0).standard_normal((*old, 3, 2)).astype(np.float32)
    expected = np.linalg.lstsq(
        resize_matrix(old, new).T, kernel.reshape(old[0] * old[1], 6).astype(float), rcond=None
    )
    resized = resize_patch_embedding(kernel, new)
    assert resized.dtype == np.float32
    np.testing.assert_allclose(resized.reshape(-1, 6), expected[0], atol=1e-6)


def test_the_kernel_for_larger_patches_answers_as_the_old_one_to_the_old_patches():
    rng = np.random.default_rng(0)
    patch, kernel = (
        rng.standard_normal((16, 3)),
        rng.standard_normal((4, 4, 3, 5)).astype(np.float32),
    )
    enlarged = resize_matrix((4, 4), (8, 8)) @ patch
    answers = enlarged.reshape(-1) @ resize_patch_embedding(kernel, 8).reshape(-1, 5)
    np.testing.assert_allclose(answers, patch.reshape(-1) @ kernel.reshape(-1, 5), atol=1e-5)


def test_the_same_patch_is_left_alone():
    kernel = np.ones((4, 4, 3, 2), np.float32)
    assert resize_patch_embedding(kernel, 4) is kernel


@pytest.mark.parametrize("name", ["12x12", "16x16", "6x6", "4x4", "10x14"])
def test_resized_kernels_are_those_of_flexivit(shared_data, name):
    oracle = np.load(shared_data / "oracle" / "bv_flexi_tiny.io.npz")
    new = tuple(int(side) for side in name.split("x"))
    np.testing.assert_allclose(
        resize_patch_embedding(oracle["kernel_8"], new), oracle[f"kernel_{name}"], atol=1e-5
    )


@pytest.mark.parametrize("side", [3, 4, 6, 8])
def test_a_flexivit_answers_at_every_grid_as_its_own_code(shared_data, side):
    """The kernel is stored for patches of 8, the table for 4x4; images are 48x48 whatever the grid."""
    path = shared_data / "oracle" / "bv_flexi_tiny"
    io = np.load(f"{path}.io.npz")
    model = load(f"{path}.ckpt.npz", image_size=48, patch=48 // side, resize="bilinear")
    assert model.config.grid == (side, side)
    np.testing.assert_allclose(model(io["image"]).logits, io[f"logits_seqhw{side}"], atol=1e-5)
