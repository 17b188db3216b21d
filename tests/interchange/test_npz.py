"""The `.npz` files of vision_transformer, big_vision and BiT: recognised, or refused."""

import os
import pathlib
import pickle

import jax
import ml_dtypes
import numpy as np
import pytest

from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import formats, loading, npz
from vit_jax.models import registry
from vit_jax.models.zoo import hybrid, mixer, resnet, vit_zoo

from .conftest import official_vit, run


def test_the_model_is_recognised_from_the_file_alone(file):
    config = formats.read_checkpoint(file).model_config
    assert config == vit_zoo.Config(
        image_size=6, patch=2, width=8, depth=2, heads=2, mlp_dim=12, num_classes=5, pool="token",
        activation="gelu_tanh", epsilon=1e-6,
    )  # fmt: skip


def big_vision(arrays):
    """The same with big_vision's names: the class token's position is added to the token."""
    linen = official_vit((1, 0, 0))
    position = linen.pop("Transformer/posembed_input/pos_embedding")
    return linen | {"pos_embedding": position[:, 1:], "cls": linen["cls"] + position[:, :1]}


def scanned(arrays):
    """Blocks stacked along a leading axis."""
    first = "Transformer/encoderblock_0/"
    out = {name: array for name, array in arrays.items() if "encoderblock" not in name}
    for name in (n for n in arrays if n.startswith(first)):
        each = [arrays[name.replace("block_0", f"block_{layer}")] for layer in range(2)]
        out[name.replace("block_0", "block")] = np.stack(each)
    return out


def prefixed(prefix):
    return lambda arrays: {prefix + name: array for name, array in big_vision(arrays).items()}


