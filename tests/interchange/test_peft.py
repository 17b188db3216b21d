"""Adapters in peft's layout, against transformers' own modules: what peft adds to them, and what ours compute. All
kinds of towers are in `test_round_trips`.
"""

import copy
import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vit_jax
from tests import lazily
from tests.models import oracles
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats
from vit_jax.interchange.peft import CONFIG, WEIGHTS
from vit_jax.models import classifier, lora

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
    "num_labels": 3,
}  # fmt: skip
MODELS = {
    "vit": ("ViTConfig", "ViTForImageClassification", {"intermediate_size": 24}),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", {}),
}  # fmt: skip
LAYERS = (
    "encoder/.*/query", "encoder/.*/value", "encoder/.*attention/out", "encoder/.*mlp/up", "encoder/.*mlp/down"
)  # fmt: skip
IMAGES = np.random.default_rng(0).standard_normal((2, 32, 32, 3), np.float32)


def of_transformers(name: str) -> tuple[type, type, dict]:
    """Classes of the config and of the model, and what the config is given."""
    config, model, options = MODELS[name]
    return getattr(transformers, config), getattr(transformers, model), options


@pytest.fixture(scope="module", params=MODELS)
def base(request, tmp_path_factory):
    """A folder of transformers, and its class."""
    config, model, options = of_transformers(request.param)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    model(config(**SIZES, **options)).save_pretrained(folder)
    return str(folder), model


def with_adapters(base: str, path) -> str:
    """An adapted model in peft's layout: the adapters and the head are random."""
    checkpoint, random = formats.read_checkpoint(base), np.random.default_rng(1)
    found = lora.Adapters(3, LAYERS, (classifier.HEADS,))
    params = jax.tree.map(np.asarray, checkpoint.params)
    frozen, trained = found.split(params)
    noise = lambda x: 0.3 * random.standard_normal(x.shape, np.float32)  # noqa: E731
    trained = jax.tree.map(noise, trained | {"adapters": found.init(params, jax.random.key(0))})
    whole = lora.whole(frozen, trained)
    heads = [name for name in patterns.names(params) if name.startswith("head")]
    unmerged = formats.Unmerged(trained["adapters"], tuple(heads), base)
    checkpoint = dataclasses.replace(checkpoint, params=whole, adapters=unmerged, layout={})
    formats.write_checkpoint(checkpoint, path, "peft")
    merged = dataclasses.replace(checkpoint, adapters=None)
    formats.write_checkpoint(merged, f"{path}_merged", "orbax")
    return str(path)


def stated(folder: str) -> dict:
    return json.loads(pathlib.Path(folder, CONFIG).read_text())


def state(folder: str, said: dict) -> None:
    pathlib.Path(folder, CONFIG).write_text(json.dumps(said))


def as_peft_does(model, folder: str) -> None:
    """Adds alpha / r times B A to the modules that a folder of peft's names; of DoRA, rows get their magnitudes."""
    said, tensors = stated(folder), load_file(f"{folder}/{WEIGHTS}")
    tensors = {
        name.removeprefix("base_model.model."): torch.tensor(x) for name, x in tensors.items()
    }
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        path = name.removesuffix(".lora_A.weight")
        module, a = model.get_submodule(path), tensors.pop(name)
        alphas = said["alpha_pattern"].items()
        alpha = next((x for end, x in alphas if path.endswith(end)), said["lora_alpha"])
        rank = len(a) ** 0.5 if said.get("use_rslora") else len(a)
        module.weight.data += alpha / rank * tensors.pop(name.replace("lora_A", "lora_B")) @ a
        magnitudes = tensors.pop(f"{path}.lora_magnitude_vector", None)
        if magnitudes is not None:
            lengths = torch.linalg.norm(module.weight, dim=1)
            module.weight.data *= (magnitudes / lengths)[:, None]
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys


def logits_of(model) -> np.ndarray:
    """In float64, so that the rounding in a comparison is ours alone."""
    x = torch.tensor(IMAGES.transpose(0, 3, 1, 2)).double()
    with torch.no_grad():
        return copy.deepcopy(model).double().eval()(x).logits.numpy()


