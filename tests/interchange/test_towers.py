"""DINOv2, DINOv3, MAE, CLIP and SigLIP of transformers against transformers: the same tokens and logits,
and the same bytes when they are written again.
"""

import copy
import json
import re

import absl.logging
import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests import lazily
from tests.interchange import zoo
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors
from vit_jax.models import registry
from vit_jax.models.embeddings import interpolate

torch = lazily.Package("torch")
transformers = lazily.Package("transformers")

TINY = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=12, patch_size=4,
)  # fmt: skip
WIDE = TINY | dict(intermediate_size=48)
TEXT = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30,
    max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
BOTH = dict(vision_config=WIDE, text_config=TEXT)
DECODER = dict(
    decoder_num_attention_heads=2, decoder_hidden_size=16, decoder_num_hidden_layers=1,
    decoder_intermediate_size=16, mask_ratio=0.0,
)  # fmt: skip
# Class: its config's class, fields, and what must be recognised.
MODELS = {
    "Dinov2Model": ("Dinov2Config", TINY, dict(layer_scale="all", registers=0)),
    "Dinov2ForImageClassification": (
        "Dinov2Config",
        TINY | dict(use_swiglu_ffn=True, num_labels=3),
        dict(gated_mlp=True, mlp_dim=88, activation="silu", num_classes=3, pool="token_mean"),
    ),
    "Dinov2WithRegistersForImageClassification": (
        "Dinov2WithRegistersConfig",
        TINY | dict(num_register_tokens=3, num_labels=3),
        dict(registers=3, num_classes=3, pool="token_mean"),
    ),
    "Dinov2WithRegistersModel": (
        "Dinov2WithRegistersConfig",
        TINY | dict(num_register_tokens=3),
        dict(registers=3, position_of_registers=False),
    ),
    "DINOv3ViTModel": (
        "DINOv3ViTConfig",
        WIDE | dict(num_register_tokens=2),
        dict(rope="centred", rope_theta=100.0, registers=2, key_bias=False),
    ),
    "DINOv3ViTModel gated": (
        "DINOv3ViTConfig",
        WIDE | dict(use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False),
        dict(gated_mlp=True, qkv_bias=False),
    ),
    "ViTMAEForPreTraining": ("ViTMAEConfig", WIDE | DECODER, dict(epsilon=1e-12, num_classes=0)),
    "SiglipVisionModel": ("SiglipVisionConfig", WIDE, dict(pool="map", activation="gelu_tanh")),
    "SiglipForImageClassification": (
        "SiglipConfig",
        BOTH | dict(num_labels=3),
        dict(pool="mean", num_classes=3),
    ),
    "SiglipModel": ("SiglipConfig", BOTH, dict(pool="map", depth=2)),
    "Siglip2VisionModel": (
        "Siglip2VisionConfig",
        {n: v for n, v in WIDE.items() if n != "image_size"} | dict(num_patches=9),
        dict(pool="map", image_size=12),
    ),
    "CLIPVisionModelWithProjection": (
        "CLIPVisionConfig",
        WIDE | dict(projection_dim=8),
        dict(pre_norm=True, patch_bias=False, activation="quick_gelu", epsilon=1e-5),
    ),
    "CLIPForImageClassification": (
        "CLIPConfig",
        BOTH | dict(num_labels=3),
        dict(pool="mean", num_classes=3, last_norm="none"),
    ),
}

# From the names of transformers' DINOv2 to those of its own code.
NAMES = (
    (r"^embeddings\.(cls_token|mask_token|register_tokens)", r"\1"),
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^encoder\.layer\.(\d+)\.", r"blocks.0.\1."),
    (r"attention\.output\.dense", "attn.proj"),
    (r"layer_scale(\d)\.lambda1", r"ls\1.gamma"),
    (r"mlp\.weights_in", "mlp.w12"),
    (r"mlp\.weights_out", "mlp.w3"),
    (r"^layernorm", "norm"),
)


