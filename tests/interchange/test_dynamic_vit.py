"""Files of the Dynamic Vision Transformer's authors."""

import functools

import jax
import numpy as np
import pytest
from etils import epath

import vit_jax
from tests.models.conftest import parameters, statistics
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import checkpoint_file, formats, loading, safetensors
from vit_jax.models import registry

NAMES = {"t2t": "DVT-T2T-ViT-12", "deit": "DVT-DeiT-S"}
TINY = dict(depth=1, width=8, mlp_dim=16, heads=2, num_classes=5)


def tiny(backbone="deit", **options):
    own = dict(token_width=8, random_features=4) if backbone == "t2t" else {}
    return registry.model_config(NAMES[backbone], **TINY | own | options)


@functools.cache
def arrays(config):
    return parameters(config), statistics(config)


def written(config, path):
    params, variables = arrays(config)
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params, variables=variables), path, "authors"
    )
    return path


def test_a_released_file_computes_the_same_and_is_written_again_bit_by_bit(shared_data, tmp_path):
    pytest.importorskip("torch")
    folder = shared_data / "oracle" / "relatives"
    path, answers = folder / "dvt_saved.pth.tar", np.load(folder / "dvt_saved.io.npz")
    model = vit_jax.load(path)
    assert model.config.heads == 2 and model.config.backbone == "deit"
    exits = jax.jit(lambda x: model(x).exits)(answers["images"])
    for i, logits in enumerate(exits):
        np.testing.assert_allclose(logits, answers[f"logits_{i}"], atol=1e-5)

    loading.convert(path, tmp_path / "again.safetensors", "authors")
    before = checkpoint_file.open_once(epath.Path(path)).tensors
    after = safetensors.read(tmp_path / "again.safetensors")[0]
    assert before.keys() == after.keys()
    for name in before:
        assert np.asarray(before[name]).tobytes() == np.asarray(after[name]).tobytes(), name
    found = formats.read_checkpoint(path).preprocessing
    assert (found.eval_crop, found.eval_resize, found.interpolation) == (
        "torchvision",
        256,
        "bicubic",
    )


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("t2t", {}),
        ("t2t", dict(feature_reuse=False, relation_reuse=False, position="learned")),
        ("deit", dict(relation_reuse=False, num_classes=0)),
    ],
    ids=["both", "none", "feature"],
)
def test_a_file_of_ours_is_read_again_bit_by_bit(backbone, options, tmp_path):
    config = tiny(backbone, **options)
    checkpoint = formats.read_checkpoint(written(config, tmp_path / "a.safetensors"))
    assert checkpoint.model_config == config
    found = checkpoint.params, checkpoint.variables
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), found, arrays(config)
    )


def rename(tensors, old, new):
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[name.replace(old, new, 1)] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("less_token.relation_reuse_conv.0.weight"),
            r"less_token.relation_reuse_conv.0.weight \(6, 2, 1, 1\): missing",
        ),
        (lambda t: t.update({"extra": np.ones(5, "f4")}), r"extra \(5,\): in the file, but not"),
        (
            lambda t: t.update({"normal_token.norm.weight": np.ones(7, "f4")}),
            r"normal_token.norm.weight: \(7,\) in the file, \(8,\) in the model",
        ),
        (
            lambda t: t.update({"less_token.cls_token": np.ones((1, 1, 12), "f4")}),
            "its exits have tokens of 8, 12, 8 channels: what an exit reuses is as wide",
        ),
        (lambda t: rename(t, "less_token.", "few."), "lacks 'less_token.cls_token'"),
    ],
    ids=["lacks", "exceeds", "shape", "widths", "exit"],
)
def test_a_file_that_lacks_or_exceeds_tensors_is_an_error_that_names_them(change, words, tmp_path):
    written(tiny(), tmp_path / "a.safetensors")
    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    change(tensors)
    np.savez(tmp_path / "b.npz", **tensors)
    with pytest.raises(CheckpointError, match=words):
        formats.read_checkpoint(tmp_path / "b.npz")


def test_windows_that_are_not_the_published_ones_are_an_error(tmp_path):
    written(tiny("t2t"), tmp_path / "a.safetensors")
    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    tensors["less_token.tokens_to_token.attention1.norm1.weight"] = np.ones(300, "f4")
    np.savez(tmp_path / "b.npz", **tensors)
    with pytest.raises(
        CheckpointError, match="588, 300, 147 numbers, not those of 14x14, 11x11, 7x7"
    ):
        formats.read_checkpoint(tmp_path / "b.npz")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grids": (7, 14)}, r"authors' code has grids = \(7, 10, 14\), this model \(7, 14\)"),
        ({"feature_width": 32}, "authors' code has feature_width = 48, this model 32"),
        ({"activation": "gelu_tanh"}, "authors computes with activation = 'gelu'"),
        ({"epsilon": 1e-3}, "deit networks have norms with an epsilon of 1e-06"),
    ],
)
def test_what_the_authors_code_cannot_compute_is_not_written(options, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        written(tiny(**options), tmp_path / "a.safetensors")
