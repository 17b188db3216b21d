"""What transformers and timm can be asked for beyond what a file's tensors tell: each field of a config.json, each
argument, set to another value than usual. If the network computes something else then, ours does too, or refuses it.
"""

import importlib
import importlib.util
import inspect

import jax
import numpy as np
import pytest

from tests import lazily, without_torchvision
from tests.interchange import zoo
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats
from vit_jax.interchange.conversions import radio, vit_arguments, vit_huggingface

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")

TINY = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=12, patch_size=4,
    intermediate_size=24, num_labels=3,
)  # fmt: skip
RATIO = {name: value for name, value in TINY.items() if name != "intermediate_size"}
NAFLEX = {name: value for name, value in TINY.items() if name != "image_size"} | dict(num_patches=9)
BIASED = TINY | dict(use_relative_position_bias=True)
RADIO = RATIO | dict(max_img_size=20, num_registers=2)
# Class of the model: its config's class, fields of a small one, what it computes.
MODELS = {
    "ViTForImageClassification": ("ViTConfig", TINY, "logits"),
    "ViTModel": ("ViTConfig", TINY, "pooler_output"),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", TINY, "logits"),
    "Dinov2ForImageClassification": ("Dinov2Config", RATIO, "logits"),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", RATIO, "logits"),
    "DINOv3ViTModel": ("DINOv3ViTConfig", TINY, "pooler_output"),
    "ViTMAEModel": ("ViTMAEConfig", TINY | dict(mask_ratio=0.0), "last_hidden_state"),
    "ViTMSNForImageClassification": ("ViTMSNConfig", TINY, "logits"),
    "IJepaForImageClassification": ("IJepaConfig", TINY, "logits"),
    "BeitForImageClassification": ("BeitConfig", BIASED, "logits"),
    "Data2VecVisionForImageClassification": ("Data2VecVisionConfig", BIASED, "logits"),
    "Tipsv2VisionModel": ("Tipsv2VisionConfig", RATIO, "pooler_output"),
    "Aimv2VisionModel": ("Aimv2VisionConfig", TINY | dict(use_head=False), "last_hidden_state"),
    "SiglipVisionModel": ("SiglipVisionConfig", TINY, "pooler_output"),
    "Siglip2VisionModel": ("Siglip2VisionConfig", NAFLEX, "pooler_output"),
    "CLIPVisionModel": ("CLIPVisionConfig", TINY, "pooler_output"),
    "RadioModel": ("RadioConfig", RADIO, "summary"),
}
OUTPUTS = {"logits": "logits", "last_hidden_state": "tokens"}  # ours of theirs, else features
# Values that differ from the usual one, where twice that, or its negation, will not do.
OTHERS = {
    "hidden_act": ["gelu_new", "relu", "silu", "gelu"],
    "pooler_act": ["relu"],
    "pooler_output_size": [8],
    "image_size": [20, [12, 20]],
    "patch_size": [2, [2, 4]],
    "num_channels": [1],
    "max_img_size": [24],
    "num_patches": [16],
    "summary_idxs": [[2, 0]],
    "norm_mean": [[0.5] * 3],
    "norm_std": [[0.5] * 3],
    "video_temporal_patch_size": [2],
    "pos_embed_shift": [0.5],
    "pos_embed_jitter": [0.5],
    "layer_scale_init_value": [0.0, 0.3],
    "layerscale_value": [0.5],
    "pool_scales": [(1, 2)],
    "_out_features": [["stem"]],
    "_out_indices": [[0]],
    "patch_dim": [99],
    "video_patch_dim": [99],
}
_SQUARE, _PATCHES, _BOTH = (
    dict(image_size=[20]), dict(patch_size=[2]), dict(image_size=[20], patch_size=[2]),
)  # fmt: skip
_POOLED = dict(vision_use_head=[])  # else it computes no vector
# Of these where a class takes fewer.
FEWER = {
    "Dinov2ForImageClassification": _SQUARE,
    "Dinov2WithRegistersForImageClassification": _SQUARE,
    "ViTMAEModel": dict(mask_ratio=[]),  # of pre-training
    "BeitForImageClassification": _PATCHES | dict(add_fpn=[]),
    "Data2VecVisionForImageClassification": _PATCHES,
    "Tipsv2VisionModel": _SQUARE,
    "Aimv2VisionModel": _BOTH,
    "SiglipVisionModel": _BOTH | _POOLED,
    "Siglip2VisionModel": _PATCHES | _POOLED,
    "CLIPVisionModel": _BOTH,
    "RadioModel": _BOTH | dict(num_channels=[]),
}


