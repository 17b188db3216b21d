"""State dicts of models that scripts wrap: what stands before all names, and what is kept beside the model, is known by
rule; for the rest the user names a prefix, or tensors to skip.
"""

import re

import jax
import numpy as np
import pytest

import vit_jax
from tests import lazily
from tests.repeats import slow_unless
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import formats, safetensors
from vit_jax.models import registry

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small ViT's tensors by timm's names."""
    options = dict(image_size=8, depth=2, num_classes=2, activation="gelu")
    config = registry.model_config("ViT-mu/4", **options)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: random.standard_normal(x.shape).astype(np.float32), registry.abstract(config)[1]
    )
    path = tmp_path_factory.mktemp("vit") / "a.safetensors"
    formats.write_checkpoint(formats.LoadedCheckpoint(config, params), path, "timm")
    tensors, _ = safetensors.read(path)
    return {name: torch.from_numpy(np.asarray(x).copy()) for name, x in tensors.items()}


@pytest.fixture(scope="module")
def read(weights, tmp_path_factory):
    """Saves tensors, reads them, and compares the model with that of the plain file."""
    folder = tmp_path_factory.mktemp("files")
    torch.save(weights, folder / "plain.pth")
    plain = parameters(folder / "plain.pth")

    def read(tensors, more=""):
        torch.save(tensors, folder / "a.pth")
        found = parameters(f"{folder / 'a.pth'}{more}")
        assert plain.keys() == found.keys()
        for name, array in plain.items():
            np.testing.assert_array_equal(found[name], array)

    return read


def parameters(path, **options):
    params = formats.read_checkpoint(path, heads=2, **options).params
    return {name: np.asarray(x) for name, x in patterns.named(params).items()}


def before(prefix, weights):
    return {prefix + name: tensor for name, tensor in weights.items()}


WRAPPERS = (
    "_forward_module.", "base_model.model.", "classifier.model.", "0.model.", "0.", "vit.", "image_encoder.trunk.",
    "_forward_module.model.", "lightning_module.net.model.", "module.module.", "feature_extractor.",
)  # fmt: skip


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_whatever_stands_before_all_names_is_removed(weights, read, prefix):
    read(before(prefix, weights))
    read({"state_dict": before(prefix, weights)})


BESIDE = {
    "a counter": {"n_averaged": 17},
    "buffers": {"mean": [0.5] * 3, "std": [0.5] * 3},
    "named buffers": {"pixel_mean": [0.5] * 3, "pixel_std": [0.5] * 3},
    "a normalisation": {"normalize.mean": [0.5] * 3, "normalize.std": [0.5] * 3},
    "a preprocessor": {"data_preprocessor.mean": [0.5] * 3, "data_preprocessor.std": [0.5] * 3},
    "metrics": {"train_acc.correct": 3, "train_acc.total": 9, "val_metrics.MulticlassF1.tp": [1, 2]},
    "a confusion": {"valid_confmat.confmat": [[1, 0], [0, 1]]},
    "an auxiliary head": {"aux_head.weight": [[1.0] * 4], "aux_head.bias": [1.0]},
    "another one": {"head_aux.0.weight": [[1.0] * 4], "head_aux.0.bias": [1.0]},
    "a second head": {"rotation_head.fc.weight": [[1.0] * 4], "rotation_head.fc.bias": [1.0]},
    "a loss": {"criterion.weight": [1.0, 2.0]},
    "all of them": {"n_averaged": 1, "mean": [0.5] * 3, "std": [0.5] * 3, "aux.weight": [1.0], "acc.correct": 2},
}  # fmt: skip


@pytest.mark.parametrize("extra", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("prefix", ["model.", "classifier.model."])
def test_what_scripts_keep_beside_a_model_is_skipped(weights, read, prefix, extra):
    extra = {name: torch.tensor(value) for name, value in extra.items()}
    read(before(prefix, weights) | extra)
    if "criterion.weight" not in extra:
        read(weights | extra)


TEXTS = {
    "SigLIP's": ("text.transformer.resblocks.0.ln_1.weight", "text.positional_embedding", "logit_scale", "logit_bias"),
    "CLIP's": ("transformer.resblocks.0.ln_1.weight", "positional_embedding", "token_embedding.weight", "logit_scale"),
}  # fmt: skip


@pytest.mark.parametrize("names", TEXTS.values(), ids=TEXTS)
def test_the_image_tower_that_open_clip_has_of_timm_is_read_beside_a_text_tower(
    weights, read, names
):
    trunk = before("visual.trunk.", weights) | {"visual.head.proj.weight": torch.ones(4, 2)}
    read(trunk | {name: torch.ones(3) for name in names})
    texts = {f"text.transformer.resblocks.{i}.ln_1.weight": torch.ones(3) for i in range(99)}
    read(trunk | texts)


def torchvision_names(weights, names_of_version):
    """A state dict of torchvision's ViT, by its names."""
    pairs = {
        "cls_token": "class_token", "pos_embed": "encoder.pos_embedding", "patch_embed.proj": "conv_proj",
        "blocks.": "encoder.layers.encoder_layer_", ".norm1": ".ln_1", ".norm2": ".ln_2",
        "attn.qkv.": "self_attention.in_proj_", "attn.proj": "self_attention.out_proj",
        "norm.": "encoder.ln.", **names_of_version,
    }  # fmt: skip
    named = {}
    for name, tensor in weights.items():
        for theirs, own in pairs.items():
            name = name.replace(theirs, own)
        named[name] = tensor
    return named


HEAD = {"head.": "heads.head."}
TORCHVISION = {
    "now": HEAD | {"fc1": "0", "fc2": "3"},
    "0.12": HEAD | {"fc1": "linear_1", "fc2": "linear_2"},
    "another head": {"head.": "heads.", "fc1": "0", "fc2": "3"},
    "a head after dropout": {"head.": "heads.head.1.", "fc1": "0", "fc2": "3"},
}


