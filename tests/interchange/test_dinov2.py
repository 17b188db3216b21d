"""Models of DINOv2's structure written for transformers, wherever they come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, loading
from vit_jax.models import registry

MODELS = {
    "Dinov2Model": {},
    "Dinov2Model gated": {"gated_mlp": True, "activation": "silu", "mlp_dim": 88},
    "Dinov2ForImageClassification": {
        "num_classes": 3, "pool": "token_mean", "position_of_class": False, "qkv_bias": False,
    },
    "Dinov2WithRegistersModel": {"registers": 3, "position": "sincos2d"},
    "Dinov2WithRegistersForImageClassification": {
        "registers": 3, "num_classes": 3, "pool": "token_mean",
    },
}  # fmt: skip


def drawn(**options):
    """A model's definition, and a checkpoint of it with weights that hide nothing."""
    sizes = dict(image_size=12, num_classes=0, width=32, depth=2, heads=4, mlp_dim=64)
    sizes |= dict(layer_scale="all", activation="gelu")
    config = registry.model_config("ViT-mu/4", **sizes | options)
    random, (definition, weights) = np.random.default_rng(0), registry.abstract_weights(config)
    params = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), weights[0])
    return definition, formats.LoadedCheckpoint(config, params, variables=weights.variables)


def written_and_answered(checkpoint, folder, name):
    """Images, and what the class `name` of transformers makes of them with a checkpoint written for it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    formats.write_checkpoint(checkpoint, folder, "huggingface")
    theirs, report = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    # Only those with registers always have it, and use it where something is masked.
    assert all(key.endswith("mask_token") for key in report["missing_keys"])
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    images = np.random.default_rng(1).normal(size=(2, 12, 12, 3)).astype(np.float32)
    with torch.no_grad():
        return images, theirs.eval()(torch.from_numpy(images).permute(0, 3, 1, 2))


@pytest.mark.parametrize("name", MODELS)
def test_transformers_has_the_same_answer(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    definition, checkpoint = drawn(**MODELS[name])
    images, answer = written_and_answered(checkpoint, tmp_path / "out", name.split()[0])
    weights = jax.tree.map(jnp.asarray, (checkpoint.params, checkpoint.variables))
    ours = nnx.merge(definition, *weights)(jnp.asarray(images))
    if checkpoint.model_config.num_classes:
        found, expected = ours.logits, answer.logits
    else:
        # Theirs keep the registers among the tokens.
        of_theirs = answer.last_hidden_state.numpy()
        found, expected = ours.features, of_theirs[:, 0]
        np.testing.assert_allclose(ours.tokens[:, -9:], of_theirs[:, -9:], atol=1e-5)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # By way of timm, which has no place for a position of the class token beside registers.
    if not checkpoint.model_config.num_classes and not checkpoint.model_config.gated_mlp:
        loading.convert(tmp_path / "out", tmp_path / "timm.safetensors", "timm")
        loading.convert(tmp_path / "timm.safetensors", tmp_path / "back", "huggingface")
        again = getattr(transformers, name).from_pretrained(tmp_path / "back").eval()
        with torch.no_grad():
            tokens = again(torch.from_numpy(images).permute(0, 3, 1, 2)).last_hidden_state
        np.testing.assert_array_equal(tokens, of_theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 3, "pool": "map"}, "DINOv2 has no pool='map' with a head; .*--to=timm"),
        ({"mlp_dim": 72}, "no mlp_dim=72 with activation='gelu'"),
        ({"gated_mlp": True, "mlp_dim": 88}, "no mlp_dim=88 with activation='gelu'"),
        ({"norm": "rms"}, "no norm='rms'"),
    ],
)
def test_what_transformers_has_not_is_not_written(options, message, tmp_path):
    _, checkpoint = drawn(**options)
    with pytest.raises(CheckpointError, match=message):
        formats.write_checkpoint(checkpoint, tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()