def test_transformers_computes_the_same_with_our_adapters(base, tmp_path):
    path, model = base
    folder = with_adapters(path, tmp_path / "peft")
    theirs = model.from_pretrained(path)
    unadapted = logits_of(theirs)
    as_peft_does(theirs, folder)
    merged = vit_jax.load(f"{folder}_merged")
    oracles.assert_close(merged(IMAGES).logits, logits_of(theirs))
    assert np.abs(unadapted - logits_of(theirs)).max() > 0.1
    said = stated(folder)
    assert said["modules_to_save"] == ["classifier"] and said["base_model_name_or_path"] == path
    assert said["target_modules"] == ["fc1", "fc2", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize("old_names", [False, True], ids=["transformers 5", "transformers 4"])
def test_what_peft_wrote_is_read_as_the_whole_model(tmp_path, old_names):
    config, model, options = of_transformers("vit")
    torch.manual_seed(0)
    model(config(**SIZES, **options)).save_pretrained(tmp_path / "base")
    folder = with_adapters(str(tmp_path / "base"), tmp_path / "peft")
    said = stated(folder) | {"lora_alpha": 6}
    state(folder, said)
    theirs = model.from_pretrained(tmp_path / "base")
    as_peft_does(theirs, folder)
    if old_names:
        tensors = load_file(f"{folder}/{WEIGHTS}")
        for new, old in {
            "vit.layers.": "vit.encoder.layer.", "attention.q_proj": "attention.attention.query",
            "attention.v_proj": "attention.attention.value", "attention.o_proj": "attention.output.dense",
            "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
        }.items():  # fmt: skip
            tensors = {name.replace(new, old): x for name, x in tensors.items()}
        save_file(tensors, f"{folder}/{WEIGHTS}")
    ours = vit_jax.load(folder)
    oracles.assert_close(ours(IMAGES).logits, logits_of(theirs))


def test_dora_and_ranks_that_differ_are_read_with_a_head_for_a_base_that_has_none(tmp_path):
    """What peft 0.21 writes for a DINOv2 of transformers, whose classifier reads the class token beside the mean."""
    torch.manual_seed(0)
    model = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**SIZES))
    model.dinov2.save_pretrained(tmp_path / "base")
    random, tensors = np.random.default_rng(1), {}
    draw = lambda *shape: 0.3 * random.standard_normal(shape, np.float32)  # noqa: E731
    for layer in range(2):
        for module, shape, rank in (
            ("attention.q_proj", (16, 16), 3), ("attention.v_proj", (16, 16), 2), ("mlp.fc2", (16, 64), 2)
        ):  # fmt: skip
            at = f"base_model.model.dinov2.encoder.layer.{layer}.{module}"
            tensors |= {
                f"{at}.lora_A.weight": draw(rank, shape[1]),
                f"{at}.lora_B.weight": draw(shape[0], rank),
                f"{at}.lora_magnitude_vector": 1 + np.abs(draw(shape[0])),
            }
    head = {"classifier.weight": draw(3, 32), "classifier.bias": draw(3)}
    tensors |= {f"base_model.model.{name}": x for name, x in head.items()}
    (tmp_path / "peft").mkdir()
    save_file(tensors, tmp_path / "peft" / WEIGHTS)
    said = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True, "use_rslora": True,
        "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"attention.v_proj": 6},
        "modules_to_save": ["classifier"], "base_model_name_or_path": str(tmp_path / "base"),
    }  # fmt: skip
    state(tmp_path / "peft", said)
    as_peft_does(model, tmp_path / "peft")
    found = vit_jax.load(tmp_path / "peft")
    assert (found.config.pool, found.config.num_classes) == ("token_mean", 3)
    oracles.assert_close(found(IMAGES).logits, logits_of(model))
    state(tmp_path / "peft", said | {"init_lora_weights": "pissa"})
    with pytest.raises(CheckpointError, match="init_lora_weights = 'pissa' .*merge_and_unload"):
        formats.read_checkpoint(tmp_path / "peft")


def test_what_is_no_plain_adapter_is_refused_by_name(base, tmp_path):
    path, _ = base
    with pytest.raises(CheckpointError, match="lora.lora_rank"):
        formats.write_checkpoint(formats.read_checkpoint(path), tmp_path / "whole", "peft")
    assert not (tmp_path / "whole").exists()
    folder = with_adapters(path, tmp_path / "peft")
    said = stated(folder)
    for field, value in {
        "use_dora": True,
        "base_model_name_or_path": None,
        "peft_type": "LOHA",
    }.items():
        state(folder, said | {field: value})
        with pytest.raises(CheckpointError, match=field):
            formats.read_checkpoint(folder)
    tensors = load_file(f"{folder}/{WEIGHTS}")
    state(folder, said)
    save_file(
        {name.replace("q_proj", "z_proj"): x for name, x in tensors.items()}, f"{folder}/{WEIGHTS}"
    )
    with pytest.raises(CheckpointError, match="z_proj|classifier"):
        formats.read_checkpoint(folder)