def other_values(model, field, usual):
    """Values of a field that are not the usual one, and that the model's class takes."""
    if (few := FEWER.get(model, {}).get(field, OTHERS.get(field))) is not None:
        return [x for x in few if x != usual]
    if isinstance(usual, bool):
        return [not usual]
    if isinstance(usual, float):
        return [0.1 if "eps" in field else 0.5 if usual == 0 else usual / 2]
    return [2 * usual]


def fields_of(config):
    """The fields of a config of a family, without those that all of transformers' have."""
    return [
        name
        for kind in type(config).__mro__
        if kind.__module__.startswith("transformers.models")
        for name in inspect.get_annotations(kind)
        if name not in ("model_type", "base_config_key")
    ]


def build(name, **changes):
    """A model of transformers with weights that hide nothing: a tensor of the same name and shape has the same."""
    config, fields, _ = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**fields | changes)).eval()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
            is_scale = tensor_name.endswith("weight") and "norm" in tensor_name
            tensor.copy_(is_scale + 0.3 * noise)
    return model


def images_for(config):
    size = getattr(config, "image_size", 0) or round(config.num_patches**0.5) * config.patch_size
    height, width = (size, size) if isinstance(size, int) else size
    shape = (2, height, width, config.num_channels)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def theirs(model, x, output):
    """What transformers computes of images (N, H, W, C)."""
    inputs = {"pixel_values": torch.from_numpy(x).permute(0, 3, 1, 2)}
    sides = np.broadcast_to(model.config.patch_size, 2)
    rows, columns = np.array(x.shape[1:3]) // sides
    if type(model).__name__ == "Siglip2VisionModel":
        patches = x.reshape(len(x), rows, sides[0], columns, sides[1], -1).swapaxes(2, 3)
        inputs = {
            "pixel_values": torch.from_numpy(patches.reshape(len(x), rows * columns, -1)),
            "pixel_attention_mask": torch.ones(len(x), rows * columns, dtype=torch.int32),
            "spatial_shapes": torch.tensor([[rows, columns]] * len(x)),
        }
    if type(model).__name__ == "ViTMAEModel":  # nothing is masked, nor moved
        inputs["noise"] = torch.arange(rows * columns).float().repeat(len(x), 1)
    with torch.no_grad():
        return model(**inputs)[output].numpy()