VARIANTS = {
    "pre-Linen": lambda arrays: arrays,
    "Linen": lambda arrays: official_vit((1, 0, 0)),
    "big_vision": big_vision,
    "scanned": lambda arrays: scanned(big_vision(arrays)),
    "params/": prefixed("params/"),
    "opt/target/": prefixed("opt/target/"),
    "params/img/": prefixed("params/img/"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_names_gives_the_logits_of_the_equations_and_is_written_back(
    variant, arrays, images, expected, tmp_path, same_arrays
):
    np.savez(tmp_path / "in.npz", **VARIANTS[variant](arrays))
    model = loading.load(tmp_path / "in.npz")
    np.testing.assert_allclose(run(model, images).logits, expected, atol=1e-5)
    checkpoint = formats.read_checkpoint(tmp_path / "in.npz")
    formats.write_checkpoint(checkpoint, tmp_path / "out.npz", checkpoint.layout["format"])
    same_arrays(tmp_path / "in.npz", tmp_path / "out.npz")


def test_optimizer_state_and_text_tower_are_left_out(arrays, images, expected, tmp_path):
    other = {
        "params/txt/head/kernel": np.zeros((2, 2)),
        "params/t": np.zeros(1),
        "opt/0/count": np.int32(3),
    }
    np.savez(tmp_path / "in.npz", **VARIANTS["params/img/"](arrays), **other)
    np.testing.assert_allclose(
        run(loading.load(tmp_path / "in.npz"), images).logits, expected, atol=1e-5
    )


def test_bfloat16_is_recovered_and_written_back_as_it_was(arrays, tmp_path, same_arrays):
    np.savez(tmp_path / "in.npz", **{n: a.astype(ml_dtypes.bfloat16) for n, a in arrays.items()})
    assert np.load(tmp_path / "in.npz")["cls"].dtype == np.dtype("V2")
    checkpoint = formats.read_checkpoint(tmp_path / "in.npz")
    np.testing.assert_array_equal(
        checkpoint.params["class_token"],
        arrays["cls"].astype(ml_dtypes.bfloat16).astype(np.float32),
    )
    formats.write_checkpoint(checkpoint, tmp_path / "out.npz", "official")
    same_arrays(tmp_path / "in.npz", tmp_path / "out.npz")


MODELS = {
    "gap without class row": ("ViT-mu/2", dict(depth=2, image_size=6, pool="mean"), "official"),
    "pre_logits": ("ViT-mu/2", dict(depth=2, image_size=6, representation=12), "official"),
    "headless": ("ViT-mu/2", dict(depth=1, image_size=6, num_classes=0), "official"),
    "map and sincos": ("ViT-mu/2", dict(
        depth=2, image_size=224, pool="map", position="sincos2d", position_of_class=False),
        "big_vision"),
    "hybrid": ("R26+ViT-S/32", dict(
        depth=2, width=16, heads=2, mlp_dim=24, units=(1, 2), width_factor=0.5, image_size=32),
        "official"),
    "R+Ti/16, root alone": ("R+ViT-Ti/16", dict(
        depth=1, width=16, heads=2, mlp_dim=24, width_factor=0.5, image_size=64), "official"),
    "mixer": ("Mixer-S/32", dict(
        depth=2, width=16, mlp_dim=24, token_mlp_dim=8, image_size=64), "official"),
    "BiT": ("BiT-R50x1", dict(units=(1, 3, 1, 12), width_factor=0.5, image_size=224), "big_vision"),
    "ResNet v1": ("ResNet-R50x1", dict(
        units=(2, 1, 1, 1), width_factor=0.5, image_size=224), "big_vision"),
}  # fmt: skip


@pytest.mark.parametrize("name, options, format", MODELS.values(), ids=MODELS)
def test_every_family_is_recognised_from_what_was_written(
    name, options, format, tmp_path, same_arrays
):
    config = registry.model_config(name, **{"num_classes": 3} | options)
    rng = np.random.default_rng(0)
    params = patterns.map_named(
        lambda _, x: rng.standard_normal(x.shape, np.float32), registry.abstract(config)[1]
    )
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params), tmp_path / "file.npz", format
    )
    checkpoint = formats.read_checkpoint(tmp_path / "file.npz")
    if getattr(config, "pool", "token") == "token":
        assert checkpoint.model_config == config
    for (path, array), (_, again) in zip(flat(params), flat(checkpoint.params), strict=True):
        np.testing.assert_array_equal(array, again, err_msg=path)
    formats.write_checkpoint(checkpoint, tmp_path / "again.npz", format)
    same_arrays(tmp_path / "file.npz", tmp_path / "again.npz")


def flat(tree):
    return list(zip(patterns.names(tree), jax.tree.leaves(tree), strict=True))


def test_a_fixed_position_embedding_is_written_out_for_the_official_code(tmp_path):
    config = registry.model_config(
        "ViT-mu/2", image_size=6, depth=1, position="sincos2d", pool="mean", num_classes=3
    )
    rng = np.random.default_rng(0)
    params = patterns.map_named(
        lambda _, x: rng.standard_normal(x.shape, np.float32), registry.abstract(config)[1]
    )
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params), tmp_path / "file.npz", "official"
    )
    table = np.load(tmp_path / "file.npz")["Transformer/posembed_input/pos_embedding"]
    # Quarters: sin x·ω, cos x·ω, sin y·ω, cos y·ω; the place after the first row's first is x = 1,
    # y = 0 and ω starts at 1.
    np.testing.assert_allclose(table[0, 1, ::8], [np.sin(1), np.cos(1), 0, 1], atol=1e-7)


