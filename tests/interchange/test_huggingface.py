"""Folders of transformers against transformers itself: its models here, ours there, the same logits and bytes."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from tests import lazily
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors
from vit_jax.models import registry

torch = lazily.Package("torch")
transformers = lazily.Package("transformers")

TINY = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=12,
    patch_size=4,
    num_labels=5,
)
# Class, other fields of its config, and what must be recognised.
MODELS = {
    "classifier": (
        "ViTForImageClassification",
        {},
        dict(num_classes=5, epsilon=1e-12, activation="gelu"),
    ),
    "tanh": (
        "ViTForImageClassification",
        dict(hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
        dict(epsilon=1e-6, activation="gelu_tanh"),
    ),
    "larger": (
        "ViTForImageClassification",
        dict(image_size=32, patch_size=8, hidden_act="quick_gelu"),
        dict(image_size=32, patch=8, activation="quick_gelu"),
    ),
    "body": ("ViTModel", {}, dict(num_classes=0, representation=32)),
    "distilled": (
        "DeiTForImageClassificationWithTeacher",
        {},
        dict(distilled=True, two_heads=True),
    ),
    "token unread": ("DeiTForImageClassification", {}, dict(distilled=True, two_heads=False)),
    "distilled body": ("DeiTModel", {}, dict(distilled=True, representation=32)),
}


def build(name, **fields):
    """A model of transformers with weights that hide nothing."""
    config = getattr(transformers, f"{name[:4].rstrip('FM')}Config")(**TINY | fields)
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            around = 1 if "norm" in parameter_name and parameter_name.endswith("weight") else 0
            parameter.copy_(around + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def images(size):
    return np.random.default_rng(0).uniform(-1, 1, (2, size, size, 3)).astype(np.float32)


def their_answer(model, x):
    """Logits, or the pooler's output of a model without head."""
    with torch.no_grad():
        output = model(torch.from_numpy(x).permute(0, 3, 1, 2))
    return (output.logits if "logits" in output else output.pooler_output).numpy()


def our_answer(checkpoint, x):
    definition, _ = registry.abstract(checkpoint.model_config)
    params = jax.tree.map(np.asarray, checkpoint.params)
    output = jax.jit(lambda p, x: nnx.merge(definition, p)(x))(params, x)
    return output.features if output.logits is None else output.logits


def tensors_of(folder):
    tensors, _ = safetensors.read(folder / "model.safetensors")
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", MODELS)
def test_their_models_are_ours_and_theirs_again(tmp_path, kind):
    name, fields, recognised = MODELS[kind]
    model = build(name, **fields)
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = formats.read_checkpoint(tmp_path / "theirs")
    config = checkpoint.model_config
    assert {name: getattr(config, name) for name in recognised} == recognised
    x = images(config.image_size)
    expected = their_answer(model, x)
    assert expected.std() > 0.3
    np.testing.assert_allclose(our_answer(checkpoint, x), expected, atol=1e-5)

    formats.write_checkpoint(checkpoint, tmp_path / "ours", "huggingface")
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    again, info = getattr(transformers, name).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    np.testing.assert_array_equal(their_answer(again.eval(), x), expected)
    assert again.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {
        "_name_or_path": ""
    }


def ours(seed=0, classes=None, preprocessing=None, **options):
    usual = dict(image_size=12, depth=2, width=32, heads=4, mlp_dim=48, num_classes=5)
    config = registry.model_config("ViT-mu/4", **usual | options)
    rng = np.random.default_rng(seed)
    like = registry.abstract(config)[1]
    params = patterns.map_named(
        lambda name, x: (rng.normal(0, 0.3, x.shape) + name.endswith("scale")).astype(np.float32),
        like,
    )
    return formats.LoadedCheckpoint(config, params, classes, preprocessing)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "ViTForImageClassification"),
        ({"position_of_class": False}, "ViTForImageClassification"),
        ({"position": "sincos2d", "activation": "silu"}, "ViTForImageClassification"),
        ({"activation": "gelu", "epsilon": 1e-5}, "ViTForImageClassification"),
        ({"num_classes": 0, "representation": 32}, "ViTModel"),
        ({"distilled": True}, "DeiTForImageClassificationWithTeacher"),
        ({"distilled": True, "position_of_class": False}, "DeiTForImageClassificationWithTeacher"),
    ],
)
def test_our_models_load_there_and_answer_alike(tmp_path, options, name):
    checkpoint = ours(**options)
    formats.write_checkpoint(checkpoint, tmp_path / "out", "huggingface")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [name]
    model, info = getattr(transformers, name).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    x = images(12)
    np.testing.assert_allclose(our_answer(checkpoint, x), their_answer(model.eval(), x), atol=1e-5)


