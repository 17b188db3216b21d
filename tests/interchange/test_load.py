"""`vit_jax.load` and `load_weights`: published files, at other resolutions, with other heads."""

import functools
import json
import re

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from flax import nnx

import vit_jax
from tests.repeats import slow_unless
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import fingerprints, reading, saving
from vit_jax.compute import digests
from vit_jax.config import default_config
from vit_jax.interchange import fitting, formats, loading
from vit_jax.models import naming, registry

from .conftest import run

ORACLE = [
    "vt_vit_testing", "vt_vit_gap", "vt_vit_tok_rep", "vt_vit_tok_rep.prelinen",
    "vt_vit_tok_rep.as_bv", "vt_hybrid_tiny", "vt_hybrid_tiny.prelinen", "vt_mixer_tiny",
    "bv_vit_gap_learn", "bv_vit_gap_learn.scan", "bv_vit_tok_learn_rep",
    "bv_vit_tok_learn_rep.scan", "bv_vit_map_sincos2d", "bv_vit_map_sincos2d.scan",
    "bv_bit_tiny", "bv_bit_paper_tiny", "bv_bit_paper_tiny.tfnames",
]  # fmt: skip
# The file cannot tell the resolution.
OPEN_SIZE = ("bv_vit_map_sincos2d", "bv_bit_tiny", "bv_bit_paper_tiny")
# What the file says and a new model has to be told.
TOLD = ("num_classes", "patch", "depth", "width", "mlp_dim", "heads", "pool", "representation",
        "position", "position_of_class", "token_mlp_dim", "units", "width_factor")  # fmt: skip


def answers(shared_data, name):
    return np.load(shared_data / "oracle" / f"{name.split('.')[0]}.io.npz")


def check(model, io, name):
    out = run(model, io["image"])
    tolerance = 2e-5 if "bit" in name or "hybrid" in name else 1e-5
    np.testing.assert_allclose(out.logits, io["logits"], atol=tolerance, rtol=0)
    np.testing.assert_allclose(out.features, io["pre_logits"], atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ORACLE)
def test_a_published_file_loads_by_itself_and_gives_its_codes_logits(name, shared_data):
    path, io = shared_data / "oracle" / f"{name}.ckpt.npz", answers(shared_data, name)
    size = io["image"].shape[1]
    said = {"image_size": size} if name.split(".")[0] in OPEN_SIZE else {}
    model = vit_jax.load(path, **said)
    assert model.config.image_size == size
    check(model, io, name)


# The others are these models with other options, or the same tensors by other names: the test above reads them.
NEW = ("vt_vit_tok_rep", "vt_hybrid_tiny", "vt_mixer_tiny", "bv_vit_map_sincos2d", "bv_bit_tiny")


@pytest.mark.parametrize("name", slow_unless(NEW, ORACLE))
def test_a_new_model_takes_the_weights_of_a_published_file(name, shared_data):
    path, io = shared_data / "oracle" / f"{name}.ckpt.npz", answers(shared_data, name)
    model = created(formats.read_checkpoint(path).model_config, io["image"].shape[1])
    vit_jax.load_weights(model, path)
    state, expected = (
        nnx.to_pure_dict(nnx.state(m))
        for m in (model, vit_jax.load(path, image_size=io["image"].shape[1]))
    )
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@functools.cache
def created(config, size):
    """A new model that was told what a published file's config says."""
    options = {option: getattr(config, option) for option in TOLD if hasattr(config, option)}
    return vit_jax.create_model(naming.nearest_name(config), image_size=size, **options)