class Code:
    """Leaves a trace if it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_pickled_objects_are_refused_and_their_code_is_not_run(arrays, tmp_path):
    trace = tmp_path / "code_ran"
    np.savez(tmp_path / "bad.npz", **arrays | {"cls": np.array([Code(trace)], dtype=object)})
    with pytest.raises(
        CheckpointError, match="cls.npy holds pickled Python objects, which could run code"
    ):
        formats.read_checkpoint(tmp_path / "bad.npz")
    assert not trace.exists()
    pytest.importorskip("torch")  # without it no pickle is opened at all
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(Code(trace)))
    with pytest.raises(CheckpointError, match="pickle.*, which could run code"):
        formats.read_checkpoint(tmp_path / "bad.pkl")
    assert not trace.exists()


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_said_to_be_damaged(file, tmp_path, share):
    content = file.read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: int(share * len(content))])
    with pytest.raises(
        CheckpointError, match=r"cut.npz begins as a zip archive .* cut short or damaged"
    ):
        formats.read_checkpoint(tmp_path / "cut.npz")


def test_a_changed_bit_is_noticed_when_the_tensor_is_read(file, tmp_path):
    content = bytearray(file.read_bytes())
    at = content.index(b"cls.npy") + 170
    content[at] ^= 1
    (tmp_path / "bit.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match="bit.npz is damaged.*cls.npy"):
        loading.load(tmp_path / "bit.npz")


CONTENTS = {
    "empty": (b"", "is empty"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5"),
    "web page": (b"<!DOCTYPE html><html>", "web page"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    "text": (b"hello", "begins with b'hello'"),
}


@pytest.mark.parametrize("content, message", CONTENTS.values(), ids=CONTENTS)
def test_what_is_no_checkpoint_is_said_to_look_like_something(content, message, tmp_path):
    (tmp_path / "file.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        formats.read_checkpoint(tmp_path / "file.npz")


def test_arrays_of_something_else_a_strange_directory_and_nothing_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(CheckpointError, match="no checkpoint of a known format"):
        formats.read_checkpoint(tmp_path / "other.npz")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "readme.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="a folder with readme.txt"):
        formats.read_checkpoint(tmp_path / "folder")
    with pytest.raises(CheckpointError, match="nothing.npz does not exist"):
        formats.read_checkpoint(tmp_path / "nothing.npz")


def test_a_missing_and_a_strange_tensor_are_both_named(arrays, tmp_path):
    wrong = arrays | {"Transformer/encoderblock_0/Adapter_0/kernel": np.zeros((8, 4), np.float32)}
    del wrong["Transformer/encoder_norm/bias"]
    np.savez(tmp_path / "wrong.npz", **wrong)
    with pytest.raises(CheckpointError) as raised:
        formats.read_checkpoint(tmp_path / "wrong.npz")
    assert "Transformer/encoder_norm/bias (8,): missing in the file" in str(raised.value)
    assert (
        "Transformer/encoderblock_0/Adapter_0/kernel (8, 4): in the file, but not in the model"
        in str(raised.value)
    )


def test_an_override_that_is_no_option_or_does_not_fit_is_an_error(file):
    with pytest.raises(
        ConfigError, match="a vit model has no option 'activations'; did you mean 'activation'"
    ):
        formats.read_checkpoint(file, activations="gelu")
    with pytest.raises(
        CheckpointError, match=r"query/kernel: \(8, 2, 4\) in the file, \(8, 4, 2\) in the model"
    ):
        formats.read_checkpoint(file, heads=4)


def test_a_failed_write_leaves_nothing_behind(arrays, tmp_path):
    def broken():
        yield "cls", arrays["cls"]
        raise CheckpointError("the source is damaged")

    (tmp_path / "old.npz").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="the source is damaged"):
        npz.write(tmp_path / "old.npz", broken())
    assert [p.name for p in tmp_path.iterdir()] == ["old.npz"] and (
        tmp_path / "old.npz"
    ).read_bytes() == b"old"


def test_a_format_that_cannot_express_a_model_says_so(file, tmp_path):
    checkpoint = formats.read_checkpoint(file, activation="gelu")
    with pytest.raises(
        CheckpointError, match="computes with activation = 'gelu_tanh', this model with 'gelu'"
    ):
        formats.write_checkpoint(checkpoint, tmp_path / "out.npz", "big_vision")
    registers = registry.model_config("ViT-mu/2", image_size=6, depth=1, registers=4)
    params = patterns.map_named(
        lambda _, x: np.zeros(x.shape, np.float32), registry.abstract(registers)[1]
    )
    with pytest.raises(
        CheckpointError, match=r"no place for these parameters:\n  registers \(1, 4, 32\)"
    ):
        formats.write_checkpoint(
            formats.LoadedCheckpoint(registers, params), tmp_path / "out.npz", "official"
        )
    assert not list(tmp_path.iterdir())


def first_mixer(tokens=4, width=8, depth=2, token_mlp=6, mlp=12, classes=5):
    """A Mixer in the names of the first files, beside its arrays by the published ones."""
    rng = np.random.default_rng(3)
    old, published = {}, {}

    def add(old_name, name, *shape, idle=()):
        published[name] = rng.normal(0, 0.5, shape).astype(np.float32)
        old[old_name] = np.expand_dims(published[name], idle)

    def add_norm(old_name, name):
        add(f"{old_name}/scale", f"{name}/scale", width)
        add(f"{old_name}/bias", f"{name}/bias", width)

    add("embedding/kernel", "stem/kernel", 2, 2, 3, width)
    add("embedding/bias", "stem/bias", width)
    add_norm("Mixer/encoder_norm", "pre_head_layer_norm")
    add("head/kernel", "head/kernel", width, classes)
    add("head/bias", "head/bias", classes)
    for layer in range(depth):
        theirs, ours = f"Mixer/encoderblock_{layer}", f"MixerBlock_{layer}"
        for n, (kind, side, hidden) in enumerate(
            [("token", tokens, token_mlp), ("channel", width, mlp)]
        ):
            add_norm(f"{theirs}/LayerNorm_{2 * n}", f"{ours}/LayerNorm_{n}")
            at, to = f"{theirs}/{kind}_mixing_phase_0", f"{ours}/{kind}_mixing"
            add(f"{at}/kernel1", f"{to}/Dense_0/kernel", side, hidden, idle=0)
            add(f"{at}/bias1", f"{to}/Dense_0/bias", hidden, idle=(0, 1))
            add(f"{at}/kernel2", f"{to}/Dense_1/kernel", hidden, side, idle=0)
            add(f"{at}/bias2", f"{to}/Dense_1/bias", side, idle=(0, 1))
    return old, published


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_the_first_mixers_are_those_of_the_published_names_and_come_back_byte_by_byte(
    prefix, tmp_path, same_arrays
):
    old, published = first_mixer()
    np.savez(tmp_path / "old.npz", **{prefix + name: array for name, array in old.items()})
    np.savez(tmp_path / "published.npz", **published)
    assert formats.detect(tmp_path / "old.npz") == "official"
    read, expected = (
        formats.read_checkpoint(tmp_path / f"{name}.npz") for name in ("old", "published")
    )
    assert (
        read.model_config
        == expected.model_config
        == mixer.Config(
            image_size=4, patch=2, width=8, depth=2, mlp_dim=12, token_mlp_dim=6, num_classes=5
        )
    )
    jax.tree.map(np.testing.assert_array_equal, read.params, expected.params)
    loading.convert(tmp_path / "old.npz", tmp_path / "run", "orbax")
    for source in ("old.npz", "run"):
        loading.convert(tmp_path / source, tmp_path / "again.npz", "official")
        same_arrays(tmp_path / "old.npz", tmp_path / "again.npz")


def test_models_of_the_same_class_family_are_not_confused(shared_data):
    families = {
        "vt_hybrid_tiny": hybrid.Config, "vt_mixer_tiny": mixer.Config,
        "bv_bit_tiny": resnet.Config,
        "bv_bit_paper_tiny.tfnames": resnet.Config, "vt_vit_gap": vit_zoo.Config,
    }  # fmt: skip
    for name, family in families.items():
        path = pathlib.Path(shared_data) / "oracle" / f"{name}.ckpt.npz"
        assert type(formats.read_checkpoint(path).model_config) is family, name
