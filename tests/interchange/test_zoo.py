"""Published architectures of timm, saved as timm does: here and there the same logits, written again the
same bytes, and loaded again by timm. Small ones with every option; all names in a slow test, whose table
is in docs/notes/2026-11-26-checkpoints.md (see `zoo`).
"""

import importlib.util
import json
import re

import numpy as np
import pytest

import vit_jax
from tests import lazily
from tests.interchange import published_names, zoo
from tests.models import oracles
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, safetensors
from vit_jax.interchange.conversions import vit_options, vit_timm
from vit_jax.models import published

torch = lazily.Package("torch")
if importlib.util.find_spec("timm") is None:
    pytest.skip("pip install --no-deps timm", allow_module_level=True)

TINY = dict(depth=2, num_heads=2, num_classes=5, img_size=(28, 42))
P14, P16 = dict(embed_dim=16, **TINY), dict(embed_dim=16, **TINY | dict(img_size=(32, 48)))
# Published architectures by what they show, made tiny.
SMALL = {
    "vit_base_patch16_clip_quickgelu_224": P16,  # norm before the blocks, quick GELU
    "deit3_small_patch16_224": P16,  # LayerScale, class token without position
    "vit_giant_patch14_reg4_dinov2": P14
    | dict(embed_dim=24),  # registers, a gate in one layer with the MLP's first
    "vit_so150m2_patch16_reg1_gap_256": P16,  # register with position, norm of the mean, no QKV biases
    "vit_base_patch32_siglip_256": P16 | dict(patch_size=16),  # attention pooling, tanh GELU
    "vit_small_patch16_18x2_224": P16,  # attentions side by side
    "vit_dwee_patch16_reg1_gap_256": P16,  # differential attention
    "aimv2_large_patch14_224": P14,  # RMS norms, norm of the patches, a gate, no biases
    "beit_base_patch16_224": P16,  # a bias of each distance, no biases of keys, LayerScale, a mean
    "cait_xxs24_224": P16,  # heads that are mixed, a class token after the blocks of patches
    "beit3_base_patch16_224": P16,  # inner norms, mean beside a class token
    "vit_base_patch16_rpn_224": P16,  # norms after
    "vit_base_patch16_radio_v3": P16,  # no last norm
    "eva02_base_patch14_224": P14,  # separate queries, keys, values; rotary positions of another grid
    "eva02_tiny_patch14_224": P14,  # one layer of gate and MLP
    "vit_base_patch16_dinov3_qkvb": P16,  # centred rotary positions, no biases of keys
    "vit_pe_core_base_patch16_224": P16,  # columns first, an offset, pooling with heads of its own
    "vit_base_patch16_rope_mixed_ape_224": P16,  # learned frequencies
    # images that its patches do not divide
    "vit_so400m_patch14_siglip_384": dict(embed_dim=16, **TINY | dict(img_size=(32, 48))),
    "vit_base_patch16_sapiens2": P16
    | dict(num_kv_heads=2),  # scale of attention alone, normed queries
}


def tensors_of(path):
    return {name: np.asarray(t) for name, t in safetensors.read(path)[0].items()}


# What others show too, or few names need.
LATER = {
    "deit3_small_patch16_224",
    "vit_base_patch16_rpn_224",
    "vit_base_patch16_radio_v3",
    "eva02_tiny_patch14_224",
    "vit_base_patch32_siglip_256",
    "beit3_base_patch16_224",
}


