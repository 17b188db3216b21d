"""Every kind of source × {its own size, another, not square} × {save, convert of a run, push, adapters of peft}: what
is written is read by the library that it is for, and gives our numbers. Random weights of one layer.
"""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests import lazily, without_torchvision
from tests.interchange import test_peft, zoo
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")

SIZES = {"same": 12, "other": 20, "not square": (8, 16)}
BODY = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}
WIDE = BODY | {"intermediate_size": 48}
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30,
    "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BOTH = {"vision_config": WIDE, "text_config": TEXT, "num_labels": 3}
DECODER = {
    "decoder_num_attention_heads": 2, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
    "decoder_intermediate_size": 16, "mask_ratio": 0.5,
}  # fmt: skip
# transformers: the class, the class and the fields of its config, and whether its positions are of square images alone.
OF_TRANSFORMERS = {
    "ViT": ("ViTForImageClassification", "ViTConfig", WIDE | {"num_labels": 3}, False),
    "DeiT": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", WIDE | {"num_labels": 3}, False),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", BODY | {"num_labels": 3}, True),
    "DINOv2 gated": ("Dinov2Model", "Dinov2Config", BODY | {"use_swiglu_ffn": True}, True),
    "DINOv2 with registers": (
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", BODY | {"num_register_tokens": 2}, True,
    ),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", WIDE | {"num_register_tokens": 2}, False),
    "MAE": ("ViTMAEForPreTraining", "ViTMAEConfig", WIDE | DECODER, True),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", WIDE, True),
    "SigLIP with a head": ("SiglipForImageClassification", "SiglipConfig", BOTH, True),
    "SigLIP 2": (
        "Siglip2VisionModel", "Siglip2VisionConfig",
        {n: x for n, x in WIDE.items() if n != "image_size"} | {"num_patches": 9}, True,
    ),
    "BEiT": (
        "BeitForImageClassification", "BeitConfig",
        WIDE | {"num_labels": 3, "use_relative_position_bias": True, "layer_norm_eps": 1e-6}, True,
    ),
    "data2vec": (
        "Data2VecVisionForImageClassification", "Data2VecVisionConfig",
        WIDE | {"num_labels": 3, "use_shared_relative_position_bias": True}, True,
    ),
    "I-JEPA": ("IJepaForImageClassification", "IJepaConfig", WIDE | {"num_labels": 3}, False),
    "ViT-MSN": ("ViTMSNForImageClassification", "ViTMSNConfig", WIDE | {"num_labels": 3}, False),
    "TIPSv2": ("Tipsv2VisionModel", "Tipsv2VisionConfig", BODY | {"num_register_tokens": 1}, True),
    "AIMv2": ("Aimv2VisionModel", "Aimv2VisionConfig", WIDE | {"use_head": False}, True),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", WIDE, True),
    "CLIP with a head": ("CLIPForImageClassification", "CLIPConfig", BOTH, True),
}  # fmt: skip
OF_TIMM = {
    "ViT of timm": ("vit_tiny_patch16_224", {}),
    "DeiT of timm": ("deit_tiny_distilled_patch16_224", {}),
    "registers of timm": ("vit_small_patch14_reg4_dinov2", {"init_values": 0.1}),
    "EVA of timm": ("eva02_tiny_patch14_224", {"ref_feat_shape": [3, 3]}),
    "BEiT of timm": ("beit_base_patch16_224", {}),
    "SigLIP of timm": ("vit_base_patch16_siglip_224", {}),
}
# A run from these has no new files of transformers; that of some others is for another class of the same network, and
# its adapters have the modules of their base.
NOT_NEW = [("AIMv2", size) for size in SIZES] + [("I-JEPA", "not square")]
AS_BASE = ("data2vec", "I-JEPA", "TIPSv2", "AIMv2")
# The others share their code with one of these.
QUICK = ("ViT", "DINOv2", "MAE", "SigLIP", "BEiT", "CLIP with a head", "registers of timm")


# At another size everything happens that happens at the model's own, and positions are resampled too.
OWN_SIZE = ("ViT", "registers of timm")


