"""The text towers of SigLIP and CLIP against transformers: the same vectors, and read back by transformers when they
are written.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests import lazily
from vit_jax.interchange import checkpoint_file, formats, saved_objectives
from vit_jax.models import registry
from vit_jax.objectives.contract import ObjectiveContext
from vit_jax.objectives.image_text.image_text import ImageText, ImageTextOptions

torch = lazily.Package("torch")
transformers = lazily.Package("transformers")

VISION = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=12, patch_size=4, intermediate_size=48,
)  # fmt: skip
TEXT = dict(
    num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, vocab_size=30, max_position_embeddings=8,
    bos_token_id=28, eos_token_id=29, pad_token_id=1,
)  # fmt: skip
KINDS = {
    "siglip": ("Siglip", dict(hidden_size=24, projection_size=32), {}),
    "clip": ("CLIP", dict(hidden_size=24), dict(projection_dim=16)),
    "clip with gelu": ("CLIP", dict(hidden_size=24, hidden_act="gelu"), dict(projection_dim=16)),
}


def build(kind, vision=VISION, **changes):
    """A model of transformers with weights that hide nothing; `changes`: of its text tower's config."""
    name, text, fields = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=TEXT | text | changes, **fields
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            around = 1 if "norm" in parameter_name and parameter_name.endswith("weight") else 0
            parameter.copy_(around + 0.3 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_both_towers_are_those_of_transformers(kind, tmp_path):
    theirs, random = build(kind), np.random.default_rng(0)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = formats.read_checkpoint(tmp_path / "theirs")
    saved = saved_objectives.find_saved(checkpoint, ImageText)
    options = ImageTextOptions(**saved.options)
    config = checkpoint.model_config
    objective = ImageText(options, ObjectiveContext(config, (), (), total_steps=1, to_steps=int))
    own = nnx.eval_shape(lambda: objective.make_modules(nnx.Rngs(0)))
    own = nnx.merge(registry.split(own)[0], *jax_arrays(saved.read()))
    definition = registry.abstract(config)[0]
    model = nnx.merge(definition, jax_arrays(checkpoint.params), {})

    pixels = random.normal(size=(3, 12, 12, 3)).astype(np.float32)
    tokens = random.integers(0, 28, (3, 8))
    tokens[:, 5] = 29  # the end; what follows counts for SigLIP alone
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), torch.tensor(pixels).permute(0, 3, 1, 2))

    @jax.jit
    def vectors(pixels, tokens):
        return objective.image_vectors(own, model(pixels)), objective.text_vectors(own, tokens)

    images, texts = vectors(pixels, tokens.astype(np.int32))
    np.testing.assert_allclose(images, expected.image_embeds, atol=1e-5)
    np.testing.assert_allclose(texts, expected.text_embeds, atol=1e-5)
    logits = np.exp(float(own.temperature[...])) * np.asarray(images) @ np.asarray(texts).T
    logits += 0 if own.bias is None else float(own.bias[...])
    np.testing.assert_allclose(logits, expected.logits_per_image, atol=1e-4)

    checkpoint.objective, checkpoint.extras, checkpoint.layout = saved, {}, {}
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "huggingface")
    again = type(theirs).from_pretrained(tmp_path / "ours").state_dict()
    assert again.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, again[name]), name


def test_open_clips_config_beside_a_file_says_the_activation_and_heads_of_both_towers(tmp_path):
    theirs = build("clip with gelu", vision=VISION | dict(hidden_act="gelu"))
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = formats.read_checkpoint(tmp_path / "theirs")
    formats.write_checkpoint(checkpoint, tmp_path / "ours.safetensors", "authors")
    file = tmp_path / "open_clip_model.safetensors"
    tensors = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    safetensors.numpy.save_file(tensors, file)  # without what our file says for itself
    towers = {"vision_cfg": {"head_width": 8}, "text_cfg": {"heads": 2}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": towers}))
    read = formats.read_checkpoint(file)
    saved = saved_objectives.find_saved(read, ImageText)
    assert (read.model_config.activation, read.model_config.heads) == ("gelu", 4)
    assert (saved.options["text_activation"], saved.options["text_heads"]) == ("gelu", 2)
    towers["quick_gelu"] = True
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": towers}))
    checkpoint_file.forget()
    read = formats.read_checkpoint(file)
    saved = saved_objectives.find_saved(read, ImageText)
    assert (read.model_config.activation, saved.options["text_activation"]) == ("quick_gelu", "")


def jax_arrays(tree):
    import jax

    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)
