"""C-RADIOs of transformers and of timm: two layers of random weights, images that are not square, against the code that
they are from.
"""

import importlib.util
import json

import numpy as np
import pytest

import vit_jax
from tests import lazily
from tests.interchange import test_peft, zoo
from tests.interchange.test_zoo import tensors_of
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors
from vit_jax.models import registry
from vit_jax.models.contract import PatchBatch

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")
if importlib.util.find_spec("timm") is None:
    pytest.skip("pip install --no-deps timm", allow_module_level=True)

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "max_img_size": 20,
    "num_cls_tokens": 3, "num_registers": 2, "summary_idxs": [0, 2],
}  # fmt: skip
TINY = dict(
    embed_dim=16, depth=2, num_heads=2, num_classes=3, patch_size=4, reg_tokens=2, pos_embed_grid_size=(5, 5)
)  # fmt: skip
MEAN, STD = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])  # fmt: skip
# Smaller and larger than the table of 5 x 5, longer down and across.
IMAGES = [np.random.default_rng(0).uniform(0, 1, (2, *size, 3)) for size in ((12, 8), (16, 28))]


def normalised(images):
    return ((images - MEAN) / STD).astype(np.float32)


def channels_first(images):
    return torch.from_numpy(images.astype(np.float32)).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder of transformers, and its model."""
    torch.manual_seed(0)
    model = transformers.RadioModel(transformers.RadioConfig(**SIZES))
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    zoo.randomize(model)
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    folder = tmp_path_factory.mktemp("radio")
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "CLIPImageProcessor", "do_normalize": False, "do_center_crop": False,
        "size": {"height": 12, "width": 8}, "resample": 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder, model


def test_a_radio_of_transformers_is_read_at_any_size_and_written_as_it_was(theirs, tmp_path):
    folder, model = theirs
    for x in IMAGES:
        run = vit_jax.load_run(folder, image_size=x.shape[1:3])
        with torch.no_grad():
            expected = model(channels_first(x))
        output = run.model(normalised(x))
        oracles.assert_close(output.features, expected.summary.numpy(), 1e-5)
        oracles.assert_close(output.tokens[:, 3:], expected.features.numpy(), 1e-5)
        assert output.tokens.shape[1] == 3 + expected.features.shape[1]
    checkpoint = formats.read_checkpoint(folder)
    assert checkpoint.model_config.image_size == (12, 8)
    assert checkpoint.preprocessing.mean == tuple(MEAN)
    formats.write_checkpoint(checkpoint, tmp_path / "again", "huggingface")
    before, after = (tensors_of(at / "model.safetensors") for at in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    processor = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert processor["do_normalize"] is False
    # Its positions are also those of images of sizes of their own.
    x = normalised(IMAGES[0])
    patches = x.reshape(2, 3, 4, 2, 4, 3).swapaxes(2, 3).reshape(2, 6, 48)
    padded = np.pad(patches, [(0, 0), (0, 2), (0, 0)])
    native = PatchBatch(padded, np.array([[3, 2], [3, 2]], np.int32))
    native_features = vit_jax.load(folder)(native).features
    oracles.assert_close(native_features, vit_jax.load(folder)(x).features, 1e-5)


def test_what_the_authors_code_computes_otherwise_is_refused(theirs, tmp_path):
    folder, _ = theirs
    described = json.loads((folder / "config.json").read_text())
    tensors = tensors_of(folder / "model.safetensors")
    plain = {name: x for name, x in tensors.items() if "layer_scale" not in name}
    # Windows of attention, features that are rotated; a scale that transformers gives blocks whose file has none.
    refused = [
        ({"vitdet_window_size": 2}, tensors),
        ({"feature_normalizer_config": {"embed_dim": 16}}, tensors),
        ({"inter_feature_normalizer_config": {"num_intermediates": 2}}, tensors),
        ({"layerscale_value": 0.5}, plain),
    ]
    for changed, stored in refused:
        specs = {name: (x.shape, x.dtype) for name, x in stored.items()}
        safetensors.write(tmp_path / "model.safetensors", stored.items(), specs, {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(described | changed))
        with pytest.raises(CheckpointError, match=next(iter(changed))):
            formats.read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described | {"vitdet_window_size": None}))
    assert formats.read_checkpoint(tmp_path).model_config.layer_scale == "none"


def test_adapters_are_for_the_modules_of_transformers(theirs, tmp_path):
    folder, _ = theirs
    test_peft.with_adapters(str(folder), tmp_path / "peft")
    model = transformers.RadioModel.from_pretrained(folder).eval()
    test_peft.as_peft_does(model, str(tmp_path / "peft"))
    x = IMAGES[0]
    with torch.no_grad():
        expected = model(channels_first(x)).summary.numpy()
    features = vit_jax.load(tmp_path / "peft")(normalised(x)).features
    oracles.assert_close(features, expected, 1e-5)
    assert np.abs(vit_jax.load(folder)(normalised(x)).features - expected).max() > 0.1


@pytest.mark.parametrize("corners", [False, True])
def test_a_radio_of_timm_is_read_at_any_size_and_written_as_it_was(tmp_path, corners):
    arguments = TINY | {"pos_embed_align_corners": corners}
    model = zoo.build("naflexvit_base_patch16_radio_v3", **arguments)
    folder = zoo.save(model, tmp_path / "theirs", arguments)
    for x in IMAGES:
        run = vit_jax.load(folder, image_size=x.shape[1:3])
        assert run.config.table_corners is corners
        with torch.no_grad():
            expected = model.double()(channels_first(x).double()).numpy()
        oracles.assert_close(run(x.astype(np.float32)).logits, expected, 1e-5)
    checkpoint = formats.read_checkpoint(folder)
    formats.write_checkpoint(checkpoint, tmp_path / "again", "timm")
    before, after = (tensors_of(at / "model.safetensors") for at in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    described = json.loads((tmp_path / "again" / "config.json").read_text())
    again = zoo.build(described["architecture"], num_classes=3, **described["model_args"])
    again.load_state_dict({n: torch.tensor(t) for n, t in after.items()}, strict=True)
    with torch.no_grad():
        oracles.assert_close(again(channels_first(x)).numpy(), expected, 1e-5)
    assert formats.read_checkpoint(tmp_path / "again").model_config == checkpoint.model_config
    # A file of ours says what no tensor does.
    formats.write_checkpoint(checkpoint, tmp_path / "ours.safetensors", "timm")
    assert (
        formats.read_checkpoint(tmp_path / "ours.safetensors").model_config
        == checkpoint.model_config
    )
    with pytest.raises(CheckpointError, match="RadioModel has no .*head"):
        formats.write_checkpoint(checkpoint, tmp_path / "refused", "huggingface")


def test_what_no_tensor_tells_of_a_radio_is_asked_for(tmp_path):
    model = zoo.build("naflexvit_base_patch16_radio_v3", **TINY)
    torch.save(model.state_dict(), tmp_path / "radio.pth")
    with pytest.raises(CheckpointError, match="(?s)table_corners: .*heads"):
        formats.read_checkpoint(tmp_path / "radio.pth")
    options = dict(heads=2, table_corners=True, image_size=(12, 8))
    config = formats.read_checkpoint(tmp_path / "radio.pth", **options).model_config
    assert (config.table_side, config.registers) == (5, 2)


# Facts §58.1: backbones as timm has them, with a bias of patches.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("C-RADIOv4-So400m/16", 431_238_384), ("C-RADIOv4-H/16", 651_646_720)],
)
def test_sizes_have_the_published_number_of_parameters(name, parameters):
    config = registry.model_config(name, num_classes=0, patch_bias=True)
    assert registry.count_parameters(config) == parameters
