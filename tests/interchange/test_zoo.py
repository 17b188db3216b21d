"""Published architectures of timm, saved as timm does: here and there the same logits, written again the
same bytes, and loaded again by timm. Small ones with every option; all names in a slow test, whose table
is in docs/checkpoints.md (see `zoo`).
"""

import importlib.util
import json

import numpy as np
import pytest

import vit_jax
from tests.interchange import published_names, zoo
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors
from vit_jax.models.conversions import published

torch = pytest.importorskip("torch")
if importlib.util.find_spec("timm") is None:
    pytest.skip("pip install --no-deps timm", allow_module_level=True)

TINY = dict(depth=2, num_heads=2, num_classes=5, img_size=(28, 42))
P14, P16 = dict(embed_dim=16, **TINY), dict(embed_dim=16, **TINY | dict(img_size=(32, 48)))
# Published architectures by what they show, made tiny.
SMALL = {
    "vit_base_patch16_clip_quickgelu_224": P16,  # norm before the blocks, quick GELU
    "deit3_small_patch16_224": P16,  # LayerScale, class token without position
    "vit_giant_patch14_reg4_dinov2": P14,  # registers, a gate in one layer with the MLP's first
    "vit_so150m2_patch16_reg1_gap_256": P16,  # register with position, norm of the mean, no QKV biases
    "vit_base_patch32_siglip_256": P16 | dict(patch_size=16),  # attention pooling, tanh GELU
    "aimv2_large_patch14_224": P14,  # RMS norms, norm of the patches, a gate, no biases
    "beit3_base_patch16_224": P16,  # inner norms, mean beside a class token
    "vit_base_patch16_rpn_224": P16,  # norms after
    "vit_base_patch16_radio_v3": P16,  # no last norm
    "eva02_base_patch14_224": P14,  # separate queries, keys, values; rotary positions of another grid
    "eva02_tiny_patch14_224": P14,  # one layer of gate and MLP
    "vit_base_patch16_dinov3_qkvb": P16,  # centred rotary positions, no biases of keys
    "vit_pe_core_base_patch16_224": P16,  # columns first, an offset, pooling with heads of its own
    "vit_base_patch16_rope_mixed_ape_224": P16,  # learned frequencies
    "vit_base_patch16_sapiens2": P16
    | dict(num_kv_heads=2),  # scale of attention alone, normed queries
}


def tensors_of(path):
    return {name: np.asarray(t) for name, t in safetensors.read(path)[0].items()}


@pytest.mark.parametrize("name", SMALL)
def test_an_architecture_is_read_and_written_as_it_is(tmp_path, name):
    model = zoo.build(name, **SMALL[name])
    folder = zoo.save(model, tmp_path / "theirs", SMALL[name])
    foreign = formats.read(folder)
    assert zoo.difference(model, foreign) <= zoo.BOUND
    formats.write(foreign, tmp_path / "ours", "timm")
    before, after = (tensors_of(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)
    # timm builds the same from our config.json, and so do we.
    said = json.loads((tmp_path / "ours" / "config.json").read_text())
    again = zoo.build(said["architecture"], num_classes=5, **said["model_args"])
    again.load_state_dict({n: torch.from_numpy(t) for n, t in after.items()}, strict=True)
    assert zoo.difference(again, foreign) <= zoo.BOUND
    assert formats.read(tmp_path / "ours").model_config == foreign.model_config


def bare(model, path):
    path.parent.mkdir(exist_ok=True)
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    specs = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    safetensors.write(path, tensors.items(), specs, {})
    return path


def test_what_a_bare_file_does_not_tell_is_asked_for_and_its_name_answers(tmp_path):
    name = "vit_base_patch32_clip_quickgelu_224"
    model = zoo.build(name, depth=12, num_classes=0)
    path = bare(model, tmp_path / "weights.safetensors")
    words = "activation: published models with such tensors have 'gelu' .* or 'quick_gelu' .*--model=activation=…"
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        formats.read(path)
    assert formats.read(path, activation="quick_gelu").model_config.epsilon == 1e-5
    assert formats.read(path, hints={"activation": "quick_gelu"}).model_config.heads == 12
    # As the hub's cache lays it out.
    named = tmp_path / "models--timm--vit_base_patch32_clip_quickgelu_224.openai" / path.name
    named.parent.mkdir()
    path.rename(named)
    found = formats.read(named)
    assert found.model_config.activation == "quick_gelu"
    assert found.preprocessing == published.architectures()[name].tags["openai"]
    assert found.preprocessing.interpolation == "bicubic"


def test_what_contradicts_its_name_or_config_is_refused(tmp_path):
    model = zoo.build("vit_tiny_patch16_224", depth=1, num_classes=0)
    path = bare(model, tmp_path / "vit_small_patch16_224.safetensors")
    with pytest.raises(CheckpointError, match="vit_small_patch16_224 says .*, the tensors have"):
        formats.read(path)
    folder = zoo.save(model, tmp_path / "folder", {"depth": 12})
    with pytest.raises(CheckpointError, match="says depth=12, the tensors have 1"):
        formats.read(folder)
    said = json.loads((folder / "config.json").read_text())
    said["model_args"] = {"depth": 1, "block_fn": "ParallelThingsBlock"}
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="timm's block_fn='ParallelThingsBlock' is not supp"):
        formats.read(folder)
    said["model_args"] = {"depth": 1, "new_argument": 3}
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="timm's new_argument=3 is not supported"):
        formats.read(folder)


def test_rotary_positions_and_registers_go_to_another_resolution_as_in_timm(tmp_path):
    name = "vit_base_patch16_dinov3"
    small = zoo.build(name, **P16)
    folder = zoo.save(small, tmp_path / "folder", P16)
    large = zoo.build(name, **P16 | dict(img_size=(64, 32)))
    large.load_state_dict(small.state_dict())
    x = np.random.default_rng(0).uniform(-1, 1, (2, 64, 32, 3)).astype(np.float32)
    with torch.no_grad():
        expected = large(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()
    found = vit_jax.load(folder, image_size=(64, 32))(x).logits
    np.testing.assert_allclose(found, expected, atol=zoo.BOUND * max(1, np.abs(expected).max()))


def test_published_names_and_facts_are_those_of_timm():
    assert json.loads(published.FILE.read_text()) == json.loads(json.dumps(published_names.table()))


def test_preprocessing_is_what_timm_resolves():
    from timm.data import resolve_data_config

    for name, (_, _, config) in published_names.models().items():
        architecture, _, tag = name.partition(".")
        found = published.architectures()[architecture].tags[tag]
        said = resolve_data_config(pretrained_cfg=config)
        height, width = said["input_size"][1:]
        assert found.image_size in (height, (height, width)), name
        assert (found.mean, found.std) == (said["mean"], said["std"]), name
        assert found.interpolation == said["interpolation"], name
        if said["crop_mode"] == "squash":
            assert found.eval_crop == "resize"
        else:
            assert said["crop_mode"] == "center" and found.eval_crop == "central", name
            assert found.eval_resize == int(min(height, width) / said["crop_pct"]), name


@pytest.mark.slow
def test_every_published_name_is_read_right_or_refused():
    outcomes = zoo.sweep("", None)
    different = {n: o for n, o in outcomes.items() if o[0] == "different"}
    refused = [n for n, o in outcomes.items() if o[0] == "refused"]
    assert not different
    assert len(refused) < 0.05 * len(outcomes), refused