@pytest.mark.parametrize("version", TORCHVISION)
def test_vits_of_torchvision_are_read_by_their_names(weights, read, version):
    named = torchvision_names(weights, TORCHVISION[version])
    assert not set(named) & set(weights)
    read(named)
    read({"model": before("module.", named), "epoch": 3})


def test_what_torchvision_computes_is_known_and_its_heads_by_the_width(weights, tmp_path):
    torch.save(torchvision_names(weights, TORCHVISION["now"]), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="heads: published models have, by width, 12 at 768"):
        formats.read_checkpoint(tmp_path / "a.pth")
    checkpoint = formats.read_checkpoint(tmp_path / "a.pth", heads=2)
    config, prepared = checkpoint.model_config, checkpoint.preprocessing
    assert (config.activation, config.epsilon, config.pool) == ("gelu", 1e-6, "token")
    assert prepared.mean == (0.485, 0.456, 0.406) and prepared.interpolation == "bilinear"
    with pytest.raises(CheckpointError, match="convert with --to=timm$"):
        formats.write_checkpoint(checkpoint, tmp_path / "b.safetensors", "authors")
    formats.write_checkpoint(checkpoint, tmp_path / "b.safetensors", "timm")
    tensors, _ = safetensors.read(tmp_path / "b.safetensors")
    for name, tensor in weights.items():
        np.testing.assert_array_equal(np.asarray(tensors[name]), tensor.numpy())


def test_what_is_not_known_is_named_with_the_cure_which_works(weights, read, tmp_path):
    extra = {"gadget.weight": torch.ones(3), "gadget.scale": torch.ones(1)}
    torch.save(weights | extra, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"(?s)gadget\.weight.*#ignore=PATTERN"):
        formats.read_checkpoint(tmp_path / "a.pth", heads=2)
    read(weights | extra, r"#ignore=gadget\..*")
    torch.save(before("model.", weights) | extra, tmp_path / "b.pth")
    cure = re.escape("b.pth#prefix=model")
    with pytest.raises(CheckpointError, match=rf"gadget\.weight.*{cure}"):
        formats.read_checkpoint(tmp_path / "b.pth", heads=2)
    read(before("model.", weights) | extra, "#prefix=model")
    read({"x": before("model.", weights | extra)}, r"#state_dict=x&prefix=model.&ignore=gadget\..*")
    few = {f"a.net.{name}": tensor for name, tensor in weights.items()}
    many = {f"b.{i}.table": torch.ones(2) for i in range(200)}
    read(few | many, "#prefix=a.net")


@pytest.mark.parametrize(
    "more, words",
    [
        ("#prefix=nothing", r"no tensor's name begins with 'nothing\.'; there are blocks\.0"),
        ("#ignore=nothing", "no tensor is called so; a pattern must match a whole name"),
        ("#ignore=(", "is not a regular expression"),
        ("#prefix=a&what=b", "only #sha256=, #state_dict=, #prefix= and #ignore="),
    ],
)
def test_a_prefix_or_pattern_without_effect_is_refused(weights, tmp_path, more, words):
    torch.save(weights, tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=words):
        formats.read_checkpoint(f"{tmp_path / 'a.pth'}{more}", heads=2)


def test_a_run_has_no_tensors_to_choose_from(tmp_path):
    config = registry.model_config("ViT-mu/4", image_size=8, depth=1, num_classes=2)
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), registry.abstract(config)[1])
    formats.write_checkpoint(formats.LoadedCheckpoint(config, params), tmp_path / "run", "orbax")
    with pytest.raises(ConfigError, match="#prefix=… and #ignore=… have no effect"):
        formats.read_checkpoint(f"{tmp_path / 'run'}#ignore=head.*")


SMALL = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=12, patch_size=4
)
WIDE = SMALL | dict(intermediate_size=24)
# Of transformers 5, which names tensors otherwise in memory than in its files: a model, its config, fields of that.
IN_MEMORY = {
    "ViTForImageClassification": ("ViTConfig", WIDE),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", WIDE),
    "Dinov2ForImageClassification": ("Dinov2Config", SMALL),
    "Dinov2Model": ("Dinov2Config", SMALL | dict(use_swiglu_ffn=True)),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", SMALL),
    "DINOv3ViTModel": ("DINOv3ViTConfig", WIDE),
    "ViTMAEModel": ("ViTMAEConfig", WIDE),
    "ViTMSNForImageClassification": ("ViTMSNConfig", WIDE),
    "IJepaForImageClassification": ("IJepaConfig", WIDE),
    "BeitForImageClassification": ("BeitConfig", WIDE | dict(use_relative_position_bias=True)),
}


@pytest.mark.parametrize("name", slow_unless({"ViTForImageClassification"}, IN_MEMORY))
def test_state_dicts_of_transformers_5_are_read_bare_in_lightning_and_in_a_folder(tmp_path, name):
    config, fields = IN_MEMORY[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**fields))
    model.save_pretrained(tmp_path / "saved")
    expected = parameters(tmp_path / "saved")
    model.config.architectures = [name]
    model.config.save_pretrained(tmp_path / "folder")
    torch.save(model.state_dict(), tmp_path / "folder" / "pytorch_model.bin")
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    torch.save({"state_dict": before("net.", model.state_dict())}, tmp_path / "lightning.ckpt")
    for kind in ("folder", "bare.pth", "lightning.ckpt"):
        found = parameters(tmp_path / kind)
        assert found.keys() == expected.keys()
        for parameter, array in expected.items():
            np.testing.assert_array_equal(found[parameter], array)
    vit_jax.load(tmp_path / "folder")
