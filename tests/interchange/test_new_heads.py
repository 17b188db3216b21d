"""Fine-tuned DINOv2, DINOv3, SigLIP and CLIP with a new head, written for transformers: the same logits
there, or a sentence that names what to do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.interchange.test_dinov2 import drawn, written_and_answered
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange import formats, loading

CLIP = dict(
    layer_scale="none", pre_norm=True, patch_bias=False, activation="quick_gelu", epsilon=1e-5
)
SIGLIP = dict(layer_scale="none", activation="gelu_tanh")
DINOV3 = dict(
    rope="centred", rope_theta=100.0, position="none", registers=2, key_bias=False, epsilon=1e-5
)
CLIP_MEAN = CLIP | dict(pool="mean", keep_class_token=True, last_norm="none")
# The class of transformers, options, and what is compared.
WRITTEN = {
    "class token": ("Dinov2ForImageClassification", dict(num_classes=3), "logits"),
    "registers": ("Dinov2WithRegistersForImageClassification", dict(num_classes=3, registers=3), "logits"),
    "mean": (
        "Dinov2ForImageClassification",
        dict(num_classes=3, pool="mean", keep_class_token=True, position_of_class=False),
        "logits",
    ),
    "SigLIP": ("SiglipForImageClassification", SIGLIP | dict(num_classes=3, pool="mean"), "logits"),
    "CLIP": ("CLIPForImageClassification", CLIP_MEAN | dict(num_classes=3), "logits"),
    "SigLIP without": ("SiglipVisionModel", SIGLIP | dict(pool="map"), "features"),
    "CLIP without": ("CLIPVisionModel", CLIP | dict(last_norm="pooled"), "features"),
    "DINOv3 without": ("DINOv3ViTModel", DINOV3, "features"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_has_the_same_answer(name, tmp_path):
    kind, options, what = WRITTEN[name]
    definition, checkpoint = drawn(**options)
    images, answer = written_and_answered(checkpoint, tmp_path / "out", kind)
    expected = answer.logits if what == "logits" else answer.pooler_output
    weights = jax.tree.map(jnp.asarray, (checkpoint.params, checkpoint.variables))
    ours = getattr(nnx.merge(definition, *weights)(jnp.asarray(images)), what)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    # The folder is read again as the same function.
    again = formats.read_checkpoint(tmp_path / "out")
    if kind.startswith("Dinov2"):
        assert again.model_config.pool == "token_mean"
    elif what == "features" or "position_of_class" in options:
        assert again.model_config == checkpoint.model_config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (DINOV3 | dict(num_classes=3), "no classifier with DINOv3's network; .* --to=timm"),
        (
            CLIP | dict(num_classes=3, last_norm="pooled"),
            "CLIP with a head reads pool='mean' and last_norm='none' .* fine-tune with these; .* --to=timm",
        ),
        (
            SIGLIP | dict(num_classes=3, pool="map"),
            "SigLIP with a head reads pool='mean', this model pool='map' .*; .* --to=timm",
        ),
    ],
    ids=["DINOv3", "CLIP", "SigLIP"],
)
def test_a_head_that_transformers_has_not_is_refused_and_timm_takes_it(options, words, tmp_path):
    _, checkpoint = drawn(**options)
    with pytest.raises(CheckpointError, match=words):
        formats.write_checkpoint(checkpoint, tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()
    formats.write_checkpoint(checkpoint, tmp_path / "timm", "timm")
    found, config = formats.read_checkpoint(tmp_path / "timm").model_config, checkpoint.model_config
    assert (found.num_classes, found.pool, found.rope) == (3, config.pool, config.rope)


def test_a_run_that_fine_tuned_dinov2_is_converted(tmp_path):
    _, checkpoint = drawn(num_classes=3)
    formats.write_checkpoint(checkpoint, tmp_path / "run", "orbax")
    loading.convert(tmp_path / "run", tmp_path / "out", "huggingface")
    config = formats.read_checkpoint(tmp_path / "out").model_config
    assert (config.num_classes, config.pool) == (3, "token_mean")
