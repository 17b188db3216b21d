"""What models are called: no name without its options."""

import re

import pytest

import vit_jax
from tests.integration.conftest import TINY
from vit_jax.checkpoints import reading
from vit_jax.interchange import formats
from vit_jax.models import naming, registry
from vit_jax.planning.dry_run import dry_run


@pytest.mark.parametrize("name", registry.variants())
def test_a_listed_model_has_its_name(name):
    assert naming.full_name(registry.model_config(name)) == name


OTHERS = {
    "ViT-S/4": ("ViT-S/4", {}),
    "ViT-B/16 with depth 6 and heads 8": ("ViT-B/16", {"depth": 6, "heads": 8}),
    "ViT-mu/16 with depth 4, width 64, mlp_dim 256 and heads 4": (
        "ViT-B/16", {"width": 64, "depth": 4, "heads": 4, "mlp_dim": 256},
    ),
    "Mixer-S/4 with width 64": ("Mixer-S/4", {"width": 64}),
    "R26+ViT-S/32 with depth 2": ("R26+ViT-S/32", {"depth": 2}),
    "EfficientNet-B0 with width_factor 0.5": ("EfficientNet-B0", {"width_factor": 0.5}),
    "T2T-ViT-14 with depth 3": ("T2T-ViT-14", {"depth": 3}),
    "CrossViT-18 with heads 4": ("CrossViT-18", {"heads": 4}),
    "DeiT-B/16": ("ViT-B/16", {"activation": "gelu"}),
    # What no DeiT has.
    "ViT-S/16": ("ViT-S/16", {"activation": "gelu", "registers": 4}),
}  # fmt: skip


@pytest.mark.parametrize("expected, model", OTHERS.items(), ids=OTHERS)
def test_another_model_has_the_nearest_name_and_what_differs(expected, model):
    name, options = model
    config = registry.model_config(name, **options)
    assert naming.full_name(config) == expected
    called = naming.full_name(config, called=name)
    assert called == (name if not naming.differences(config, name) else expected)


def test_one_of_dinov3s_structure_is_called_so_whatever_its_run_calls_it():
    options = {"activation": "gelu", "rope": "centred", "position": "none", "layer_scale": "all"}
    config = registry.model_config("ViT-S/16", **options)
    for called in ("", "ViT-S/16"):
        assert naming.full_name(config, called) == "DINOv3 ViT-S/16"
    assert naming.nearest_name(config) == "ViT-S/16"  # what makes it, with those options


def test_the_digits_recipe_with_a_large_name_says_that_its_model_is_small():
    config = vit_jax.load_config("configs/digits.py")
    config.model.name = "ViT-B/16"
    result, recipe = dry_run(config, None)
    assert "ViT-B/16" not in result["model"] and "ViT-mu/16 with depth 4" in recipe


@pytest.mark.parametrize(
    "name, options",
    [pytest.param("ViT-mu/8", {}, marks=pytest.mark.slow), ("ViT-mu/8", {"heads": 4})],
)
def test_what_is_trained_from_a_run_and_made_of_it_keeps_its_name(command, name, options, tmp_path):
    config = vit_jax.load_config("configs/digits.py")
    small = {f"model.{option}": None for option in ("width", "depth", "heads", "mlp_dim")}
    small |= {n: v for n, v in TINY.items() if not n.startswith("model.")}
    small |= {"model.name": name, "model.activation": "gelu", "duration": "1 steps"}
    small["eval.evaluators"] = ()
    small |= {f"model.{option}": value for option, value in options.items()}
    config.update_from_flattened_dict(small | {"compilation_cache": "", "log.tensorboard": False})
    vit_jax.train(config, tmp_path / "run")
    full = naming.full_name(registry.model_config(name, **options))
    kept = (tmp_path / "run" / "config.py").read_text()
    assert re.search(rf"model: {full}, [\d,]+ parameters", kept)

    _, shown, _ = command("show", tmp_path / "run")
    _, converted, _ = command("convert", tmp_path / "run", tmp_path / "m.safetensors", "--to=timm")
    assert f"{full}, " in shown and f"{full}, " in converted
    if not options:
        formats.write_checkpoint(
            formats.read_checkpoint(tmp_path / "run"), tmp_path / "again", "orbax"
        )
        again = reading.read_description(reading.find_checkpoint(tmp_path / "again"))
        assert again["config"]["model"]["name"] == name
    config.init_from, config.model.name = str(tmp_path / "run"), ""
    assert f"model: {full}, " in dry_run(config, None)[1]