@pytest.mark.parametrize("side", [3, 4, 6, 8])
def test_flexivit_is_loaded_at_any_grid(side, shared_data):
    io = answers(shared_data, "bv_flexi_tiny")
    path, size = shared_data / "oracle" / "bv_flexi_tiny.ckpt.npz", io["image"].shape[1]
    model = vit_jax.load(path, image_size=size, patch=size // side, resize="bilinear")
    assert model.config.grid == (side, side)
    np.testing.assert_allclose(
        run(model, io["image"]).logits, io[f"logits_seqhw{side}"], atol=1e-5, rtol=0
    )


def test_the_config_of_what_was_loaded_is_with_the_model(file, images, expected):
    model = vit_jax.load(file)
    assert (model.config.activation, model.config.epsilon) == ("gelu_tanh", 1e-6)
    np.testing.assert_allclose(run(model, images).logits, expected, atol=1e-5)


def test_another_resolution_zooms_the_grid_and_keeps_the_class_row(file, arrays):
    model = vit_jax.load(file, image_size=10)
    table = arrays["Transformer/posembed_input/pos_embedding"]
    grid = scipy.ndimage.zoom(table[0, 1:].reshape(3, 3, -1), (5 / 3, 5 / 3, 1), order=1)
    np.testing.assert_allclose(model.position[0, 1:], grid.reshape(25, -1), atol=1e-6)
    np.testing.assert_array_equal(model.position[0, 0], table[0, 0])
    np.testing.assert_array_equal(model.class_token, arrays["cls"])


def test_another_number_of_classes_gives_a_head_of_zeros_and_leaves_the_features(file, images):
    model, old = vit_jax.load(file, num_classes=7), vit_jax.load(file)
    assert run(model, images).logits.shape == (4, 7) and not np.any(run(model, images).logits)
    np.testing.assert_array_equal(run(model, images).features, run(old, images).features)
    assert run(vit_jax.load(file, num_classes=0), images).logits is None


def test_the_layer_before_the_head_can_be_left_out_as_the_official_code_does(
    arrays, tmp_path, images
):
    rng = np.random.default_rng(0)
    extra = {
        "pre_logits/kernel": rng.random((8, 8), np.float32),
        "pre_logits/bias": rng.random(8, np.float32),
    }
    np.savez(tmp_path / "i21k.npz", **arrays | extra)
    assert vit_jax.load(tmp_path / "i21k.npz").config.representation == 8
    model = vit_jax.load(tmp_path / "i21k.npz", representation=0, num_classes=2)
    assert not hasattr(model, "representation") and run(model, images).logits.shape == (4, 2)


def test_a_mixer_takes_images_twice_as_large_by_the_papers_rule(shared_data):
    path = shared_data / "oracle" / "vt_mixer_tiny.ckpt.npz"
    small, large = vit_jax.load(path), vit_jax.load(path, image_size=64)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    # Four times the same image: each quarter is treated as the image was.
    np.testing.assert_allclose(
        run(large, np.tile(images, (1, 2, 2, 1))).logits, run(small, images).logits, atol=1e-5
    )
    with pytest.raises(ConfigError, match="What fits is 32, 64, 96, …: K times that size"):
        vit_jax.load(path, image_size=48)


def make(name="ViT-mu/2", **options):
    """A model whose parameters are 1, which takes no compilation to make."""
    told = (
        dict(image_size=6, width=8, depth=2, heads=2, mlp_dim=12, num_classes=5)
        if name == "ViT-mu/2"
        else {}
    )
    definition, like = registry.abstract(registry.model_config(name, **told | options))
    return nnx.merge(
        definition, jax.tree.map(lambda x: jnp.asarray(np.ones(x.shape, x.dtype)), like)
    )


WRONG = {
    "class count": (dict(num_classes=9),
                    r"head/kernel is \(8, 5\) in the checkpoint, \(8, 9\) in the model"),
    "width": (dict(width=16),
              r"class_token is \(1, 1, 8\) in the checkpoint, \(1, 1, 16\) in the model"),
    "pooling": (dict(pool="map"), r"pool/probe \(1, 1, 8\) is not in the checkpoint"),
    "activation": (dict(activation="gelu"),
                   "activation is 'gelu_tanh' in the checkpoint, 'gelu' in the model"),
    "epsilon": (dict(epsilon=1e-12), "epsilon is 1e-06 in the checkpoint, 1e-12 in the model"),
    "no position of the class": (dict(position_of_class=False),
                                 r"position is \(1, 10, 8\) in the checkpoint, \(1, 9, 8\)"),
}  # fmt: skip


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_weights_that_do_not_fit_a_model_are_refused_and_it_stays_as_it_was(options, message, file):
    model = make(**options)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    with pytest.raises(ConfigError, match=message):
        vit_jax.load_weights(model, file)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))


def test_another_family_is_said_before_its_tensors(file):
    model = make("Mixer-S/32", image_size=32, depth=1, width=8, mlp_dim=8, token_mlp_dim=4)
    with pytest.raises(
        ConfigError,
        match="the checkpoint holds a model of the family vit, the model is of the family mixer",
    ):
        vit_jax.load_weights(model, file)