def test_names_of_classes_go_there_and_come_back(tmp_path):
    names = ("cat", "dog", "emu", "fox", "gnu")
    formats.write_checkpoint(ours(classes=names), tmp_path / "out", "huggingface")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label[2] == "emu" and model.config.label2id["gnu"] == 4
    assert formats.read_checkpoint(tmp_path / "out").classes == names


def test_placeholders_are_no_names_of_classes(tmp_path):
    formats.write_checkpoint(ours(), tmp_path / "out", "huggingface")
    assert formats.read_checkpoint(tmp_path / "out").classes is None


@pytest.mark.parametrize(
    "prepared",
    [
        formats.Preprocessing(12, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        formats.Preprocessing(12, eval_crop="central", eval_resize=16),
        formats.Preprocessing(12, eval_crop="squash", eval_resize=16, interpolation="bicubic"),
    ],
)
def test_preprocessing_goes_there_and_comes_back(tmp_path, prepared):
    formats.write_checkpoint(ours(preprocessing=prepared), tmp_path / "out", "huggingface")
    again = formats.read_checkpoint(tmp_path / "out").preprocessing
    # There is but one way to round where the middle begins.
    crop = "transformers" if prepared.eval_crop == "central" else prepared.eval_crop
    assert (again.mean, again.std, again.eval_crop, again.interpolation) == (
        prepared.mean,
        prepared.std,
        crop,
        prepared.interpolation,
    )
    if crop != "resize":
        assert again.eval_resize == prepared.eval_resize
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    batch = np.asarray(processor(pixels, return_tensors="np")["pixel_values"])
    assert batch.shape == (1, 3, 12, 12)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"size": 224}, ("resize", 256, "bilinear")),
        (
            {"size": {"height": 256, "width": 256}, "do_center_crop": True},
            ("squash", 256, "bilinear"),
        ),
        (
            {"size": {"shortest_edge": 232}, "do_center_crop": True, "resample": 3},
            ("transformers", 232, "bicubic"),
        ),
        ({"size": 248, "do_center_crop": True}, ("transformers", 248, "bilinear")),
        (
            {"size": 256, "feature_extractor_type": "DeiTFeatureExtractor"},
            ("squash", 256, "bicubic"),
        ),
    ],
)
def test_older_preprocessing_is_understood(tmp_path, said, expected):
    formats.write_checkpoint(ours(), tmp_path / "out", "huggingface")
    (tmp_path / "out" / "preprocessor_config.json").write_text(json.dumps(said))
    prepared = formats.read_checkpoint(tmp_path / "out").preprocessing
    assert (prepared.eval_crop, prepared.eval_resize, prepared.interpolation) == expected
    assert prepared.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "said",
    [
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5},
        {"rescale_factor": 1 / 127.5, "do_normalize": False},
        {"image_processor_type": "EfficientNetImageProcessor", "rescale_factor": 1 / 127.5,
         "rescale_offset": True, "include_top": False},
        {"image_processor_type": "EfficientNetImageProcessor", "do_normalize": False},
        {"rescale_offset": True},  # ViT's has no such option
    ],
)  # fmt: skip
def test_pixels_are_scaled_as_the_processor_scales_them(tmp_path, said):
    prepared = formats.Preprocessing(12, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    formats.write_checkpoint(ours(preprocessing=prepared), tmp_path / "out", "huggingface")
    file = tmp_path / "out" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    expected = np.asarray(processor(pixels, return_tensors="np")["pixel_values"])[0]
    read = formats.read_checkpoint(tmp_path / "out").preprocessing
    found = (pixels / 255 - np.array(read.mean)) / np.array(read.std)
    np.testing.assert_allclose(found.transpose(2, 0, 1), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "said",
    [
        {"resample": 0},
        {"resample": 1},
        {"do_resize": False},
        {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875},
        {"image_processor_type": "LevitImageProcessor"},
        {"rescale_offset": True, "image_processor_type": "EfficientNetImageProcessor"},
    ],
)
def test_what_a_processor_does_that_we_cannot_is_not_taken_for_something_else(
    tmp_path, said, caplog
):
    formats.write_checkpoint(
        ours(preprocessing=formats.Preprocessing(12)), tmp_path / "out", "huggingface"
    )
    file = tmp_path / "out" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    assert formats.read_checkpoint(tmp_path / "out").preprocessing is None
    assert next(iter(said)) in caplog.text and "--config.data.mean" in caplog.text


def test_a_processor_without_a_name_is_that_of_the_model(tmp_path):
    model = build("DeiTForImageClassificationWithTeacher")
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 14, "crop_size": 12}))
    prepared = formats.read_checkpoint(tmp_path).preprocessing
    assert (prepared.eval_crop, prepared.eval_resize) == ("squash", 14)
    assert prepared.interpolation == "bicubic"