def ours(checkpoint, x, output):
    """The same of a checkpoint of ours; C-RADIOs of transformers normalise images by themselves."""
    if isinstance(checkpoint.model_config, radio.RadioConfig):
        x = ((x - np.array(radio.MEAN)) / np.array(radio.STD)).astype(np.float32)
    params = jax.tree.map(np.asarray, checkpoint.params)
    return getattr(
        zoo.program(checkpoint.model_config, "float32")(params, {}, x),
        OUTPUTS.get(output, "features"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_fields_that_change_what_transformers_computes_are_followed_or_refused(name, tmp_path):
    usual, output = build(name), MODELS[name][2]
    x = images_for(usual.config)
    before, shapes = theirs(usual, x, output), [t.shape for t in usual.parameters()]
    usual.save_pretrained(tmp_path / "usual")
    unchanged = formats.read_checkpoint(tmp_path / "usual")
    oracles.assert_close(ours(unchanged, x, output), before, zoo.BOUND)
    outcomes = {}
    for field in fields_of(usual.config):
        for value in other_values(name, field, getattr(usual.config, field)):
            torch.manual_seed(0)
            model = build(name, **{field: value})
            x = images_for(model.config)
            after = theirs(model, x, output)
            same = shapes == [t.shape for t in model.parameters()] and np.array_equal(before, after)
            folder = tmp_path / f"{field}_{value}".replace("/", "")
            model.save_pretrained(folder)
            try:
                checkpoint = formats.read_checkpoint(folder)
            except CheckpointError:
                assert not same, f"{field} = {value} changes nothing, and is refused"
                outcomes[field] = "refused"
                continue
            if same:
                assert checkpoint.model_config == unchanged.model_config, (field, value)
            else:
                message = f"{field} = {value}"
                found = ours(checkpoint, x, output)
                assert found.shape == after.shape, message
                oracles.assert_close(found, after, zoo.BOUND, err_msg=message)
            outcomes.setdefault(field, "same" if same else "followed")
    # What nothing depends on is of training alone, or of what the class has not.
    assert {"followed"} <= {*outcomes.values()}
    assert outcomes["num_attention_heads"] == outcomes["num_hidden_layers"] == "followed"


def test_every_kind_of_config_is_among_them():
    kinds = {getattr(transformers, config).model_type for config, *_ in MODELS.values()}
    read = {*vit_huggingface.HuggingFace.model_types, *radio.Transformers.model_types}
    # Models of images and text have a tower's config in theirs.
    assert {kind.removesuffix("_vision_model") for kind in read} == {
        kind.removesuffix("_vision_model") for kind in kinds
    }


# Of timm's classes: the module, what has all parameters, and arguments with which most of them are used.
TIMM = {
    vit_arguments.VIT: ("vision_transformer", "VisionTransformer", {}),
    vit_arguments.EVA: ("eva", "Eva", dict(swiglu_mlp=True, use_rot_pos_emb=True, init_values=0.1)),
    vit_arguments.BEIT: ("beit", "Beit", dict(use_abs_pos_emb=False, use_rel_pos_bias=True)),
    vit_arguments.NAFLEX: ("naflexvit", "NaFlexVitCfg", {}),
}
# Other values of arguments that are names, or nothing; of others twice the usual, or its negation.
NAMED = {
    "norm_layer": "rmsnorm", "act_layer": "silu", "embed_norm_layer": "layernorm", "input_norm_layer": "layernorm",
    "mlp_layer": "SwiGLU", "attn_layer": "diff", "block_fn": "ResPostBlock", "embed_layer": "ConvStem",
    "embed_proj_type": "conv", "pos_embed": "factorized", "pos_embed_interp_mode": "bilinear", "attn_type": "rope",
    "rope_type": "mixed", "rope_grid_indexing": "xy", "weight_init": "jax", "fc_norm": True, "use_fc_norm": False,
    "use_post_transformer_norm": True, "init_values": 0.3, "attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 2.0,
    "swiglu_align_to": 5, "pos_embed_grid_size": (8, 8),
}  # fmt: skip
# What tensors tell, or a size; and what only training reads, or sizes that are no multiple of a patch.
IN_TENSORS = {
    "img_size", "in_chans", "num_classes", "num_kv_heads", "qkv_fused", "class_token", "pos_embed_grid_size",
    "init_values",
}  # fmt: skip
IDLE = {
    "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate",
    "weight_init", "fix_init", "head_init_scale", "rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords",
    "dynamic_img_size", "dynamic_img_pad", "enable_patch_interpolator", "use_key_only_attn_mask",
}  # fmt: skip


@pytest.mark.parametrize("kind", TIMM)
def test_arguments_of_timm_are_followed_or_refused(kind):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    without_torchvision.timm_models()
    module, name, base = TIMM[kind]
    parameters = inspect.signature(getattr(importlib.import_module(f"timm.models.{module}"), name))
    usual, same = vit_arguments.from_arguments(kind, base), set()
    for argument, parameter in parameters.parameters.items():
        value = base.get(argument, parameter.default)
        if argument == "global_pool":
            other = "token" if value == "avg" else "avg"
        elif argument in NAMED:
            other = NAMED[argument]
        else:
            other = not value if isinstance(value, bool) else (value or 1) * 2
        if argument in ("device", "dtype"):
            continue
        try:
            options = vit_arguments.from_arguments(kind, base | {argument: other})
        except CheckpointError:
            continue
        if options == usual:
            same.add(argument)
    assert same <= IN_TENSORS | IDLE