def test_what_is_to_be_reset_stays_as_it_is_and_the_rest_is_loaded(file, arrays):
    model = make(num_classes=9, image_size=8)
    vit_jax.load_weights(model, file, reset=("head/.*",), resize="bicubic")
    np.testing.assert_array_equal(model.head.kernel, np.ones((8, 9)))
    np.testing.assert_array_equal(model.embedding.kernel, arrays["embedding/kernel"])
    with pytest.raises(ConfigError, match="reset: the pattern 'heads/"):
        vit_jax.load_weights(model, file, reset=("heads/.*",))


def test_some_layers_can_be_reset_and_the_others_are_loaded(file):
    whole, model = make(), make()
    vit_jax.load_weights(whole, file)
    vit_jax.load_weights(model, file, reset=("encoder/layers[-1:]/mlp/.*",))
    expected, found = (patterns.named(nnx.to_pure_dict(nnx.state(m))) for m in (whole, model))
    assert expected.keys() == found.keys()
    for name, array in found.items():
        loaded = np.array(expected[name])
        if "/layers/mlp/" in name:
            loaded[1] = 1.0
        np.testing.assert_array_equal(array, loaded, err_msg=name)
    with pytest.raises(ConfigError, match=r"reset: the pattern 'encoder/layers\[2:\]/.*selects no"):
        vit_jax.load_weights(model, file, reset=("encoder/layers[2:]/.*",))


def test_weights_go_to_their_shards_directly(file):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, jax.P(None, None, "x"))
    model = make()
    fresh = nnx.to_pure_dict(nnx.state(model))
    up = fresh["encoder"]["layers"]["mlp"]["up"]
    up["kernel"] = jax.device_put(up["kernel"], sharding)
    checkpoint = formats.read_checkpoint(file)
    with jax.transfer_guard_device_to_device("disallow"):  # Nothing is cut on a device.
        loaded = fitting.adapt(
            checkpoint.params,
            checkpoint.model_config,
            fresh,
            model.config,
            reset=(),
            resize="scipy",
        )
    kernel = loaded["encoder"]["layers"]["mlp"]["up"]["kernel"]
    whole = np.asarray(checkpoint.params["encoder"]["layers"]["mlp"]["up"]["kernel"])
    assert kernel.sharding == sharding and len(kernel.addressable_shards) == 2
    for shard, half in zip(kernel.addressable_shards, np.split(whole, 2, axis=-1), strict=True):
        np.testing.assert_array_equal(shard.data, half)


def test_a_run_is_loaded_as_every_other_checkpoint(file, images, expected, tmp_path):
    formats.write_checkpoint(formats.read_checkpoint(file), tmp_path / "run", "orbax")
    model = vit_jax.load(tmp_path / "run")
    np.testing.assert_allclose(run(model, images).logits, expected, atol=1e-5)
    trained = vit_jax.load_run(tmp_path / "run")
    assert trained.model_config == model.config and trained.step == 0
    assert trained.classes == ("0", "1", "2", "3", "4")
    with pytest.raises(CheckpointError, match="holds another model"):
        formats.read_checkpoint(tmp_path / "run", width=16)


def test_a_run_read_a_parameter_at_a_time_is_proven_too(file, tmp_path):
    checkpoint = formats.read_checkpoint(file)
    formats.write_checkpoint(checkpoint, tmp_path / "run", "orbax")
    params = jax.tree.map(np.asarray, checkpoint.params)
    marks = np.array(fingerprints.fingerprint({"params": params})["params"])
    np.testing.assert_array_equal(marks, list(map(digests.host_mark, jax.tree.leaves(params))))
    for x in (
        np.arange(9).astype(jnp.bfloat16),
        np.arange(-3, 3, dtype=np.int32),
        np.float32(-1.5),
    ):
        (mark,) = fingerprints.fingerprint({"one": x})["one"]
        np.testing.assert_array_equal(digests.host_mark(x), mark)
    # The same parameters with the mark of one of them wrong, as if its bits had changed.
    marks[patterns.names(params).index("encoder/norm/scale")] += 1
    checkpoints = saving.Checkpoints(tmp_path / "run", default_config().checkpoint)
    description = reading.read_description(reading.find_checkpoint(tmp_path / "run"))
    checkpoints.save_now(1, {"params": params}, description, {"params": marks})
    checkpoints.close()
    with pytest.raises(CheckpointError, match="the bits of params/encoder/norm/scale are not"):
        loading.convert(tmp_path / "run", tmp_path / "out.npz", "official")
    assert not (tmp_path / "out.npz").exists()


