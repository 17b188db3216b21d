"""Files as training scripts save them: read without running code, wherever the weights are in them."""

import argparse
import collections
import datetime
import pathlib
import sys

import absl.logging
import jax
import numpy as np
import pytest

from tests import lazily
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import formats, pickles, safetensors
from vit_jax.models import registry

torch = lazily.Package("torch")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small ViT's tensors by timm's names."""
    config = registry.model_config(
        "ViT-mu/4", image_size=8, depth=1, num_classes=2, activation="gelu"
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.standard_normal(x.shape).astype(np.float32), registry.abstract(config)[1]
    )
    path = tmp_path_factory.mktemp("vit") / "a.safetensors"
    formats.write_checkpoint(formats.LoadedCheckpoint(config, params), path, "timm")
    found, _ = safetensors.read(path)
    return {name: torch.from_numpy(np.asarray(x).copy()) for name, x in found.items()}


def read_head(path, **overrides):
    """One parameter of a file, which tells whose weights were read."""
    return np.asarray(
        formats.read_checkpoint(path, heads=2, **overrides).params["class_token"]
    ).ravel()[0]


def shifted(weights, by, prefix=""):
    return {prefix + name: tensor + by for name, tensor in weights.items()}


@pytest.fixture
def logged(caplog):
    absl.logging.get_absl_logger().propagate = True
    with caplog.at_level("INFO"):
        yield caplog


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_those_that_torch_reads(tmp_path, zipped):
    base = torch.arange(24, dtype=torch.float32)
    content = {
        "view": base.reshape(4, 6)[1:, ::2],
        "transposed": base.reshape(2, 3, 4).permute(2, 0, 1),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": base.half(),
        "brain": base.bfloat16(),
        "integers": torch.arange(5),
        "bits": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(base[3:5]),
    }
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    found = pickles.read(tmp_path / "a.pth")
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        expected = tensor.detach().float().numpy()
        assert found[name].shape == expected.shape, name
        np.testing.assert_array_equal(np.asarray(found[name], np.float32), expected)


class Run:
    """Code of a script, which no file of weights needs."""


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_harmless_is_skipped_and_all_else_refused(tmp_path, zipped):
    beside = {
        "args": argparse.Namespace(lr=0.1, output=pathlib.Path("/tmp/run")),
        "best": np.float64(81.2),
        "losses": np.arange(3.0),
        "when": datetime.datetime(2024, 5, 1),
        "state": collections.defaultdict(dict, {0: {"exp_avg": torch.ones(2)}}),
        "kinds": {1, 2},
        "shape": torch.Size([1]),
        "z": 1j,
    }
    old = dict(_use_new_zipfile_serialization=zipped)
    torch.save({"model": {"a": torch.ones(1)}} | beside, tmp_path / "a.pth", **old)
    np.testing.assert_array_equal(np.asarray(pickles.read(tmp_path / "a.pth")["model"]["a"]), [1])
    torch.save({"model": {"a": torch.ones(1)}, "run": Run()}, tmp_path / "b.pth", **old)
    with pytest.raises(CheckpointError, match="pickle with .*Run in it, which could run code"):
        pickles.read(tmp_path / "b.pth")
    torch.save({"f": print}, tmp_path / "c.pth", **old)
    with pytest.raises(CheckpointError, match="pickle with __builtin__.print in it"):
        pickles.read(tmp_path / "c.pth")


def test_a_pickle_cannot_change_what_reads_the_next_one(tmp_path):
    """BUILD with a state of attributes, on everything that it may name."""
    for module, name in (
        ("torch._utils", "_rebuild_tensor_v2"), ("collections", "defaultdict"), ("argparse", "Namespace"),
        ("collections", "OrderedDict"), ("torch", "FloatStorage"),
    ):  # fmt: skip
        program = f"c{module}\n{name}\n(N(dS'__call__'\nNstb.".encode()
        pickle = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}." + program
        (tmp_path / "a.pth").write_bytes(pickle)
        with pytest.raises(CheckpointError, match="damaged"):
            pickles.read(tmp_path / "a.pth")
    torch.save({"a": torch.ones(2)}, tmp_path / "b.pth")
    np.testing.assert_array_equal(np.asarray(pickles.read(tmp_path / "b.pth")["a"]), [1, 1])


@pytest.mark.parametrize(
    ("container", "prefix"),
    [
        ("state_dict", "model."), ("model_state_dict", ""), ("module", ""), ("net", "module."),
        ("teacher", "backbone."), ("student", "module.backbone."), ("ema", ""), ("model", "_orig_mod."),
        ("state_dict", "model.backbone._orig_mod."), (None, "encoder."), (None, "module._orig_mod."),
    ],
)  # fmt: skip
def test_weights_are_found_in_the_containers_and_behind_the_prefixes_of_scripts(
    weights, tmp_path, container, prefix
):
    state = collections.OrderedDict(shifted(weights, 0, prefix))
    content = {container: state, "epoch": 3} if container else state
    torch.save(content, tmp_path / "last.ckpt")
    checkpoint = formats.read_checkpoint(tmp_path / "last.ckpt", heads=2)
    assert checkpoint.model_config.num_classes == 2
    assert read_head(tmp_path / "last.ckpt") == pytest.approx(
        weights["cls_token"].ravel()[0].item()
    )


def test_of_several_the_average_is_read_and_the_log_and_the_user_say_which(
    weights, tmp_path, logged
):
    path = tmp_path / "model_best.pth.tar"
    content = {"state_dict": shifted(weights, 0), "state_dict_ema": shifted(weights, 1), "epoch": 3}
    torch.save(content | {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}, path)
    plain = weights["cls_token"].ravel()[0].item()
    assert read_head(path) == pytest.approx(plain + 1)
    assert "holds the weights state_dict_ema and state_dict: state_dict_ema are read" in logged.text
    assert "skipped, beside state_dict_ema: state_dict, epoch, optimizer" in logged.text
    assert read_head(f"{path}#state_dict=state_dict") == pytest.approx(plain)
    with pytest.raises(
        ConfigError, match="#state_dict=net: there are no tensors under that name; "
    ):
        read_head(f"{path}#state_dict=net")
    with pytest.raises(ConfigError, match="#sha256= is for https:// addresses"):
        read_head(f"{path}#sha256={'0' * 64}")
    torch.save({"weights": shifted(weights, 0)}, path)
    with pytest.raises(
        CheckpointError, match=r"tensors are under weights \(\d+\): choose one with"
    ):
        read_head(path)


def test_averaged_weights_behind_a_prefix_come_first(weights, tmp_path, logged):
    both = shifted(weights, 0, "model.") | shifted(weights, 1, "model_ema.module.")
    torch.save({"state_dict": both}, tmp_path / "a.ckpt")
    plain = weights["cls_token"].ravel()[0].item()
    assert read_head(tmp_path / "a.ckpt") == pytest.approx(plain + 1)
    assert "skipped, beside the model model_ema.module.: model.cls_token" in logged.text


def test_what_pretraining_needs_is_left_out_and_listed_and_nothing_else(weights, tmp_path, logged):
    extras = {
        "mask_token": torch.ones(1, 1, 32), "decoder_pos_embed": torch.ones(1, 5, 8),
        "decoder_blocks.0.attn.qkv.weight": torch.ones(3, 3),
    }  # fmt: skip
    torch.save({"model": weights | extras}, tmp_path / "mae.pth")
    read_head(tmp_path / "mae.pth")
    assert "skipped, not part of the model: mask_token (stands for patches" in logged.text
    assert "; decoder_pos_embed, decoder_blocks.0.attn.qkv.weight (predicts" in logged.text
    headed = shifted(weights, 0, "backbone.") | {"dino_head.mlp.0.weight": torch.ones(2, 2)}
    torch.save({"teacher": headed}, tmp_path / "dino.pth")
    read_head(tmp_path / "dino.pth")
    assert "beside the model backbone.: dino_head.mlp.0.weight" in logged.text
    torch.save({"teacher": headed | {"adapter.weight": torch.ones(2)}}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="of no known kind, do not: adapter.weight"):
        read_head(tmp_path / "x.pth")


def test_float64_is_rounded_and_said_and_nan_is_refused(weights, tmp_path, logged):
    torch.save({name: tensor.double() for name, tensor in weights.items()}, tmp_path / "a.pth")
    assert read_head(tmp_path / "a.pth") == weights["cls_token"].ravel()[0].item()
    assert "tensors of float64 are rounded to float32" in logged.text
    torch.save(weights | {"cls_token": weights["cls_token"] * np.nan}, tmp_path / "b.pth")
    with pytest.raises(CheckpointError, match="cls_token: 32 of 32 numbers are not finite"):
        read_head(tmp_path / "b.pth")
    assert np.isnan(read_head(tmp_path / "b.pth", allow_nonfinite=True))


def test_pickles_are_read_without_torch(weights, tmp_path, monkeypatch):
    torch.save(weights, tmp_path / "a.pth")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert read_head(tmp_path / "a.pth") == weights["cls_token"].ravel()[0].item()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("keep", [0.2, 0.6, 0.999])
def test_a_pickle_cut_short_is_an_error(weights, tmp_path, zipped, keep):
    torch.save(weights, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    data = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "b.pth").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match="b.pth is damaged"):
        formats.read_checkpoint(tmp_path / "b.pth")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_long_history_beside_the_weights_is_called_so(weights, tmp_path, zipped):
    content = {"model": weights, "train_losses": [i / 7 for i in range(500_000)]}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="such as a long history of losses. Save the tensors"):
        formats.read_checkpoint(tmp_path / "a.pth")


def test_whole_modules_and_plain_pickles_are_named_for_what_they_are(tmp_path):
    import pickle

    (tmp_path / "a.pth").write_bytes(pickle.dumps({"a": np.ones(3)}))
    with pytest.raises(CheckpointError, match="a pickle of other Python objects"):
        formats.read_checkpoint(tmp_path / "a.pth")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "b.pth")
    with pytest.raises(CheckpointError, match="pickle with torch.nn.modules.linear.Linear in it"):
        formats.read_checkpoint(tmp_path / "b.pth")
