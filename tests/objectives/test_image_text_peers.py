"""Ten steps of SigLIP and of CLIP beside a loop of PyTorch on transformers' towers: the loss of the whole matrix of
pairs, AdamW, the same weights and batches.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import lazily
from tests.interchange.test_text_towers import KINDS, build
from vit_jax.config import default_config
from vit_jax.interchange import formats, saved_objectives
from vit_jax.models.registry import Weights
from vit_jax.objectives.image_text.image_text import ImageText
from vit_jax.objectives.networks import OWN, model_part
from vit_jax.training.assembly import assemble, resolve

torch = lazily.Package("torch")

STEPS, PAIRS = 10, 8
# With PyTorch's epsilon, what has no gradient, as the biases of keys, would move by rounding alone.
ADAM = dict(lr=1e-3, b1=0.9, b2=0.98, eps=1e-3)


def loss_of_pairs(kind, model, tokens, pixels):
    """As the papers write it: SigLIP, Eq. 1; CLIP, Fig. 3."""
    output = model(tokens, pixels)
    logits = model.logit_scale.exp() * output.image_embeds @ output.text_embeds.T
    if kind == "siglip":
        signs = 2 * torch.eye(PAIRS) - 1
        logits = logits + model.logit_bias
        return -torch.nn.functional.logsigmoid(signs * logits).sum() / PAIRS
    pairs, entropy = torch.arange(PAIRS), torch.nn.functional.cross_entropy
    return (entropy(logits, pairs) + entropy(logits.T, pairs)) / 2


def train_theirs(kind, model, batches):
    betas = (ADAM["b1"], ADAM["b2"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAM["lr"], betas=betas, eps=ADAM["eps"], weight_decay=0.1
    )
    losses = []
    for images, tokens in batches:
        pixels = torch.tensor(images).permute(0, 3, 1, 2) / 127.5 - 1
        loss = loss_of_pairs(kind, model, torch.tensor(tokens).long(), pixels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_ours(checkpoint, saved, batches):
    """Losses, and the parameters after them."""
    config = default_config()
    config.init_from, config.model.name, config.model.dtype = checkpoint.source, "", "float32"
    config.data.update(dict(name="pairs", image_size=12, mean=(0.5,) * 3, std=(0.5,) * 3))
    config.data.update(dict(train_crop="resize", interpolation="bicubic"))
    config.objective.update(dict(name="image_text", tokenizer="bytes") | saved.options)
    config.augment.flip = False
    config.optim.update(ADAM | dict(schedule="constant", clip=0.0, ema=0.0, weight_decay=0.1))
    config.optim.weight_decay_rules = ((".*", 1.0),)
    config.batch_size, config.duration = PAIRS, f"{STEPS} steps"
    assembly = assemble(resolve(config), num_classes=0, examples_per_epoch=100)
    state = jax.jit(assembly.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), checkpoint.params)
    own = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), saved.read().params)
    state = state.replace(params=params | {OWN: own})
    step, losses = jax.jit(assembly.train_step), []
    for images, tokens in batches:
        state, metrics = step(state, {"image": jnp.asarray(images), "tokens": jnp.asarray(tokens)})
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_are_those_of_pytorch(kind, tmp_path):
    theirs, random = build(kind, vocab_size=260), np.random.default_rng(0)
    theirs.save_pretrained(tmp_path / "theirs")
    batches = []
    for _ in range(STEPS):
        tokens = random.integers(2, 28, (PAIRS, 8)).astype(np.int32)
        tokens[:, 5] = 29
        batches.append((random.integers(0, 256, (PAIRS, 12, 12, 3), np.uint8), tokens))
    checkpoint = formats.read_checkpoint(tmp_path / "theirs")
    saved = saved_objectives.find_saved(checkpoint, ImageText)
    losses, params = train_ours(checkpoint, saved, batches)
    np.testing.assert_allclose(losses, train_theirs(kind, theirs, batches), rtol=1e-5)

    checkpoint.params, checkpoint.extras, checkpoint.layout = model_part(params), {}, {}
    weights = Weights(params[OWN], {})
    checkpoint.objective = dataclasses.replace(saved, read=lambda: weights)
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "huggingface")
    ours = type(theirs).from_pretrained(tmp_path / "ours").state_dict()
    for name, expected in theirs.state_dict().items():
        assert (ours[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name
