"""Every name of a tensor that a reader leaves out, with the reason. None speaks of the model's positions unless its
values are compared with what the model computes.
"""

import ast
import importlib
import pathlib
import pkgutil
import re

import numpy as np
import pytest

import vit_jax
from tests import lazily
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, state_dicts
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.interchange.conversions.skips import Skip, is_about_positions, matching
from vit_jax.interchange.conversions.table import conversions_of
from vit_jax.models import registry

torch = lazily.Package("torch")
PACKAGE = pathlib.Path(vit_jax.__file__).parent

# By pattern: the other network that it belongs to, '' for the model's own, 'compared' where the model computes it.
LEFT_OUT = {
    r".*\.video_embedder\.weight": "the part for films",
    "mask_token": "",
    r"decoder_(pos_embed|embed|blocks|norm|pred)(\..*)?": "MAE's decoder",
    r"decoder\..*": "a decoder",
    r"(dino_head|ibot_head|projection_head|projectors?|predictor|prototypes)\..*": "a head of pre-training",
    r"n_averaged|num_averaged|num_updates|(global_)?step|epoch|iterations?|decay": "the script's state",
    r"((\d+|normali[sz]\w*|(\w+_)?preprocess\w*|transforms?)\.)?((pixel|image|img|input)_)?(mean|std)":
        "a normalisation of images",
    r"(\w+_)?(metrics?|acc\d*|accuracy|top\d+|f1|auroc|auc|precision|recall|m?iou|jaccard|dice|confmat|confusion)"
    r"(_\w+)?\..*|(.*\.)?(tp|fp|tn|fn|correct|total|confmat)": "metrics",
    r"(aux|\w+_aux)\w*\..*": "an auxiliary head",
    r"(?!(cls|main)_)\w+_head\w*\..*": "a second head",
    # Beside the network that a prefix names.
    r"(mask_token|queue\w*|center|logit_scale|logit_bias)": "the script's state",
    r"(\w*head\w*|fc|classifier|projectors?|projection|predictor|prototypes|neck)\..*": "a head beside the network",
    r"decoder\w*\..*|decoder_\w+": "a decoder",
    r"(\w*loss\w*|criterion)\..*": "a loss",
    # Of transformers.
    r"(.*\.)?mask_token": "",
    r"text_(model|encoder)\..*": "the text tower",
    "logit_(scale|bias)|temperature": "the text tower",
    r"(text|visual)_projection\.weight": "the text tower",
    r"(.*\.)?embeddings\.position_ids": "compared",
    r"(.*\.)?rope_embeddings\.inv_freq": "compared",
    r"(.*\.)?register_tokens": "compared",
    r"classifier\..*": "a head",
    # Of CLIP and SigLIP.
    r"text\..*": "the text tower",
    r"visual\.proj": "the text tower",
    r"logit_(scale|bias)": "the text tower",
    "input_resolution|context_length|vocab_size": "the text tower",
    # Of BEiT.
    r"(.*\.)?relative_position_index": "compared",
    r"lm_head\..*": "a head of pre-training",
    r"(.*\.)?head\..*": "a head",
}  # fmt: skip
# Names of the model's own positions, masks and norms in the code of others.
OWN = (
    "pos_embed", "pos_embed_win", "position_embedding", "embeddings.position_embeddings", "position_embeddings",
    "embeddings.position_ids", "positional_embedding", "rope_embed.periods", "rope.freqs", "rope.periods", "freqs_cis",
    "rope_embeddings.inv_freq", "embeddings.rope_embeddings.inv_freq", "rotary_emb.inv_freq", "rel_pos_bias.weight",
    "relative_position_bias_table", "blocks.0.attn.rope.freqs", "blocks.0.attn.rel_pos_h", "encoder.pos_embedding",
    "blocks.0.attn.relative_position_index", "Transformer/posembed_input/pos_embedding",
)  # fmt: skip
NORMS = (
    "norm.weight", "norm.bias", "fc_norm.weight", "cls_norm.weight", "local_cls_norm.weight", "blocks.0.norm1.weight",
    "layernorm.weight", "post_layernorm.weight", "vision_model.post_layernorm.bias", "encoder.layer.0.norm1.bias",
    "blocks.0.attn.qkv.bias_mask", "blocks.0.attn.mask", "attn_mask",
)  # fmt: skip


def all_skips() -> dict[str, Skip]:
    """By pattern, from the values of all modules that read."""
    found: dict[str, Skip] = {}
    for folder in (vit_jax.interchange, vit_jax.models, vit_jax.objectives):
        for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            for value in list(vars(importlib.import_module(module.name)).values()):
                found |= {skip.pattern: skip for skip in skips_in(value)}
    return found


def skips_in(value) -> list[Skip]:
    if isinstance(value, Skip):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | tuple | list):
        return [skip for one in values for skip in skips_in(one)]
    return []


def test_every_name_that_is_left_out_is_in_the_list_with_a_reason():
    found = all_skips()
    assert {
        pattern: "compared" if skip.computed else skip.network for pattern, skip in found.items()
    } == LEFT_OUT
    assert all(len(skip.reason.split()) > 2 for skip in found.values())