def build(name):
    """A model of transformers with weights that hide nothing."""
    config, fields, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name.split()[0])(getattr(transformers, config)(**fields)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            around = 1 if "norm" in parameter_name and parameter_name.endswith("weight") else 0
            parameter.copy_(around + 0.3 * torch.randn(parameter.shape))
    return model


def their_answer(model, x):
    """The logits of a classifier, else the tokens or their one vector, and which of these."""
    pixels = torch.from_numpy(x).permute(0, 3, 1, 2)
    name = type(model).__name__
    with torch.no_grad():
        if name.startswith("ViTMAE"):
            noise = torch.arange(9).repeat(len(x), 1) / 9  # nothing is masked, nor moved
            return model.vit(pixels, noise=noise).last_hidden_state, "tokens"
        if name.startswith("Siglip2"):
            patches = torch.from_numpy(x.reshape(len(x), 3, 4, 3, 4, 3)).permute(0, 1, 3, 2, 4, 5)
            mask, shape = torch.ones(len(x), 9, dtype=torch.int32), torch.tensor([[3, 3]] * len(x))
            return model(patches.reshape(len(x), 9, 48), mask, shape).pooler_output, "features"
        if name == "SiglipModel":
            return model.vision_model(pixels).pooler_output, "features"
        if name == "CLIPVisionModelWithProjection":
            return model.vision_model(pixels).pooler_output, "features"
        output = model(pixels)
    if "logits" in output:
        return output.logits, "logits"
    if name == "SiglipVisionModel":
        return output.pooler_output, "features"
    return output.last_hidden_state, "tokens"


SLOW = ("SiglipModel", "CLIPForImageClassification")  # others cover their parts


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MODELS]
)
def test_their_networks_are_ours_and_theirs_again(tmp_path, name):
    model, recognised = build(name), MODELS[name][2]
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = formats.read_checkpoint(tmp_path / "theirs")
    config = checkpoint.model_config
    assert {field: getattr(config, field) for field in recognised} == recognised
    x = np.random.default_rng(0).uniform(-1, 1, (2, 12, 12, 3)).astype(np.float32)
    expected, what = their_answer(model, x)
    definition, _ = registry.abstract(config)
    params = jax.tree.map(np.asarray, checkpoint.params)
    found = getattr(jax.jit(lambda p, x: nnx.merge(definition, p)(x))(params, x), what)
    expected = expected.numpy()
    if what == "tokens" and config.registers:
        expected = np.delete(expected, np.arange(1, 1 + config.registers), axis=1)
    oracles.assert_close(found, expected, 2e-5)
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "huggingface")
    before, after = (
        safetensors.read(tmp_path / side / "model.safetensors")[0] for side in ("theirs", "ours")
    )
    for tensor in after:
        assert np.asarray(before[tensor]).tobytes() == np.asarray(after[tensor]).tobytes(), tensor
    said = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert said["model_type"] == model.config.model_type
    assert formats.read_checkpoint(tmp_path / "ours").model_config == config


def test_bits_are_ours_at_the_size_that_their_processor_cuts(tmp_path):
    torch.manual_seed(0)
    config = transformers.BitConfig(
        depths=[1, 1], hidden_sizes=[256, 512], embedding_size=64, num_labels=3
    )
    model = transformers.BitForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    prepared = {
        "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 40},
        "crop_size": {"height": 32, "width": 32},
    }  # fmt: skip
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(prepared))
    checkpoint = formats.read_checkpoint(tmp_path / "theirs")
    assert checkpoint.model_config.image_size == 32
    said = checkpoint.preprocessing
    assert (said.eval_crop, said.eval_resize, said.interpolation) == ("transformers", 40, "bicubic")
    assert said.image_size == 32 and said.mean[0] == 0.48145466
    x = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    with torch.no_grad():
        pixels = torch.from_numpy(x).permute(0, 3, 1, 2)
        expected = copy.deepcopy(model).double()(pixels.double()).logits.numpy()
    params = jax.tree.map(np.asarray, checkpoint.params)
    found = zoo.program(checkpoint.model_config, "float64")(params, {}, x).logits
    oracles.assert_close(found, expected, zoo.EXACT_BOUND)
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "huggingface")
    assert formats.read_checkpoint(tmp_path / "ours").model_config == checkpoint.model_config


