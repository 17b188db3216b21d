"""Features of layers against transformers and timm: tokens, maps and class tokens of every layer, with the last norm
and without, of square and of wide images.
"""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests import lazily, without_torchvision
from tests.interchange import zoo
from tests.models import oracles
from vit_jax.interchange import safetensors
from vit_jax.models import layer_features

torch = lazily.Package("torch")
transformers = lazily.Package("transformers")

# Side of a patch, the model's own size, that of the images.
# Positions are interpolated for images of another size; at the own one nothing is.
SIZES = [
    pytest.param(4, 12, (12, 12), marks=pytest.mark.slow),
    (4, 12, (16, 28)),
    pytest.param(16, 224, (224, 224), marks=pytest.mark.slow),
    pytest.param(16, 224, (256, 448), marks=pytest.mark.slow),
]
BODY = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
# Class: its config, further fields, the name of its last norm, tokens before the patches, how positions are resized.
OF_TRANSFORMERS = {
    "ViTModel": ("ViTConfig", {}, "layernorm", 1, "torch"),
    "Dinov2Model": ("Dinov2Config", {}, "layernorm", 1, "torch"),
    "Dinov2WithRegistersModel": (
        "Dinov2WithRegistersConfig", dict(num_register_tokens=2), "layernorm", 3, "bicubic",
    ),
    "DINOv3ViTModel": ("DINOv3ViTConfig", dict(num_register_tokens=2), "norm", 3, "scipy"),
    "SiglipVisionModel": ("SiglipVisionConfig", {}, "post_layernorm", 0, "torch"),
}  # fmt: skip


def pixels(size):
    return np.random.default_rng(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)


def ours(path, x, layers, *, norm, resize="scipy", **options):
    model = vit_jax.load(path, image_size=x.shape[1:3], resize=resize, **options)
    compute = nnx.jit(lambda model, x: layer_features.compute(model, x, layers, norm=norm))
    output, found = compute(model, jnp.asarray(x))
    assert output.intermediates == {}
    return found


@pytest.mark.parametrize(("patch", "own", "size"), SIZES)
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_layers_are_the_hidden_states_of_transformers(tmp_path, name, patch, own, size):
    config, fields, norm_name, prefix, resize = OF_TRANSFORMERS[name]
    config = getattr(transformers, config)(**BODY, image_size=own, patch_size=patch, **fields)
    torch.manual_seed(0)
    model = zoo.randomize(getattr(transformers, name)(config))
    model.save_pretrained(tmp_path)
    x, last_norm = pixels(size), getattr(model, norm_name)
    how = {"interpolate_pos_encoding": True} if name.startswith(("ViT", "Siglip")) else {}
    with torch.no_grad():
        output = model(torch.from_numpy(x).permute(0, 3, 1, 2), output_hidden_states=True, **how)
        hidden = [state.numpy() for state in output.hidden_states[1:]]
        normed = [last_norm(state).numpy() for state in output.hidden_states[1:]]
    rows, columns = (side // patch for side in size)
    for norm, states in ((False, hidden), (True, normed)):
        for layer, expected in zip(
            ours(tmp_path, x, (0, 1, -1), norm=norm, resize=resize), states, strict=True
        ):
            registers = np.arange(1, prefix)  # which no output of ours has
            oracles.assert_close(layer.tokens, np.delete(expected, registers, axis=1))
            oracles.assert_close(layer.map, expected[:, prefix:].reshape(2, rows, columns, 32))
            assert (layer.class_token is None) == (prefix == 0)
            if prefix:
                oracles.assert_close(layer.class_token, expected[:, 0])
    last = np.delete(output.last_hidden_state.numpy(), registers, axis=1)
    oracles.assert_close(layer.tokens, last)


@pytest.fixture(scope="module")
def theirs():
    """timm's modules for models, imported without torchvision."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("pip install --no-deps timm")
    return without_torchvision.timm_models()


def of_timm(theirs, name, patch, size):
    """A model of timm for images of this size."""
    same = dict(patch_size=patch, embed_dim=32, num_classes=0, img_size=size)
    match name:
        case "vit":
            return theirs.VisionTransformer(**same, depth=3, num_heads=4)
        case "mixer":
            return theirs.MlpMixer(**same, num_blocks=3)
        case "bit":
            from functools import partial

            from timm.layers import StdConv2d

            return theirs.ResNetV2(
                layers=[2, 1, 1],
                width_factor=0.5,
                num_classes=0,
                stem_type="fixed",
                conv_layer=partial(StdConv2d, eps=1e-8),
            )


@pytest.mark.parametrize(
    ("patch", "size"), [(4, (16, 28)), pytest.param(16, (256, 448), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["vit", "mixer", "bit"])
def test_layers_are_the_intermediates_of_timm(theirs, tmp_path, name, patch, size):
    model = zoo.randomize(of_timm(theirs, name, patch, size))
    path = tmp_path / "model.safetensors"
    tensors = {key: value.numpy() for key, value in model.state_dict().items()}
    specs = {key: (value.shape, value.dtype) for key, value in tensors.items()}
    safetensors.write(path, tensors.items(), specs, {})
    x, layers = pixels(size), ("stage1", "stage2", "stage3") if name == "bit" else (0, 1, 2)
    options = dict(heads=4, activation="gelu", pool="token") if name == "vit" else {}
    for norm in (False, True):
        with torch.no_grad():
            # In float64: the rounding of timm's own ResNets is as large as the bound.
            expected = model.double().forward_intermediates(
                torch.from_numpy(x).permute(0, 3, 1, 2).double(),
                indices=[1, 2, 3] if name == "bit" else [0, 1, 2],
                norm=norm,
                intermediates_only=True,
            )
        found = ours(path, x, layers, norm=norm, **options)
        for layer, of_theirs in zip(found, expected, strict=True):
            oracles.assert_close(layer.map, of_theirs.permute(0, 2, 3, 1).numpy())
