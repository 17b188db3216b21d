"""LocalViT against its authors' code and its formula in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import vit_jax
from tests.models import oracles
from tests.models.conftest import apply, parameters, run, statistics
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.compute import convolution
from vit_jax.devices import meshes
from vit_jax.interchange import formats, loading, safetensors
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.interchange.conversions.translation import to_theirs
from vit_jax.models import registry
from vit_jax.models.zoo import localvit

PARAMETERS = {"LocalViT-T": 5_908_696, "LocalViT-T-SE4": 9_376_168, "LocalViT-S": 22_433_176}
# What no tensor of their files tells.
ORACLES = {
    "localvit_act1_relu6": dict(heads=4, activation="relu6"),
    "localvit_act3_hs_se": dict(heads=2),
    "localvit_act4_hs_eca": dict(heads=4),
    "localvit_act5_hs_ecah": dict(heads=4, gate="eca_hard"),
}
TINY = dict(
    image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, heads=2, reduction=8, num_classes=5,
    remat="none", unroll=1,
)  # fmt: skip


def tiny(**options):
    return registry.model_config("LocalViT-T", **TINY | options)


def images(config, batch=3):
    shape = (batch, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def hard_sigmoid(x):
    return np.clip(x + 3, 0, 6) / 6


def gate_of(config, p, means):
    if config.gate == "se":
        hidden = np.maximum(0, oracles.linear(p["reduce"], means))
        return hard_sigmoid(oracles.linear(p["expand"], hidden))
    pad = len(p["kernel"]) // 2
    padded = np.pad(means, ((0, 0), (pad, pad)))
    # As PyTorch's convolution, which does not turn the kernel round.
    logits = np.stack([np.convolve(row, p["kernel"][::-1], "valid") for row in padded])
    return hard_sigmoid(logits) if config.gate == "eca_hard" else 1 / (1 + np.exp(-logits))


def forward(config, p, x, training=False):
    """Logits in float64 (LocalViT Eq. 5 and the authors' code)."""

    def act(x):
        clipped = np.clip(x, 0, 6)
        return clipped if config.activation == "relu6" else x * hard_sigmoid(x)

    x = oracles.patches(p["embedding"], x)
    x = np.concatenate([np.repeat(p["class_token"], len(x), 0), x], 1) + p["position"]
    for i in range(config.depth):
        block = oracles.layer(p["layers"], i)
        attention, mlp = block["attention"], block["mlp"]
        q, k, v = oracles.heads(attention, oracles.layer_norm(block["attention_norm"], x))
        x = x + oracles.attended(attention, oracles.maps(q, k), v)
        patches = x[:, 1:].reshape(len(x), *config.grid, -1)
        y = act(oracles.batch_norm(mlp["up_norm"], oracles.linear(mlp["up"], patches), training))
        # One kernel for all pairs of channels, of which only the equal ones meet.
        kernel = mlp["depthwise"]["kernel"] * np.eye(y.shape[-1])
        y = act(oracles.batch_norm(mlp["depthwise_norm"], oracles.convolution(kernel, y), training))
        if config.gate != "none":
            y = y * gate_of(config, mlp["gate"], y.mean((1, 2)))[:, None, None]
        y = oracles.batch_norm(mlp["down_norm"], oracles.linear(mlp["down"], y), training)
        x = np.concatenate([x[:, :1], (patches + y).reshape(x[:, 1:].shape)], 1)
    return oracles.linear(p["head"], oracles.layer_norm(p["norm"], x)[:, 0])


@functools.partial(jax.jit, static_argnums=0)
def train(config, params, variables, x):
    """Logits in training mode, and the statistics after it."""
    model = nnx.merge(registry.abstract(config)[0], params, variables)
    logits = model(x, deterministic=False, rngs=nnx.Rngs(dropout=0)).logits
    return logits, registry.split(model)[1].variables


@pytest.mark.parametrize("name", localvit.VARIANTS)
def test_parameters_are_as_many_as_the_authors_code_has(name):
    assert registry.count_parameters(registry.model_config(name)) == PARAMETERS[name]


def test_the_tiny_one_with_relu6_and_ratio_6_has_the_authors_count():
    config = registry.model_config("LocalViT-T", mlp_dim=6 * 192, gate="none", activation="relu6")
    assert registry.count_parameters(config) == 7_655_080


@pytest.mark.parametrize("name", ORACLES)
def test_logits_tokens_and_statistics_are_those_of_the_authors_code(name, shared_data):
    path, _, answers, arguments = oracles.relative_of(shared_data, name)
    checkpoint = formats.read_checkpoint(path, **ORACLES[name])
    assert checkpoint.model_config.heads == arguments["num_heads"]
    if checkpoint.model_config.gate == "se":
        assert checkpoint.model_config.reduction == arguments["reduction"]
    model = vit_jax.load(path, **ORACLES[name])
    output = jax.device_get(jax.jit(lambda x: model(x, capture=True))(answers["images"]))
    close = oracles.assert_close
    close(output.logits, answers["logits"])
    close(output.features, answers["features"])
    close(output.tokens[:2], answers["tokens"])
    close(output.intermediates["blocks"][0, :1], answers["block_0"])

    if "logits_training" not in answers:
        return
    params, variables = jax.tree.map(np.asarray, (checkpoint.params, checkpoint.variables))
    logits, after = train(checkpoint.model_config, params, variables, answers["images"])
    close(logits, answers["logits_training"])
    rules = conversions_of(localvit)["authors"].rules(checkpoint.model_config, {})
    written = dict(to_theirs(rules, after, constants={}))
    expected = {
        k.split("/", 1)[1]: v for k, v in answers.items() if k.startswith("after_training/")
    }
    assert set(written) == {k for k in expected if "num_batches" not in k}
    for key, value in written.items():
        close(value, expected[key], err_msg=key)


@pytest.mark.parametrize("name", ["localvit_act1_relu6", "localvit_act4_hs_eca"])
def test_the_authors_file_comes_back_byte_by_byte(name, shared_data, tmp_path):
    path, arrays, _, _ = oracles.relative_of(shared_data, name)
    loading.convert(path, tmp_path / "run", "orbax", **ORACLES[name])
    loading.convert(tmp_path / "run", tmp_path / "a.safetensors", "authors")
    found = safetensors.read(tmp_path / "a.safetensors")[0]
    assert set(found) == set(arrays)
    for key, array in arrays.items():
        back = np.asarray(found[key])
        assert (back.dtype, back.shape, back.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        )
    # Our file says what the authors' does not.
    assert (
        formats.read_checkpoint(tmp_path / "a.safetensors").model_config.heads
        == ORACLES[name]["heads"]
    )


def test_a_depthwise_convolution_on_cpus_is_xlas_convolution():
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(2, 5, 7, 6)), jnp.float32) for _ in range(2))
    kernel = jnp.asarray(rng.normal(size=(5, 5, 1, 6)), jnp.float32)
    for one, other in zip(
        *(
            jax.tree.leaves((y, back(dy)))
            for y, back in (
                jax.vjp(f, x, kernel) for f in (convolution.depthwise, convolution.depthwise.plain)
            )
        ),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_class_token_goes_round_the_convolutions():
    """Of the last block only attention can change it."""
    config = tiny(depth=1)
    params = parameters(config)
    before = run(config, params, images(config)).logits
    params["layers"]["mlp"] = jax.tree.map(lambda x: x + 1, params["layers"]["mlp"])
    after = run(config, params, images(config))
    np.testing.assert_array_equal(after.logits, before)


def test_over_devices_statistics_are_those_of_the_whole_batch_and_mlps_are_cut_by_channels():
    config = tiny()
    params, variables, x = parameters(config), statistics(config), images(config, 8)
    expected = train(config, params, variables, x)
    mesh = meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    rules = config.tensor_rules
    where = meshes.shardings((params, variables), mesh, fsdp_min_size=10**9, tensor_rules=rules)
    mlp = where[0]["layers"]["mlp"]
    assert mlp["depthwise"]["kernel"].spec == P(None, None, None, None, "tensor")
    assert mlp["up_norm"]["scale"].spec == P(None, "tensor")
    where = meshes.shardings((params, variables), mesh, fsdp_min_size=0, tensor_rules=rules)
    cut = jax.device_put((params, variables), where)
    with jax.set_mesh(mesh):
        found = train(config, *cut, jax.device_put(x, meshes.batch_sharding(mesh)))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    for one, other in zip(*map(jax.tree.leaves, (expected[1], variables)), strict=True):
        assert np.abs(one - other).max() > 1e-4


def test_fixed_statistics_stay_and_are_what_training_normalises_by():
    config = tiny(fixed_statistics=True)
    params, variables, x = parameters(config), statistics(config), images(config)
    logits, after = train(config, params, variables, x)
    np.testing.assert_allclose(logits, apply(config, params, x).logits, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after, variables)


def test_one_patch_of_one_image_cannot_be_trained_on():
    config = tiny(image_size=4)
    with pytest.raises(ConfigError, match="one value for each channel"):
        train(config, parameters(config), statistics(config), images(config, 1))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("LocalViT-B", {}, "no LocalViT of size 'B'"),
        ("LocalViT-T", {"image_size": 225}, "cannot be split into patches of 16"),
        ("LocalViT-T", {"heads": 7}, "width 192 cannot be split into 7 heads"),
        ("LocalViT-T", {"reduction": 1000}, "leaves none of the 768 channels"),
        ("LocalViT-T", {"gate": "sse"}, "is not one of none, se, eca, eca_hard; did you mean 'se'"),
    ],
)
def test_what_is_no_localvit_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(name, **options)


def test_a_file_that_lacks_a_tensor_or_has_one_more_names_it(shared_data, tmp_path):
    _, arrays, _, _ = oracles.relative_of(shared_data, "localvit_act3_hs_se")
    arrays["blocks.1.surplus"] = arrays.pop("blocks.1.conv.conv.4.running_var")
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(CheckpointError) as error:
        vit_jax.load(tmp_path / "a.npz", heads=2)
    assert "blocks.1.conv.conv.4.running_var (128,): missing in the file" in str(error.value)
    assert "blocks.1.surplus (128,): in the file, but not in the model" in str(error.value)


@pytest.mark.slow
def test_a_small_one_learns_digits(command, tmp_path):
    recipe = "configs/localvit.py:smoke"
    code, out, _ = command("train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}")
    assert code == 0 and float(re.search(r"accuracy ([\d.]+)", out)[1]) >= 0.95
