"""Feed-forward-only networks against their authors' code and their formula in float64."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.models import oracles
from tests.models.conftest import apply, parameters, run
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import fitting, formats, loading, safetensors
from vit_jax.models import registry
from vit_jax.models.zoo import feed_forward

PARAMETERS = {"FF-Ti/16": 7_676_332, "FF-B/16": 61_943_020, "FF-L/32": 206_363_576}
ORACLES = ("ff_patch16", "ff_patch32_table14")
# The table of positions is larger one way and smaller the other than the patches' (2, 3).
TINY = dict(
    image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, position_grid=(5, 2), num_classes=5,
    head_init="normal", remat="none", unroll=1,
)  # fmt: skip


def tiny(**options):
    return registry.model_config("FF-Ti/16", **TINY | options)


def images(config, batch=3):
    shape = (batch, *config.height_width, 3)
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def between(count, places):
    """(places, count): what a place takes of each row, linearly, centres at half pixels."""
    at = np.clip((np.arange(places) + 0.5) * count / places - 0.5, 0, count - 1)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(count)))


def forward(config, p, x):
    """Logits in float64 (the authors' `LinearBlock`)."""
    rows, columns = (
        between(count, places)
        for count, places in zip(p["position"].shape[1:3], config.grid, strict=True)
    )
    table = np.einsum("yh,xw,bhwd->byxd", rows, columns, p["position"])
    x = oracles.patches(p["embedding"], x) + table.reshape(1, -1, config.width)
    first = p["class_token"] + p["class_position"]
    x = np.concatenate([np.repeat(first, len(x), 0), x], 1)
    for i in range(config.depth):
        block = oracles.layer(p["layers"], i)

        def mlp(kind, x, block=block):
            hidden = oracles.linear(
                block[f"{kind}_mlp"]["up"], oracles.layer_norm(block[f"{kind}_norm"], x)
            )
            return oracles.linear(block[f"{kind}_mlp"]["down"], oracles.gelu(hidden))

        x = x + mlp("channel", x)
        x = x + mlp("token", x.swapaxes(1, 2)).swapaxes(1, 2)
    return oracles.linear(p["head"], oracles.layer_norm(p["norm"], x)[:, 0])


@pytest.mark.parametrize("name", feed_forward.VARIANTS)
def test_parameters_are_as_many_as_the_authors_code_has(name):
    assert registry.count_parameters(registry.model_config(name)) == PARAMETERS[name]


def test_operations_are_those_of_the_matrix_products():
    config = registry.model_config("FF-Ti/16")
    blocks = 12 * (2 * 197 * 192 * 768 + 2 * 192 * 197 * 788)
    assert config.flops() == 2 * (196 * 768 * 192 + blocks + 192 * 1000)


@pytest.mark.parametrize("name", ORACLES)
def test_logits_and_tokens_are_those_of_the_authors_code(name, shared_data):
    path, _, answers, arguments = oracles.relative_of(shared_data, name)
    model = vit_jax.load(path)
    assert model.config.mlp_dim == arguments["mlp_ratio"] * arguments["embed_dim"]
    assert model.config.position_grid == (14, 14)
    output = jax.device_get(jax.jit(lambda x: model(x, capture=True))(answers["images"]))
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    close(output.logits, answers["logits_f64"])
    close(output.features, answers["features"])
    close(output.tokens[: len(answers["tokens"])], answers["tokens"])
    close(output.intermediates["blocks"][0, :1], answers["block_0"])
    embedded = jax.jit(lambda x: model.add_positions(model.embedding(x)))(answers["images"][:1])
    close(embedded, answers["embedded"])


@pytest.mark.parametrize("name", ORACLES)
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


def test_a_table_of_positions_as_large_as_the_patches_is_taken_as_it_is():
    config = tiny(position_grid=(2, 3))
    params = parameters(config)
    exact = forward(config, oracles.in_float64(params, {}), images(config).astype(np.float64))
    np.testing.assert_allclose(run(config, params, images(config)).logits, exact, atol=1e-5)


@pytest.mark.parametrize("pool", ["mean", "gem", "map"])
def test_without_a_class_token_there_is_one_token_less(pool):
    config = tiny(pool=pool, weighted_layers=True)
    params = parameters(config)
    assert config.tokens == 6 and not {"class_token", "class_position"} & set(params)
    assert params["layers"]["token_mlp"]["up"]["kernel"].shape == (2, 6, 24)
    assert np.isfinite(run(config, params, images(config)).logits).all()


def test_dropout_and_stochastic_depth_are_for_training_alone():
    config = tiny(dropout=0.5, drop_path=0.5)
    params, x = parameters(config), images(config)
    forward = jax.jit(functools.partial(apply, config))
    np.testing.assert_allclose(forward(params, x).logits, run(tiny(), params, x).logits, atol=1e-6)
    drawn = [forward(params, x, jax.random.key(i)).logits for i in (0, 0, 1)]
    np.testing.assert_array_equal(*drawn[:2])
    assert np.abs(drawn[0] - drawn[2]).max() > 1e-3
    model = nnx.merge(registry.abstract(config)[0], params)
    with pytest.raises(ValueError, match="needs rngs unless deterministic=True"):
        model(x, deterministic=False)


def test_the_grid_of_patches_stays_and_so_larger_images_take_larger_patches():
    source = tiny()
    params = parameters(source)
    adjust = functools.partial(fitting.adapt, params, source, reset=(), resize="scipy")
    for change in (dict(image_size=(16, 24)), dict(patch=2), dict(image_size=(12, 8))):
        target = dataclasses.replace(source, **change)
        with pytest.raises(
            ConfigError,
            match=r"for 2 × 3 patches do not fit images of .* in patches of .*What fits is 8x12 with "
            r"model.patch=4, 16x24 with model.patch=8",
        ):
            adjust(registry.abstract(target)[1], target)
    target = dataclasses.replace(source, image_size=(16, 24), patch=8)
    found = adjust(registry.abstract(target)[1], target)
    # Patches shown twice as large are seen as before: what the pseudo-inverse is for.
    x = images(source)
    pieces = x.reshape(3, 2, 4, 3, 4, 3).swapaxes(2, 3)
    large = jax.image.resize(pieces, (3, 2, 3, 8, 8, 3), "linear").swapaxes(2, 3)
    np.testing.assert_allclose(
        run(target, found, large.reshape(3, 16, 24, 3)).logits,
        run(source, params, x).logits,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("FF-S/16", {}, "there is no FF of size 'S'"),
        ("FF-B/16", {"image_size": 225}, "cannot be split into patches of 16"),
        ("FF-B/16", {"position_grid": (14,)}, "model.position_grid"),
        ("FF-B/16", {"pool": "first"}, "'first' is not one of token, mean, gem, map"),
        ("FF-B/16", {"heads": 12}, "has no option 'heads'"),
    ],
)
def test_what_is_no_such_network_is_an_error_that_says_so(name, options, words):
    with pytest.raises(ConfigError, match=words):
        registry.model_config(name, **options)