@pytest.fixture(scope="module")
def timms():
    """What timm says of the published models."""
    return published_names.models()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LATER)) for n in SMALL]
)
def test_an_architecture_is_read_and_written_as_it_is(tmp_path, name):
    model = zoo.build(name, **SMALL[name])
    folder = zoo.save(model, tmp_path / "theirs", SMALL[name])
    checkpoint = formats.read_checkpoint(folder)
    assert zoo.difference(model, checkpoint) <= zoo.BOUND
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "timm")
    before, after = (tensors_of(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(before[n].tobytes() == after[n].tobytes() for n in before)
    # timm builds the same from our config.json, and so do we.
    said = json.loads((tmp_path / "ours" / "config.json").read_text())
    again = zoo.build(said["architecture"], num_classes=5, **said["model_args"])
    again.load_state_dict({n: torch.from_numpy(np.array(t)) for n, t in after.items()}, strict=True)
    x = zoo.images(checkpoint.model_config)
    np.testing.assert_allclose(zoo.answer(again, x), zoo.answer(model, x), rtol=0, atol=1e-6)
    assert formats.read_checkpoint(tmp_path / "ours").model_config == checkpoint.model_config


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_large_patch16_sapiens2", dict(num_heads=4, num_kv_heads=(4, 2))),
        ("vit_pwee_patch16_reg1_gap_256", {}),
        ("vit_dpwee_patch16_reg1_gap_256", {}),
    ],
    ids=["fewer heads of keys", "parallel blocks", "parallel blocks, one last layer"],
)
def test_what_is_kept_in_another_arrangement_is_computed_the_same(tmp_path, name, arguments):
    arguments = P16 | arguments
    model = zoo.build(name, **arguments)
    checkpoint = formats.read_checkpoint(zoo.save(model, tmp_path / "theirs", arguments))
    assert zoo.difference(model, checkpoint) <= 1e-5
    if checkpoint.model_config.parallel:
        with pytest.raises(CheckpointError, match="timm has no parallel blocks"):
            formats.write_checkpoint(checkpoint, tmp_path / "ours", "timm")
        return
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "timm")
    # With as many heads of keys as of queries.
    assert zoo.difference(model, formats.read_checkpoint(tmp_path / "ours")) <= 1e-5


def recognised(name, said=None, **arguments):
    """What the tensors of an architecture say, and what is said beside them; without memory."""
    with torch.device("meta"):
        model = zoo.without_torchvision.timm_models().create_model(name, **arguments)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return vit_timm.Timm().recognise(shapes, said or {})


def test_what_no_tensor_tells_is_asked_for_where_published_models_differ():
    clip = recognised("vit_base_patch16_clip_224")
    assert list(clip.open) == ["activation"] and clip.options["epsilon"] == 1e-5
    words = "published models with such tensors have 'gelu' .* or 'quick_gelu' .*quickgelu"
    assert re.search(words, clip.open["activation"].ask)
    # 16 heads of 48 channels.
    gap = recognised("vit_base_patch16_gap_224")
    assert gap.options["pool"] == "mean" and "16" in gap.open["heads"].ask
    named = recognised("vit_base_patch16_gap_224", {"architecture": "vit_base_patch16_gap_224"})
    assert named.options["heads"] == 16 and not named.open
    # What is not ambiguous is not asked.
    for name in ("deit3_base_patch16_224", "vit_large_patch14_dinov2", "vit_small_patch16_224"):
        assert not recognised(name).open
    # A size that nobody published.
    assert {"heads"} <= recognised("vit_base_patch16_224", embed_dim=96).open.keys()


def test_options_that_are_asked_for_can_be_said(tmp_path):
    arguments = P16 | dict(embed_dim=48, img_size=32)
    model = zoo.build("vit_base_patch16_clip_quickgelu_224", **arguments)
    folder = zoo.save(model, tmp_path / "folder", arguments)
    path = tmp_path / "weights.safetensors"
    (folder / "model.safetensors").rename(path)
    with pytest.raises(
        CheckpointError, match="(?s)heads .*no model.*--model=heads=….*models --published"
    ):
        formats.read_checkpoint(path)
    said = dict(heads=2, activation="quick_gelu")
    assert zoo.difference(model, formats.read_checkpoint(path, **said)) <= zoo.BOUND
    assert formats.read_checkpoint(path, hints=said).model_config.activation == "quick_gelu"