def test_the_weights_alone_are_read_with_the_config_beside_them(tmp_path):
    formats.write_checkpoint(ours(), tmp_path / "out", "huggingface")
    assert formats.detect(tmp_path / "out" / "model.safetensors") == "huggingface"
    shutil.copy(tmp_path / "out" / "model.safetensors", tmp_path / "alone.safetensors")
    with pytest.raises(CheckpointError, match="put its config.json beside it"):
        formats.read_checkpoint(tmp_path / "alone.safetensors")


@pytest.mark.parametrize("kind", ["shards", "pickle"])
def test_weights_may_be_in_shards_or_pickled(tmp_path, kind):
    model = build("ViTForImageClassification")
    model.save_pretrained(tmp_path / "whole")
    expected = tensors_of(tmp_path / "whole")
    folder = tmp_path / kind
    folder.mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", folder)
    if kind == "shards":
        model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
    else:
        torch.save(
            {name: torch.from_numpy(value.copy()) for name, value in expected.items()},
            folder / "pytorch_model.bin",
        )
    whole, other = (formats.read_checkpoint(path).params for path in (tmp_path / "whole", folder))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(hidden_act="relu"), "hidden_act 'relu' is not supported; gelu"),
        (dict(qkv_bias=False), "qkv_bias = False is not supported"),
        (
            dict(num_channels=1),
            r"projection.weight: \(32, 3, 4, 4\) in the file, \(32, 1, 4, 4\) in the model",
        ),
        (dict(hidden_size=64), r"classifier.weight: \(5, 32\) in the file, \(5, 64\) in the model"),
        (
            dict(num_hidden_layers=3),
            "encoder.layer.2.layernorm_before.weight .*: missing in the file",
        ),
    ],
)
def test_what_the_config_says_must_be_what_the_file_holds(tmp_path, fields, words):
    formats.write_checkpoint(ours(), tmp_path / "out", "huggingface")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(said | fields))
    with pytest.raises(CheckpointError, match=words):
        formats.read_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pool": "gem"}, "have no pool='gem'"),
        ({"registers": 2}, "have no registers"),
        ({"qk_norm": True}, "have no qk_norm"),
        ({"representation": 32}, "have no tanh layer before a head"),
    ],
)
def test_what_transformers_lacks_is_not_written(tmp_path, options, words):
    with pytest.raises(CheckpointError, match=words):
        formats.write_checkpoint(ours(**options), tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="exists already: name a new folder"):
        formats.write_checkpoint(ours(), tmp_path, "huggingface")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
