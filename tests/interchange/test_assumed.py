"""Values of a loaded model that no file contains are listed."""

import json

import numpy as np
import pytest

from tests.models import oracles
from vit_jax.interchange import checkpoint_file, formats, loading, summary
from vit_jax.models import registry

USUAL = {"mean", "std", "eval_crop", "eval_resize", "interpolation", "classes"}


def assumed(path, **overrides):
    checkpoint_file.forget()
    return summary.summarize(path, **overrides)["assumed"]


CASES = {
    "vt_vit_testing": {"activation", "epsilon"},
    "bv_vit_gap_learn": {"activation", "epsilon", "pool"},
    "bv_vit_map_sincos2d": {"activation", "epsilon", "image_size"},
    "vt_mixer_tiny": {"activation", "epsilon"},
    "bv_bit_tiny": {"image_size", "root_zeros", "epsilons"},
    "relatives/vit5_a": {"activation", "epsilon"},
    "relatives/ff_patch16": {"activation", "epsilon"},
    "relatives/deepvit_reattn": {"residual_scale", "scaled_maps"},
}
GRID = {"rope_grid": (4, 4)}  # which a file of ViT-5 is asked for


@pytest.mark.parametrize("name", CASES)
def test_what_neither_tensors_nor_header_contain_is_listed(shared_data, name):
    path, asked = shared_data / "oracle" / f"{name}.ckpt.npz", GRID if "vit5" in name else {}
    found = assumed(path, **asked)
    assert set(found) == CASES[name] | USUAL
    # Such a value can be set: with the same tensors, it is another model.
    config = formats.read_checkpoint(path, **asked).model_config
    assert all(found[option] == getattr(config, option) for option in CASES[name])
    changed = {"activation": "gelu", "epsilon": 1e-3, "image_size": 64, "pool": "first"}
    option = next((o for o in changed if o in CASES[name]), None)
    if option:
        changed["activation"] = "silu"
        assert option not in assumed(path, **asked, **{option: changed[option]})


def test_a_bare_file_of_timm_has_no_heads_and_its_config_json_has_them(tmp_path, shared_data):
    file = shared_data / "weights" / "deit_tiny_patch16_224_lnq.timm.safetensors"
    found = assumed(file)
    assert found["heads"] == 3 and "ImageNet-1k" in found["classes"]
    assert {"activation", "epsilon", "pool", "rope", "norm_after"} < set(found)
    assert not {"rope_theta", "map_heads", "width", "depth"} & set(found)
    (tmp_path / "model.safetensors").symlink_to(file)
    stated = {"architecture": "deit_tiny_patch16_224", "num_classes": 1000, "model_args": {}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert not {"heads", "activation", "epsilon", "pool"} & set(assumed(tmp_path))


def test_fields_that_config_json_lacks_are_listed(tmp_path):
    pytest.importorskip("transformers")
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=32, num_hidden_layers=1, intermediate_size=48, image_size=32)
    config = ViTConfig(**sizes, num_attention_heads=4, num_labels=2)
    ViTForImageClassification(config).save_pretrained(tmp_path)
    assert "heads" not in assumed(tmp_path)
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    for name in ("layer_norm_eps", "hidden_act"):
        stated.pop(name, None)
    path.write_text(json.dumps(stated))
    found = assumed(tmp_path)
    assert (found["epsilon"], found["activation"]) == (1e-12, "gelu") and "heads" not in found


def test_a_file_of_ours_contains_all_and_a_conversion_keeps_the_list(shared_data, tmp_path):
    path = oracles.relative_of(shared_data, "vit5_a")[0]
    before = assumed(path, **GRID)
    loading.convert(path, tmp_path / "run", "orbax", **GRID)
    assert assumed(tmp_path / "run") == before
    loading.convert(path, tmp_path / "a.safetensors", "authors", data={"mean": (0.5,) * 3}, **GRID)
    assert set(assumed(tmp_path / "a.safetensors")) == {"classes"}


def test_show_lists_them_and_takes_options(shared_data, command):
    path = oracles.relative_of(shared_data, "t2t_transformer")[0]
    code, _, err = command("show", path)
    assert code == 1 and "--model=heads=" in err and "--model=qk_scale=" in err
    code, out, _ = command("show", path, "--model=heads=4", "--model=qk_scale=0", "--json")
    found = json.loads(out)["assumed"]
    assert code == 0 and not {"heads", "qk_scale"} & set(found)
    assert np.isclose(found["epsilon"], 1e-5) and found["first_split"] == [7, 4, 2]
    _, out, _ = command("show", path, "--model=heads=4", "--model=qk_scale=0")
    assert "assumed       first_split (7, 4, 2), activation gelu, epsilon 1e-05" in out


def test_every_assumed_option_is_one_of_its_family(shared_data):
    for path in sorted((shared_data / "oracle").glob("*.ckpt.npz")):
        checkpoint = formats.read_checkpoint(path)
        options = set(registry.family_of(checkpoint.model_config).Config.__dataclass_fields__)
        assert set(checkpoint.assumed) - {"preprocessing"} <= options
