"""Checkpoints of Flax in MessagePack: the official code's fine-tuned runs, bare parameters, and folders of
transformers; and folders in which a script left several checkpoints.
"""

import json
import shutil

import absl.logging
import jax
import msgpack
import numpy as np
import optax
import pytest
from flax import serialization, traverse_util

from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import formats, npz, safetensors
from vit_jax.models import registry

OPTIONS = dict(
    image_size=8, depth=2, width=16, mlp_dim=32, heads=2, num_classes=3, activation="gelu_tanh"
)


@pytest.fixture(scope="module")
def model():
    config = registry.model_config("ViT-mu/4", **OPTIONS)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: random.standard_normal(x.shape).astype(np.float32), registry.abstract(config)[1]
    )
    return formats.LoadedCheckpoint(config, params)


@pytest.fixture(scope="module")
def tree(model, tmp_path_factory):
    """The parameters by the official code's names, nested."""
    path = tmp_path_factory.mktemp("official") / "a.npz"
    formats.write_checkpoint(model, path, "official")
    with path.open("rb") as file:
        arrays = {name: np.asarray(x) for name, x in npz.read(path, file).items()}
    return traverse_util.unflatten_dict(arrays, sep="/")


def assert_read(path, model, **options):
    params = formats.read_checkpoint(path, heads=2, **options).params
    found = patterns.named(params)
    for name, array in patterns.named(model.params).items():
        np.testing.assert_array_equal(np.asarray(found[name]), array)


def optimizer_state(tree):
    optimizer = optax.chain(optax.clip_by_global_norm(1), optax.sgd(0.1, momentum=0.9))
    return optimizer.init(tree)


STATES = {
    "a fine-tuned run": lambda tree: (tree, optimizer_state(tree), 700),
    "bare parameters": lambda tree: tree,
    "variables": lambda tree: {"params": tree},
    "a train state": lambda tree: {"step": 3, "params": tree, "opt_state": optimizer_state(tree)},
    "an optimizer of before Optax": lambda tree: {"state": {"step": 4}, "target": tree},
    "that in a state": lambda tree: {"optimizer": {"target": tree, "state": {"step": 5}}},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_parameters_are_found_beside_an_optimizer(tree, model, tmp_path, state):
    (tmp_path / "checkpoint_700").write_bytes(serialization.to_bytes(state(tree)))
    assert_read(tmp_path / "checkpoint_700", model)
    assert formats.detect(tmp_path / "checkpoint_700") == "official"
    checkpoint = formats.read_checkpoint(tmp_path / "checkpoint_700", heads=2)
    formats.write_checkpoint(checkpoint, tmp_path / "again.npz", "official")
    assert_read(tmp_path / "again.npz", model)


def test_a_folder_of_transformers_with_flax_weights_is_read(model, tmp_path):
    formats.write_checkpoint(model, tmp_path / "hf", "huggingface")
    tensors, _ = safetensors.read(tmp_path / "hf" / "model.safetensors")
    arrays = {}
    for name, tensor in tensors.items():
        array, (path, last) = np.asarray(tensor), name.rpartition(".")[::2]
        if last == "weight" and array.ndim == 1:
            last = "scale"
        elif last == "weight":
            last, array = "kernel", array.transpose((1, 0) if array.ndim == 2 else (2, 3, 1, 0))
        arrays[f"{path}.{last}"] = array
    content = serialization.to_bytes(traverse_util.unflatten_dict(arrays, sep="."))
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "flax_model.msgpack").write_bytes(content)
    assert_read(tmp_path / "hf", model)
    with pytest.raises(ConfigError, match="#state_dict=x has no effect"):
        formats.read_checkpoint(f"{tmp_path / 'hf'}#state_dict=x")


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_what_is_cut_is_damaged(tree, tmp_path, kept):
    content = serialization.to_bytes(tree)
    (tmp_path / "a.msgpack").write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=r"a\.msgpack is damaged"):
        formats.read_checkpoint(tmp_path / "a.msgpack")


HOSTILE = {
    "many items": {"a": [0] * (2**20 + 1)},
    "many small maps": {"a": [{"b": i} for i in range(2**19 + 1)]},
    "objects": {"a": msgpack.ExtType(1, msgpack.packb(((1,), "O", b"12345678")))},
    "a shape of another size": {
        "a": msgpack.ExtType(1, msgpack.packb(((9, 9), "float32", b"1234")))
    },
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_would_take_memory_or_run_code_is_refused(tmp_path, content):
    (tmp_path / "a.msgpack").write_bytes(msgpack.packb(content))
    with pytest.raises(CheckpointError, match=r"a\.msgpack is damaged, or no MessagePack of Flax"):
        formats.read_checkpoint(tmp_path / "a.msgpack")


def test_deep_nesting_is_refused(tmp_path):
    (tmp_path / "a.msgpack").write_bytes(b"\x81\xa1a" * 400 + b"\xc0")
    with pytest.raises(CheckpointError, match="no checkpoint of a known format|is damaged"):
        formats.read_checkpoint(tmp_path / "a.msgpack")


def test_of_a_trainers_folder_the_newest_whole_checkpoint_is_read_and_named(
    model, tmp_path, caplog
):
    absl.logging.get_absl_logger().propagate = True
    older = formats.LoadedCheckpoint(model.model_config, jax.tree.map(np.zeros_like, model.params))
    formats.write_checkpoint(older, tmp_path / "checkpoint-900", "huggingface")
    formats.write_checkpoint(model, tmp_path / "checkpoint-1000", "huggingface")
    (tmp_path / "checkpoint-1100").mkdir()
    (tmp_path / "checkpoint-1100" / "config.json").write_text("{}")
    with caplog.at_level("INFO"):
        assert_read(tmp_path, model)
    assert "the newest, checkpoint-1000, is read (checkpoint-1100 is not whole)" in caplog.text
    assert_read(tmp_path / "checkpoint-900", older)
    # What the Trainer saved at the end comes first.
    for file in (tmp_path / "checkpoint-900").iterdir():
        shutil.copy(file, tmp_path)
    assert_read(tmp_path, older)


def test_of_a_folder_of_flax_the_newest_file_is_read(model, tree, tmp_path):
    zeros = jax.tree.map(np.zeros_like, tree)
    (tmp_path / "checkpoint_90").write_bytes(serialization.to_bytes((zeros, {}, 90)))
    (tmp_path / "checkpoint_100").write_bytes(serialization.to_bytes((tree, {}, 100)))
    (tmp_path / "notes.json").write_text(json.dumps({}))
    assert_read(tmp_path, model)