def test_the_name_of_a_file_or_folder_tells_what_a_bare_file_does_not(tmp_path):
    model = zoo.build("test_vit", num_classes=0)
    folder = zoo.save(model, tmp_path / "models--timm--test_vit.r160_in1k", {})
    (folder / "config.json").unlink()
    found = formats.read_checkpoint(folder / "model.safetensors")
    assert found.model_config.heads == 2
    assert found.preprocessing == published.architectures()["test_vit"].tags["r160_in1k"]
    assert found.preprocessing.interpolation == "bicubic"


def test_what_contradicts_its_name_or_config_is_refused(tmp_path):
    arguments = P16 | dict(depth=1)
    model = zoo.build("vit_tiny_patch16_224", **arguments)
    folder = zoo.save(model, tmp_path / "folder", arguments)
    path = tmp_path / "vit_small_patch16_224.safetensors"
    path.write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="vit_small_patch16_224 says .*, the tensors have"):
        formats.read_checkpoint(path)
    said = json.loads((folder / "config.json").read_text())
    for changed, words in {
        ("depth", 12): "vit_tiny_patch16_224 says depth=12, the tensors have 1",
        ("block_fn", "OtherBlock"): "timm's block_fn='OtherBlock' is not supp",
        ("new_argument", 3): "timm's new_argument=3 is not supported",
        ("act_layer", "relu"): "timm's act_layer='relu' is not supported; gelu",
    }.items():
        other = said | {"model_args": arguments | dict([changed])}
        (folder / "config.json").write_text(json.dumps(other))
        with pytest.raises(CheckpointError, match=words):
            formats.read_checkpoint(folder)


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
    oracles.assert_close(found, expected, zoo.BOUND)


def test_published_names_and_facts_are_those_of_timm(timms):
    table = json.loads(json.dumps(published_names.table(timms)))
    assert json.loads(published.FILE.read_text()) == table


def test_preprocessing_is_what_timm_resolves(timms):
    from timm.data import resolve_data_config

    for name, (_, _, config) in timms.items():
        if config is None:
            continue
        architecture, _, tag = name.partition(".")
        found = published.architectures()[architecture].tags[tag]
        said = resolve_data_config(pretrained_cfg=config)
        height, width = said["input_size"][1:]
        assert found.image_size in (height, (height, width)), name
        assert (found.mean, found.std) == (said["mean"], said["std"]), name
        assert found.interpolation == said["interpolation"], name
        if said["crop_mode"] == "squash":
            assert found.eval_crop == ("resize" if said["crop_pct"] == 1 else "squash"), name
        else:
            assert said["crop_mode"] == "center" and found.eval_crop == "torchvision", name
            assert found.eval_resize == int(min(height, width) / said["crop_pct"]), name


@pytest.mark.slow
def test_every_architecture_is_read_right_or_refused():
    """Small networks; `python -m tests.interchange.zoo` compares those of published width."""
    outcomes = zoo.sweep("", None, small=True)
    assert not {n: o for n, o in outcomes.items() if o[0] == "different"}
    refused = {name.partition(".")[0] for name, o in outcomes.items() if o[0] == "refused"}
    assert refused == set(REFUSED)


# Architectures of timm's ViT-like modules that are not computed here, and the part that is missing.
REFUSED = {
    "vit_base_mci_224": "embed_layer='ConvStem'",  # convolutions with batch norms
    # Without weights: patches of ResNets with batch norms.
    "vit_small_resnet26d_224": "embed_layer='ResNetD'",
    "vit_small_resnet50d_s16_224": "embed_layer='ResNetD'",
    "vit_base_resnet26d_224": "embed_layer='ResNetD'",
    "vit_base_resnet50d_224": "embed_layer='ResNetD'",
}


def test_few_architectures_are_refused_each_with_its_reason():
    refused = [name for name in published.architectures() if not vit_options.supported(name)]
    assert set(refused) == set(REFUSED)
    for name, part in REFUSED.items():
        with pytest.raises(CheckpointError, match=f"timm's {re.escape(part)} is not supported"):
            vit_options.check_supported(name)
    assert {n.partition(".")[0] for n in published.names()} & set(REFUSED) == {"vit_base_mci_224"}