def test_a_processor_of_another_size_than_the_model_is_said(tmp_path, caplog):
    absl.logging.get_absl_logger().propagate = True
    build("Dinov2Model").save_pretrained(tmp_path)
    prepared = {
        "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 8},
        "crop_size": {"height": 6, "width": 6},
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    said = formats.read_checkpoint(tmp_path).preprocessing
    assert (said.image_size, said.eval_crop, said.eval_resize) == (12, "transformers", 16)
    assert "cuts images of 6 pixels, and the model is for 12" in caplog.text


@pytest.mark.parametrize(
    ("size", "method", "model_type"),
    [
        ((16, 16), "torch", "dinov2"), ((8, 20), "torch", "dinov2"),
        ((16, 24), "bicubic", "dinov2_with_registers"), ((24, 24), "dinov2", "own"),
    ],
)  # fmt: skip
def test_positions_of_another_size_are_those_of_their_own_rule(tmp_path, size, method, model_type):
    if model_type == "own":
        table = np.random.default_rng(0).normal(size=(1, 10, 32)).astype(np.float32)
        patches = torch.from_numpy(table[:, 1:].reshape(1, 3, 3, 32)).permute(0, 3, 1, 2)
        scale = ((size[0] // 4 + 0.1) / 3, (size[1] // 4 + 0.1) / 3)
        expected = torch.nn.functional.interpolate(patches, scale_factor=scale, mode="bicubic")
        expected = expected.permute(0, 2, 3, 1).reshape(1, -1, 32).numpy()
        new = (size[0] // 4, size[1] // 4)
        found = interpolate(table, new, method=method, prefix=1)
        np.testing.assert_allclose(found[:, 1:], expected, atol=2e-5)
        return
    name = "Dinov2Model" if model_type == "dinov2" else "Dinov2WithRegistersModel"
    model = build(name)
    model.save_pretrained(tmp_path)
    ours = vit_jax.load(tmp_path, image_size=size, resize=method)
    x = np.random.default_rng(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(x).permute(0, 3, 1, 2)).last_hidden_state.numpy()
    registers = ours.config.registers
    expected = np.delete(expected, np.arange(1, 1 + registers), axis=1)
    found = nnx.jit(lambda model, x: model(x).tokens)(ours, x)
    oracles.assert_close(found, expected, 2e-5)


def test_dinov2s_own_files_are_read(tmp_path):
    """Its names, here those of transformers' weights, with a gate, registers and its chunks of blocks."""
    their = transformers.Dinov2WithRegistersConfig(
        **TINY | dict(use_swiglu_ffn=True, num_register_tokens=3)
    )
    torch.manual_seed(0)
    model = transformers.Dinov2WithRegistersModel(their).eval()
    state, own = model.state_dict(), {}
    for name, tensor in state.items():
        own[name] = tensor + 0.1 * torch.randn(tensor.shape)
    model.load_state_dict(own)
    model.save_pretrained(tmp_path / "theirs")
    saved = {
        n: torch.from_numpy(np.asarray(t).copy())
        for n, t in safetensors.read(tmp_path / "theirs" / "model.safetensors")[0].items()
    }
    released = {}
    for name, tensor in saved.items():
        if ".attention.attention." in name:
            continue
        for old, new in NAMES:
            name = re.sub(old, new, name)
        released[name] = tensor
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [
                saved[f"encoder.layer.{layer}.attention.attention.{n}.{kind}"]
                for n in ("query", "key", "value")
            ]
            released[f"blocks.0.{layer}.attn.qkv.{kind}"] = torch.cat(parts)
    torch.save({"teacher": {f"backbone.{n}": t for n, t in released.items()}}, tmp_path / "own.pth")
    said = dict(heads=4, activation="silu", pool="token")
    ours = formats.read_checkpoint(tmp_path / "own.pth", **said)
    theirs = formats.read_checkpoint(tmp_path / "theirs")
    for one, other in zip(
        jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert ours.model_config == theirs.model_config


def test_shards_and_half_precision_are_read(tmp_path):
    model = build("Dinov2Model").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    found = np.asarray(formats.read_checkpoint(tmp_path / "a").params["class_token"])
    expected = model.embeddings.cls_token.detach().float().numpy()
    np.testing.assert_array_equal(found, expected)


def test_another_network_is_refused_by_its_name(tmp_path):
    safetensors.write(tmp_path / "model.safetensors", (), {}, {})
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "swin", "architectures": ["SwinForImageClassification"]})
    )
    with pytest.raises(CheckpointError, match=r"it is a swin \(SwinForImageClassification\) of"):
        formats.read_checkpoint(tmp_path)


# The small published ones, but for their depth: class of the config, fields, `resize` of positions.
PUBLISHED = {
    "Dinov2Model": (dict(image_size=518, patch_size=14), "torch"),
    "Dinov2WithRegistersModel": (
        dict(image_size=518, patch_size=14, num_register_tokens=4),
        "bicubic",
    ),
    "DINOv3ViTModel": (dict(num_register_tokens=4), "scipy"),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [(224, 224), (518, 518), (256, 448)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_dinos_of_published_width_and_table_are_theirs_at_every_size(tmp_path, name, size):
    fields, method = PUBLISHED[name]
    config = getattr(transformers, MODELS[name][0])(
        hidden_size=384,
        num_attention_heads=6,
        num_hidden_layers=1,
        intermediate_size=1536,
        **fields,
    )
    torch.manual_seed(0)
    model = zoo.randomize(getattr(transformers, name)(config))
    model.save_pretrained(tmp_path)
    # What their patches leave over at the end is not seen.
    seen = tuple(side // config.patch_size * config.patch_size for side in size)
    ours = vit_jax.load(tmp_path, image_size=seen, resize=method)
    x = np.random.default_rng(0).uniform(-1, 1, (1, *size, 3)).astype(np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(x).permute(0, 3, 1, 2)).last_hidden_state.numpy()
    expected = np.delete(expected, np.arange(1, 1 + ours.config.registers), axis=1)
    found = nnx.jit(lambda model, x: model(x).tokens)(ours, x[:, : seen[0], : seen[1]])
    oracles.assert_close(found, expected, 2e-5)