def case(kind, size):
    slow = kind not in QUICK or (size == "same" and kind not in OWN_SIZE)
    return pytest.param(kind, size, marks=[pytest.mark.slow] * slow)


CASES = [case(kind, size) for kind in (*OF_TRANSFORMERS, *OF_TIMM) for size in SIZES]


def randomized(model, keep=()):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not any(part in name for part in keep):
                around = 1 if "norm" in name and name.endswith("weight") else 0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(around + 0.3 * noise)
    return model.eval()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder of each kind, made once."""

    @functools.cache
    def source(kind):
        folder = tmp_path_factory.mktemp("source") / "folder"
        if kind in OF_TIMM:
            pytest.importorskip("torch")  # which timm needs
            name, arguments = OF_TIMM[kind]
            body = {"img_size": 12, "patch_size": 4, "depth": 1, "embed_dim": 32, "num_heads": 4}
            return zoo.save(
                zoo.build(name, **body, num_classes=3, **arguments), folder, body | arguments
            )
        name, config, fields, _ = OF_TRANSFORMERS[kind]
        model = getattr(transformers, name)(getattr(transformers, config)(**fields))
        if kind == "MAE":  # transformers leaves zeros, and published files have these
            model.decoder.decoder_pos_embed.data = decoder_positions(3, 16)
        randomized(model, ("position_embeddings", "pos_embed") if kind == "MAE" else ())
        model.save_pretrained(folder)
        return folder

    return source


def decoder_positions(side, width):
    """MAE's, which has columns before rows."""
    from transformers.models.vit_mae import modeling_vit_mae

    table = modeling_vit_mae.build_2d_sinusoidal_position_embedding(
        side, side, width, cls_token=True
    )
    return torch.cat([table[..., width // 2 :], table[..., : width // 2]], dim=-1).reshape(
        1, -1, width
    )


def pixels(size):
    height, width = (size, size) if isinstance(size, int) else size
    return np.random.default_rng(0).uniform(-1, 1, (2, height, width, 3)).astype(np.float32)


@nnx.jit
def ours(model, x):
    return model(x)


def theirs(folder, kind, x):
    """What transformers or timm gives for a folder, and which output of ours that is."""
    images = torch.from_numpy(x).permute(0, 3, 1, 2)
    with torch.no_grad():
        if kind in OF_TIMM:
            timm_models = without_torchvision.timm_models()
            return timm_models.create_model(f"local-dir:{folder}", pretrained=True).eval()(
                images
            ), "logits"
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
        unused = re.compile(
            r".*mask_token|.*\.head\..*|pooler\..*"
        )  # what the outputs below do not read
        missing = {key for key in info["missing_keys"] if not unused.fullmatch(key)}
        assert not missing | set(info["unexpected_keys"])
        return of_transformers(model.eval(), images)


def of_transformers(model, images):
    name = type(model).__name__
    if name == "ViTMAEForPreTraining":
        side = images.shape[-1] // 4
        table = model.decoder.decoder_pos_embed.detach()
        torch.testing.assert_close(table, decoder_positions(side, 16), atol=1e-6, rtol=0)
        noise = torch.arange(side**2).repeat(len(images), 1) / side**2
        model.vit.config.mask_ratio = 0.0
        return model.vit(images, noise=noise).last_hidden_state, "tokens"
    if name == "Siglip2VisionModel":
        side = images.shape[-1] // 4
        patches = (
            images.permute(0, 2, 3, 1).reshape(len(images), side, 4, side, 4, 3).transpose(2, 3)
        )
        mask = torch.ones(len(images), side**2, dtype=torch.int32)
        shapes = torch.tensor([[side, side]] * len(images))
        return model(
            patches.reshape(len(images), side**2, 48), mask, shapes
        ).pooler_output, "features"
    output = model(images)
    if "logits" in output:
        return output.logits, "logits"
    if name in ("ViTModel", "Aimv2VisionModel"):
        return output.last_hidden_state, "tokens"
    return output.pooler_output, "features"


def check(folder, kind, model, x):
    expected, what = theirs(folder, kind, x)
    if what == "tokens":
        registers = np.arange(1, 1 + model.config.registers)
        expected = np.delete(expected.numpy(), registers, axis=1)
    oracles.assert_close(getattr(ours(model, x), what), np.asarray(expected), 2e-5)


def check_adapters(base, path, kind, x):
    """Adapters of a model that was written: what peft adds to transformers' modules gives our numbers."""
    test_peft.with_adapters(str(base), path)
    name = json.loads((base / "config.json").read_text())["architectures"][0]
    # MAE's encoder is a ViT for whoever fine-tunes it.
    kwargs = {"add_pooling_layer": False} if kind == "MAE" else {}
    model = getattr(transformers, "ViTModel" if kind == "MAE" else name).from_pretrained(
        base, **kwargs
    )
    test_peft.as_peft_does(model, str(path))
    with torch.no_grad():
        images = torch.from_numpy(x).permute(0, 3, 1, 2)
        expected, what = of_transformers(model.eval(), images)
    oracles.assert_close(getattr(ours(vit_jax.load(path), x), what), np.asarray(expected), 2e-5)


@pytest.mark.parametrize("kind, size", CASES)
def test_what_is_written_at_any_size_is_read_by_its_library(
    sources, tmp_path, hub, monkeypatch, kind, size
):
    monkeypatch.setenv("HF_TOKEN", "secret")
    folder, format = sources(kind), "timm" if kind in OF_TIMM else "huggingface"
    run = vit_jax.load_run(folder, image_size=None if size == "same" else SIZES[size])
    if size == "not square" and kind in OF_TRANSFORMERS and OF_TRANSFORMERS[kind][3]:
        with pytest.raises(CheckpointError, match="square images, and this model is for 8x16"):
            run.save(tmp_path / "saved", format=format)
        with pytest.raises(CheckpointError, match="square images, and this model is for 8x16"):
            run.push("me/model", format=format)
        assert not (tmp_path / "saved").exists() and not hub.repositories
        return
    x = pixels(SIZES[size])
    run.save(tmp_path / "saved", format=format)
    check(tmp_path / "saved", kind, run.model, x)
    run.push("me/model", format=format)
    for name in ("config.json", "model.safetensors"):
        if kind != "MAE":  # which is pushed without its decoder
            assert hub.repositories["me/model"][name] == (tmp_path / "saved" / name).read_bytes()
    if kind in OF_TRANSFORMERS:
        check_adapters(tmp_path / "saved", tmp_path / "peft", kind, x)
    # A run that was trained from the source: a new file, whose names are not those of the source's.
    run.save(tmp_path / "run")
    trained = dataclasses.replace(formats.read_checkpoint(tmp_path / "run"), layout={})
    if (kind, size) in NOT_NEW:
        with pytest.raises(CheckpointError, match="convert with --to=timm|only square ones"):
            formats.write_checkpoint(trained, tmp_path / "converted", format)
        return
    formats.write_checkpoint(trained, tmp_path / "converted", format)
    check(tmp_path / "converted", kind, run.model, x)


@pytest.mark.parametrize("kind", AS_BASE)
def test_adapters_are_for_the_modules_of_their_base(sources, tmp_path, kind):
    """Of a network that a new file of transformers is not of."""
    base = sources(kind)
    check_adapters(base, tmp_path / "peft", kind, pixels(12))
    checkpoint = formats.read_checkpoint(base)
    other = {"pool": "first"} if checkpoint.model_config.num_classes else {"num_classes": 3}
    changed = dataclasses.replace(checkpoint.model_config, **other)
    unmerged = formats.Unmerged({}, ("head/kernel",), str(base))
    checkpoint = dataclasses.replace(checkpoint, model_config=changed, adapters=unmerged)
    with pytest.raises(CheckpointError, match="pool='mean', and|no classifier.*--to=orbax"):
        formats.write_checkpoint(checkpoint, tmp_path / "refused", "peft")