def test_all_of_them_are_values_of_modules():
    """What a function makes would be in no list."""
    calls = 0
    for path in PACKAGE.rglob("*.py"):
        if path.name == "skips.py":  # of a family of one's own patterns become skips
            continue
        tree = ast.parse(path.read_text())
        inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
        within = [n for function in inside for n in ast.walk(function)]
        assert not [n for n in within if is_skip(n)], path
        calls += sum(map(is_skip, ast.walk(tree)))
    assert calls >= len(LEFT_OUT)


def is_skip(node) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Skip"


def test_none_speaks_of_the_models_positions_unless_it_is_compared():
    assert all(is_about_positions(name) for name in OWN)
    for skip in all_skips().values():
        if not skip.computed:
            assert not matching([skip], OWN), skip
            # Another network's begin with its name, so that the model's own are none of them.
            spoken = is_about_positions(skip.pattern.replace("(", ".").replace("|", "."))
            assert skip.network or not spoken, skip


def test_none_speaks_of_norms_or_of_masks_of_weights():
    found = {name: skip for skip in all_skips().values() for name in matching([skip], NORMS)}
    assert not found


def test_no_parameter_of_any_format_is_called_like_what_is_left_out_of_the_model_itself():
    own = [skip for skip in state_dicts.EXTRAS if not skip.network]
    config = registry.model_config("ViT-mu/4", image_size=8)
    conversions = conversions_of(registry.family_of(config))
    for conversion in conversions.values():
        rules = conversion.of(config).rules(config, conversion.of(config).layout(config))
        names = [name.format(layer=0) for r in rules if isinstance(r, Rule) for name in r.names]
        assert not matching(own, names)


@pytest.fixture
def plain():
    """timm's tensors of a small ViT without positions."""
    random = np.random.default_rng(0)
    shapes = {
        "cls_token": (1, 1, 8), "patch_embed.proj.weight": (8, 3, 4, 4), "patch_embed.proj.bias": (8,),
        "blocks.0.attn.qkv.weight": (24, 8), "blocks.0.attn.qkv.bias": (24,), "blocks.0.attn.proj.weight": (8, 8),
        "blocks.0.attn.proj.bias": (8,), "blocks.0.mlp.fc1.weight": (12, 8), "blocks.0.mlp.fc1.bias": (12,),
        "blocks.0.mlp.fc2.weight": (8, 12), "blocks.0.mlp.fc2.bias": (8,),
        **{f"{n}.{part}": (8,) for n in ("norm", "blocks.0.norm1", "blocks.0.norm2") for part in ("weight", "bias")},
    }  # fmt: skip
    return {
        n: torch.from_numpy(random.normal(size=s).astype(np.float32)) for n, s in shapes.items()
    }


SAID = dict(heads=2, activation="gelu", pool="token", image_size=8)


def test_a_file_without_positions_is_asked_whether_its_network_turns_them(tmp_path, plain):
    torch.save(plain, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="(?s)does not state.*rope"):
        formats.read_checkpoint(tmp_path / "a.pth", **SAID)
    config = formats.read_checkpoint(tmp_path / "a.pth", **SAID, rope="none").model_config
    assert not config.knows_positions


def test_a_model_without_positions_whose_file_has_some_is_refused(tmp_path, plain):
    said = SAID | {"rope": "none"}
    student = {f"student.{name}": tensor for name, tensor in plain.items()}
    torch.save(student | {"teacher.scale": torch.ones(1)}, tmp_path / "a.pth")
    formats.read_checkpoint(tmp_path / "a.pth", **said)
    torch.save(student | {"teacher.pos_embed": torch.ones(1, 5, 8)}, tmp_path / "b.pth")
    with pytest.raises(CheckpointError, match="without positions, and it has teacher.pos_embed"):
        formats.read_checkpoint(tmp_path / "b.pth", **said)
    for name in ("rope_embed.frequencies", "blocks.0.attn.freqs_cis", "position_ids"):
        torch.save(plain | {name: torch.ones(4)}, tmp_path / "c.pth")
        with pytest.raises(CheckpointError, match=re.escape(name)):
            formats.read_checkpoint(tmp_path / "c.pth", **said)
    # A decoder's are another network's.
    torch.save(plain | {"decoder_pos_embed": torch.ones(1, 5, 8)}, tmp_path / "d.pth")
    formats.read_checkpoint(tmp_path / "d.pth", **said)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("embeddings.position_ids", torch.arange(10)[None], torch.arange(10)[None] + 1),
        ("rope_embeddings.inv_freq", 100.0 ** -torch.arange(2.0).div(2), torch.ones(2)),
        ("embeddings.register_tokens", torch.zeros(1, 0, 32), torch.ones(1, 2, 32)),
    ],
)
def test_what_the_model_computes_itself_is_compared(tmp_path, name, right, wrong):
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    config = transformers.DINOv3ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=12, patch_size=4
    )  # fmt: skip
    transformers.DINOv3ViTModel(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: right.contiguous()}, file)
    formats.read_checkpoint(tmp_path)
    save_file(tensors | {name: wrong.contiguous()}, file)
    with pytest.raises(CheckpointError, match=f"{name} has other values than the model computes"):
        formats.read_checkpoint(tmp_path)