def test_the_oracle_is_complete(shared_data):
    there = {
        path.name.removesuffix(".ckpt.npz") for path in (shared_data / "oracle").glob("*.ckpt.npz")
    }
    assert there == {*ORACLE, "bv_flexi_tiny"}
    assert json.loads(str(answers(shared_data, "vt_vit_gap")["config"]))["classifier"] == "gap"


@pytest.mark.parametrize(
    "size", [0, -16, 16.5, 224.0, "16x", "wide", (16,) * 3, (16, 0), (16, "8"), True]
)
def test_what_is_no_size_is_refused_in_a_sentence(size, file):
    for make in (lambda: vit_jax.create_model("ViT-mu/2", image_size=size),
                 lambda: vit_jax.load(file, image_size=size)):  # fmt: skip
        with pytest.raises(
            ConfigError, match=f"image_size = {re.escape(repr(size))} is no image size: give"
        ):
            make()


@pytest.mark.parametrize("size", [6, "6", "6x6", (6, 6), [6, 6]])
def test_a_square_may_be_said_in_several_ways(size, file):
    assert vit_jax.load(file, image_size=size).config.image_size == 6
    assert registry.model_config("ViT-mu/2", image_size=size).image_size == 6


@pytest.mark.parametrize("form", ["official", "timm", "huggingface", "orbax"])
def test_a_tensor_with_a_nan_is_refused_by_name(form, file, tmp_path):
    checkpoint = formats.read_checkpoint(file, activation="gelu" if form == "timm" else "gelu_tanh")
    scale = np.array(checkpoint.params["encoder"]["norm"]["scale"])
    scale[3] = np.nan
    checkpoint.params["encoder"]["norm"]["scale"] = scale
    path = tmp_path / {"official": "x.npz", "timm": "x.safetensors"}.get(form, "folder")
    formats.write_checkpoint(checkpoint, path, form)
    theirs = {"official": "Transformer/encoder_norm/scale", "timm": "norm.weight",
              "huggingface": "vit.layernorm.weight", "orbax": "encoder/norm/scale"}[form]  # fmt: skip
    with pytest.raises(CheckpointError, match=f"{theirs}: 1 of 8 numbers are not finite"):
        vit_jax.load(path)
    with pytest.raises(CheckpointError, match="not finite"):
        loading.convert(path, tmp_path / "out.npz", "official", activation="gelu_tanh")
    assert not (tmp_path / "out.npz").exists()
    model = vit_jax.load(path, allow_nonfinite=True)
    assert np.isnan(model.encoder.norm.scale[3]) and not np.isnan(model.encoder.norm.scale[0])


def test_big_visions_pooling_by_the_first_token_is_not_taken_for_a_mean_without_a_word(
    shared_data, tmp_path, caplog
):
    """Its pool_type='0' has the tensors of a mean; nothing but the user can tell."""
    path = shared_data / "oracle" / "bv_vit_gap_learn.ckpt.npz"
    io = answers(shared_data, "bv_vit_gap_learn")
    absl.logging.get_absl_logger().propagate = True
    mean = vit_jax.load(path)
    assert "does not state pool" in caplog.text and "set pool='first'" in caplog.text
    caplog.clear()
    first = vit_jax.load(path, pool="first")
    assert "does not state" not in caplog.text and mean.config.pool == "mean"
    out = run(first, io["image"])
    np.testing.assert_allclose(out.tokens, run(mean, io["image"]).tokens, atol=1e-6)
    np.testing.assert_array_equal(out.features, out.tokens[:, 0])
    # A model that says which is meant is not warned.
    like = registry.abstract_weights(first.config)[1]
    checkpoint = formats.read_checkpoint(path, hints=vars(first.config))
    assert (
        loading.fit_weights(checkpoint, like, first.config) and "does not state" not in caplog.text
    )
    with pytest.raises(CheckpointError, match="has no pooling 'first'"):
        loading.convert(path, tmp_path / "x.npz", "official", pool="first")
