"""DeepViT against its authors' code, its formula in float64, and plain attention."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.models import oracles
from tests.models.conftest import apply, parameters, run, statistics
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.devices import meshes
from vit_jax.interchange import formats, loading, safetensors
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.interchange.conversions.translation import to_theirs
from vit_jax.models import registry
from vit_jax.models.zoo import deepvit

PARAMETERS = {
    "DeepViT-16": 24_426_664,
    "DeepViT-24": 36_261_448,
    "DeepViT-32": 48_096_232,
    "DeepViT-S": 27_312_632,
    "DeepViT-L": 58_883_708,
}
ORACLES = ["deepvit_reattn", "deepvit_mixed", "deepvit_s_like", "deepvit_theta_no_norm"]
TINY = dict(
    image_size=(8, 12), patch=4, stages=(1, 2), width=16, mlp_dim=32, heads=2, num_classes=5,
    remat="none", unroll=1,
)  # fmt: skip


def tiny(**options):
    return registry.model_config("DeepViT-16", **TINY | options)


def images(config, batch=3):
    shape = (batch, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def forward(config, p, x, training=False):
    """Logits in float64 (DeepViT Eq. 3; dvit_repo), and what multiplies the values, block by block."""
    if config.conv_stem:
        stem = p["embedding"]["stem"]
        for i, stride in ((1, 2), (2, 1)):
            x = oracles.convolution(stem[f"conv{i}"]["kernel"], x, stride)
            x = np.maximum(0, oracles.batch_norm(stem[f"norm{i}"], x, training))
    x = oracles.patches(p["embedding"], x)
    x = np.concatenate([np.repeat(p["class_token"], len(x), 0), x], 1) + p["position"]
    a, all_maps = config.residual_scale, []
    for name, (count, reattention) in config.named_stages.items():
        for i in range(count):
            block = oracles.layer(p["stages"][name]["layers"], i)
            attention = block["attention"]
            q, k, v = oracles.heads(attention, oracles.layer_norm(block["attention_norm"], a * x))
            maps = oracles.maps(q, k)
            if reattention:
                theta = attention["theta"]
                maps = np.einsum("bhqn,hg->bgqn", maps, theta["kernel"])
                maps = maps + theta["bias"][:, None, None]
                if config.reattention_norm:
                    maps = oracles.batch_norm(theta["norm"], maps, training, axis=1)
                if config.scaled_maps:
                    maps = maps / np.sqrt(q.shape[-1])
            all_maps.append(maps)
            x = x + oracles.attended(attention, maps, v) / a
            mlp = block["mlp"]
            hidden = oracles.gelu(
                oracles.linear(mlp["up"], oracles.layer_norm(block["mlp_norm"], a * x))
            )
            x = x + oracles.linear(mlp["down"], hidden) / a
    return oracles.linear(p["head"], oracles.layer_norm(p["norm"], x)[:, 0]), all_maps


@functools.partial(jax.jit, static_argnums=0)
def train(config, params, variables, x):
    """Logits in training mode, and the statistics after it."""
    model = nnx.merge(registry.abstract(config)[0], params, variables)
    logits = model(x, deterministic=False, rngs=nnx.Rngs(dropout=0)).logits
    return logits, registry.split(model)[1].variables


@pytest.mark.parametrize("name", deepvit.VARIANTS)
def test_parameters_are_as_many_as_the_authors_code_has(name):
    assert registry.count_parameters(registry.model_config(name)) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("options", "count"),
    [({"reattention_norm": False}, 24_426_280), ({"stages": (16,)}, 24_423_784)],
    ids=["no norm", "plain"],
)
def test_ablations_of_the_smallest_have_the_papers_counts(options, count):
    assert registry.count_parameters(registry.model_config("DeepViT-16", **options)) == count


@pytest.mark.parametrize("name", ORACLES)
def test_logits_maps_and_statistics_are_those_of_the_authors_code(name, shared_data):
    path, arrays, answers, arguments = oracles.relative_of(shared_data, name)
    said = dict(scaled_maps=arguments.get("transform_scale", False))
    checkpoint = formats.read_checkpoint(path, **said)
    config = checkpoint.model_config
    turns = [
        reattention for count, reattention in config.named_stages.values() for _ in range(count)
    ]
    assert turns == arguments["apply_transform"] and config.heads == arguments["num_heads"]
    assert config.residual_scale == arguments.get("scale_adjustment", 1.0)

    model = vit_jax.load(path, **said)
    output = jax.device_get(jax.jit(lambda x: model(x, capture=True))(answers["images"]))
    close = oracles.assert_close
    close(output.logits, answers["logits"])
    close(output.features, answers["features"])
    close(output.tokens[:2], answers["tokens"])
    for found, which in zip(
        output.intermediates["attention"][[0, -1]], ("first", "last"), strict=True
    ):
        close(found[:1, :, :17], answers[f"maps_{which}"])

    if "logits_training" not in answers:
        return
    params, variables = jax.tree.map(np.asarray, (checkpoint.params, checkpoint.variables))
    logits, after = train(config, params, variables, answers["images"])
    close(logits, answers["logits_training"])
    rules = conversions_of(deepvit)["authors"].rules(config, {})
    written = dict(to_theirs(rules, after, constants={}))
    expected = {
        k.split("/", 1)[1]: v for k, v in answers.items() if k.startswith("after_training/")
    }
    assert set(written) == {k for k in expected if "num_batches" not in k}
    for key, value in written.items():
        close(value, expected[key], err_msg=key)


@pytest.mark.parametrize("name", ORACLES[1:3])
def test_the_authors_file_comes_back_byte_by_byte(name, shared_data, tmp_path):
    path, arrays, _, _ = oracles.relative_of(shared_data, name)
    loading.convert(path, tmp_path / "run", "orbax")
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


def test_with_the_identity_for_theta_and_no_norm_attention_is_plain():
    config = tiny(reattention_norm=False)
    params = parameters(config)
    theta = params["stages"]["2"]["layers"]["attention"].pop("theta")
    plain = tiny(stages=(3,))
    joined = jax.tree.map(
        lambda *stages: np.concatenate(stages), *(params["stages"][n]["layers"] for n in "12")
    )
    expected = run(plain, params | {"stages": {"1": {"layers": joined}}}, images(config))

    theta["kernel"] = np.repeat(np.eye(2, dtype=np.float32)[None], 2, 0)
    theta["bias"] = np.zeros((2, 2), np.float32)
    params["stages"]["2"]["layers"]["attention"]["theta"] = theta
    output = run(config, params, images(config))
    np.testing.assert_allclose(output.logits, expected.logits, atol=1e-5)


def test_statistics_over_devices_are_those_of_the_whole_batch():
    config = tiny(conv_stem=True)
    params, variables, x = parameters(config), statistics(config), images(config, 8)
    logits, after = train(config, params, variables, x)
    mesh = meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    where = meshes.shardings((params, variables), mesh, fsdp_min_size=0)
    cut = jax.device_put((params, variables), where)
    with jax.set_mesh(mesh):
        found = train(config, *cut, jax.device_put(x, meshes.batch_sharding(mesh)))
    for one, other in zip(*map(jax.tree.leaves, (found, (logits, after))), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    for one, other in zip(*map(jax.tree.leaves, (after, variables)), strict=True):
        assert np.abs(one - other).max() > 1e-4


def test_fixed_statistics_stay_and_are_what_training_normalises_by():
    config = tiny(fixed_statistics=True)
    params, variables, x = parameters(config), statistics(config), images(config)
    logits, after = train(config, params, variables, x)
    np.testing.assert_allclose(logits, apply(config, params, x).logits, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after, variables)


def test_stochastic_depth_grows_over_all_stages():
    """Only the last of three blocks is dropped, surely enough."""
    config = tiny(drop_path=0.9)
    x = np.repeat(images(config, 1), 200, 0)
    exact = run(config, parameters(config), x[:1], capture=True).intermediates["blocks"]
    fixed = tiny(drop_path=0.9, fixed_statistics=True)
    drawn = run(fixed, parameters(config), x, jax.random.key(0), capture=True).intermediates[
        "blocks"
    ]
    np.testing.assert_allclose(drawn[0], np.repeat(exact[0], 200, 0), atol=1e-5)
    untouched = [np.mean(np.abs(drawn[i] - drawn[i - 1]).max((1, 2)) == 0) for i in (1, 2)]
    assert untouched == pytest.approx([0.45**2, 0.9**2], abs=0.09)
    with pytest.raises(ValueError, match="needs rngs unless deterministic=True"):
        nnx.merge(registry.abstract(config)[0], parameters(config), statistics(config))(
            x, deterministic=False
        )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("DeepViT-M", {}, "no DeepViT of size 'M'"),
        ("DeepViT-16", {"image_size": 225}, "cannot be split into patches of 16"),
        ("DeepViT-16", {"heads": 7}, "width 384 cannot be split into 7 heads"),
        ("DeepViT-16", {"stages": ()}, r"model.stages = \(\): give how many blocks"),
        ("DeepViT-16", {"stages": (0, 0)}, "give how many blocks have no re-attention"),
        ("DeepViT-16", {"stages": (-1, 3)}, "must be at least 0"),
        ("DeepViT-S", {"patch": 7}, "patches of 7 pixels cannot be, choose an even size"),
        ("DeepViT-S", {"residual_scale": 0.0}, "must be above 0"),
    ],
)
def test_what_is_no_deepvit_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(name, **options)


def test_a_file_that_lacks_a_tensor_or_has_one_more_names_it(shared_data, tmp_path):
    _, arrays, _, _ = oracles.relative_of(shared_data, "deepvit_theta_no_norm")
    arrays["blocks.1.attn.surplus"] = arrays.pop("blocks.1.attn.reatten_matrix.bias")
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(CheckpointError) as error:
        vit_jax.load(tmp_path / "a.npz")
    assert "blocks.1.attn.reatten_matrix.bias (4,): missing in the file" in str(error.value)
    assert "blocks.1.attn.surplus (4,): in the file, but not in the model" in str(error.value)


def test_a_model_without_reattention_is_not_written_as_one(tmp_path):
    config = tiny(stages=(2,))
    with pytest.raises(CheckpointError, match="plain ViT's, and would be read as one"):
        checkpoint = formats.LoadedCheckpoint(config, parameters(config))
        formats.write_checkpoint(checkpoint, tmp_path / "a.safetensors", "authors")


@pytest.mark.slow
def test_a_small_one_learns_digits(command, tmp_path):
    recipe = "configs/deepvit.py:smoke"
    code, out, _ = command("train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}")
    assert code == 0 and float(re.search(r"accuracy ([\d.]+)", out)[1]) >= 0.95