@pytest.mark.parametrize("options", [{"pool": "mean"}, {"weighted_layers": True}])
def test_what_the_authors_code_cannot_compute_is_not_written(options, tmp_path):
    config = tiny(**options)
    with pytest.raises(CheckpointError, match="reads the class token of the last layer"):
        formats.write_checkpoint(
            formats.LoadedCheckpoint(config, parameters(config)),
            tmp_path / "a.safetensors",
            "authors",
        )


def test_a_file_that_lacks_a_tensor_or_has_one_more_names_it(shared_data, tmp_path):
    _, arrays, _, _ = oracles.relative_of(shared_data, "ff_patch16")
    arrays["blocks.1.surplus"] = arrays.pop("blocks.1.norm2.weight")
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(CheckpointError) as error:
        vit_jax.load(tmp_path / "a.npz")
    assert "blocks.1.norm2.weight (197,): missing in the file" in str(error.value)
    assert "blocks.1.surplus (197,): in the file, but not in the model" in str(error.value)


@pytest.mark.slow
def test_a_small_one_learns_digits(command, tmp_path):
    recipe = "configs/feed_forward.py:smoke"
    code, out, _ = command("train", f"--config={recipe}", f"--workdir={tmp_path / 'run'}")
    assert code == 0 and float(re.search(r"accuracy ([\d.]+)", out)[1]) >= 0.95
