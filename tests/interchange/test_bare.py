"""Files of transformers' weights without config.json: the model that its folder is."""

import re
import shutil

import jax
import numpy as np
import pytest

from tests import lazily
from tests.interchange import test_towers
from tests.interchange.dinov3_files import write_sparse
from tests.repeats import slow_unless
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors

torch = lazily.Package("torch")
transformers = lazily.Package("transformers")

WIDE, LABELS = test_towers.WIDE, dict(num_labels=3)
MODELS = {
    "ViTModel": ("ViTConfig", WIDE),
    "ViTForImageClassification": ("ViTConfig", WIDE | LABELS),
    "DeiTModel": ("DeiTConfig", WIDE),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", WIDE | LABELS),
    "ViTMAEModel": ("ViTMAEConfig", WIDE),
    "Dinov2Model of another ratio": ("Dinov2Config", test_towers.TINY | dict(mlp_ratio=3)),
    "DINOv3ViTModel of S+": (
        "DINOv3ViTConfig",
        WIDE | dict(use_gated_mlp=True, hidden_act="silu", num_register_tokens=2),
    ),
    **{
        name: test_towers.MODELS[name][:2]
        for name in (
            "Dinov2Model", "Dinov2ForImageClassification", "Dinov2WithRegistersModel",
            "Dinov2WithRegistersForImageClassification", "DINOv3ViTModel", "ViTMAEForPreTraining",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_file_alone_is_the_model_of_its_folder(tmp_path, name):
    config, fields = MODELS[name]
    model = getattr(transformers, name.split()[0])(getattr(transformers, config)(**fields))
    model.save_pretrained(tmp_path / "folder")
    file = tmp_path / "model.safetensors"
    shutil.copy(tmp_path / "folder" / "model.safetensors", file)
    with pytest.raises(CheckpointError, match="does not state.*\n  heads "):
        formats.read_checkpoint(file)
    size = {"image_size": 12} if "DINOv3" in name else {}  # rotary positions are of any size
    alone, whole = (
        formats.read_checkpoint(file, heads=4, **size),
        formats.read_checkpoint(tmp_path / "folder"),
    )
    assert formats.detect(file) == "huggingface"
    assert alone.model_config == whole.model_config and "epsilon" in alone.assumed
    for one, other in zip(
        jax.tree.leaves(alone.params), jax.tree.leaves(whole.params), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    formats.write_checkpoint(alone, tmp_path / "again", "huggingface")
    assert formats.read_checkpoint(tmp_path / "again").model_config == whole.model_config
    before, after = (
        safetensors.read(path)[0] for path in (file, tmp_path / "again" / "model.safetensors")
    )
    assert all(np.asarray(before[n]).tobytes() == np.asarray(after[n]).tobytes() for n in after)
    getattr(transformers, name.split()[0]).from_pretrained(tmp_path / "again")


BEIT = WIDE | dict(use_mean_pooling=True)
OWN = BEIT | dict(use_relative_position_bias=True)
SHARED = BEIT | dict(use_shared_relative_position_bias=True)
TOWERS = {
    "BeitModel of own biases": ("BeitConfig", OWN),
    "BeitModel of shared biases": ("BeitConfig", SHARED | dict(use_mean_pooling=False)),
    "BeitModel of learned positions": ("BeitConfig", BEIT | dict(use_absolute_position_embeddings=True)),
    "BeitForImageClassification": ("BeitConfig", OWN | LABELS),
    "BeitForMaskedImageModeling": ("BeitConfig", SHARED),
    "Data2VecVisionForImageClassification": ("Data2VecVisionConfig", OWN | LABELS),
    "IJepaModel": ("IJepaConfig", WIDE),
    "IJepaForImageClassification": ("IJepaConfig", WIDE | LABELS),
    "Aimv2VisionModel": ("Aimv2VisionConfig", WIDE | dict(use_head=False)),
    "CLIPVisionModel": ("CLIPVisionConfig", WIDE),
    "SiglipVisionModel": ("SiglipVisionConfig", WIDE),
    **{
        name: test_towers.MODELS[name][:2]
        for name in (
            "CLIPVisionModelWithProjection", "CLIPForImageClassification", "SiglipModel",
            "SiglipForImageClassification", "Siglip2VisionModel",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", slow_unless({"BeitModel of shared biases", "SiglipModel"}, TOWERS))
def test_files_and_state_dicts_of_other_towers_are_the_models_of_their_folders(tmp_path, name):
    config, fields = TOWERS[name]
    model = getattr(transformers, name.split()[0])(getattr(transformers, config)(**fields))
    model.save_pretrained(tmp_path / "folder")
    whole = formats.read_checkpoint(tmp_path / "folder")
    shutil.copy(tmp_path / "folder" / "model.safetensors", tmp_path / "file.safetensors")
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    wrapped = {f"net.{tensor}": values for tensor, values in model.state_dict().items()}
    torch.save({"state_dict": wrapped}, tmp_path / "lightning.ckpt")
    for file in ("file.safetensors", "bare.pth", "lightning.ckpt"):
        if "biases" not in name and "Data2Vec" not in name and "Beit" not in name:
            with pytest.raises(CheckpointError, match="does not state.*\n  heads: published"):
                formats.read_checkpoint(tmp_path / file)
        alone = formats.read_checkpoint(tmp_path / file, heads=whole.model_config.heads)
        assert alone.model_config == whole.model_config and "activation" in alone.assumed
        jax.tree.map(np.testing.assert_array_equal, alone.params, whole.params)
    formats.write_checkpoint(alone, tmp_path / "again", "huggingface")
    assert formats.read_checkpoint(tmp_path / "again").model_config == whole.model_config


def test_the_activation_of_a_clip_alone_is_doubted_and_may_be_said(tmp_path, caplog):
    config = transformers.CLIPVisionConfig(**WIDE)
    torch.save(transformers.CLIPVisionModel(config).state_dict(), tmp_path / "a.pth")
    with caplog.at_level("WARNING", logger="absl"):
        checkpoint = formats.read_checkpoint(tmp_path / "a.pth", heads=2)
    assert checkpoint.model_config.activation == "quick_gelu"
    assert "quick_gelu is taken, which OpenAI's weights compute with" in caplog.text
    said = formats.read_checkpoint(tmp_path / "a.pth", heads=2, activation="gelu")
    assert said.model_config.activation == "gelu"


@pytest.mark.parametrize("size", [(1024, 8), (1536, 12)], ids=lambda size: f"width {size[0]}")
def test_heads_of_published_aimv2_are_not_those_of_vits_of_that_width(tmp_path, size):
    width, heads = size
    fields = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Aimv2VisionConfig(**fields, image_size=12, patch_size=4, use_head=False)
    shapes = {
        tensor: tuple({32: width}.get(n, n) for n in values.shape)
        for tensor, values in transformers.Aimv2VisionModel(config).state_dict().items()
    }
    write_sparse(tmp_path / "a.safetensors", shapes, {})
    assert formats.read_checkpoint(tmp_path / "a.safetensors").model_config.heads == heads


# A model above with one layer, and what published ones have: depth, width, hidden size, heads.
PUBLISHED = [
    ("ViTModel", 12, 768, 3072, 12), ("ViTModel", 32, 1280, 5120, 16), ("DeiTModel", 12, 192, 768, 3),
    ("Dinov2Model", 12, 384, 1536, 6), ("Dinov2ForImageClassification", 40, 1536, 4096, 24),
    ("Dinov2WithRegistersModel", 24, 1024, 4096, 16), ("DINOv3ViTModel", 12, 384, 1536, 6),
    ("DINOv3ViTModel of S+", 12, 384, 1536, 6), ("DINOv3ViTModel of S+", 32, 1280, 5120, 20),
    ("DINOv3ViTModel of S+", 40, 4096, 8192, 32), ("ViTMAEForPreTraining", 24, 1024, 4096, 16),
]  # fmt: skip


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: f"{p[0]}-{p[2]}")
def test_heads_of_published_sizes_are_known(tmp_path, published):
    """By shapes alone: a small file's names, their sizes replaced, and nothing but holes behind them."""
    name, depth, width, hidden, heads = published
    config, fields = MODELS[name]
    small = getattr(transformers, config)(**fields | dict(num_hidden_layers=1))
    getattr(transformers, name.split()[0])(small).save_pretrained(tmp_path / "small")
    sizes = {32: width, 64: 2 * width, 48: hidden, 128: hidden, 88: hidden, 176: 2 * hidden}
    shapes = {}
    for tensor, array in safetensors.read(tmp_path / "small" / "model.safetensors")[0].items():
        shape = array.shape if "decoder" in tensor else [sizes.get(n, n) for n in array.shape]
        layers = range(
            depth if re.search(r"\blayer\.0\.", tensor) and "decoder" not in tensor else 1
        )
        shapes |= {tensor.replace("layer.0.", f"layer.{layer}."): tuple(shape) for layer in layers}
    write_sparse(tmp_path / "a.safetensors", shapes, {})
    found = formats.read_checkpoint(tmp_path / "a.safetensors").model_config
    assert (found.depth, found.width, found.mlp_dim, found.heads) == (depth, width, hidden, heads)
    (tmp_path / "a.safetensors").unlink()
