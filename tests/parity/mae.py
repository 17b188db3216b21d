"""A masked autoencoder on CIFAR-10 beside transformers' `ViTMAEForPreTraining` in a plain loop."""

import math
import random

import numpy as np
import PIL.Image
import torch

from tests.parity import engines, timm_parts
from tests.parity.images import CIFAR, cifar
from tests.parity.timm_parts import MEAN, STD
from vit_jax.config import default_config

STEPS, BATCH, WARMUP, SIDE, PATCH = 200, 64, 20, 32, 4
WIDTH, DEPTH, HEADS = 64, 3, 4
DECODER = dict(width=32, depth=1, heads=4)
RATE, DECAY, BETA, EPSILON = 2e-3, 0.05, 0.95, 1e-6
AREA = (0.2, 1.0)
# Of the authors' code: what has no decay are biases and norms.
DECAYING = ((".*(kernel|token|mask)", 1.0),)


def our_config():
    config = default_config()
    config.data.update(dict(name="tar", path=str(CIFAR), image_size=SIDE, crop_area=AREA))
    config.data.update(dict(interpolation="bicubic", eval_crop="resize", mean=MEAN, std=STD))
    config.objective.update(dict(name="mae") | DECODER)
    config.model.update(dict(name=f"ViT-S/{PATCH}", width=WIDTH, depth=DEPTH, heads=HEADS))
    config.model.update(dict(mlp_dim=4 * WIDTH, activation="gelu", position="fixed2d"))
    config.model.update(dict(epsilon=EPSILON))
    config.duration, config.batch_size = f"{STEPS} steps", BATCH
    config.optim.update(dict(lr=RATE, warmup=f"{WARMUP} steps", b2=BETA, clip=0.0))
    config.optim.update(dict(weight_decay=DECAY, weight_decay_rules=DECAYING))
    return config


def ours(seed: int) -> dict[str, np.ndarray]:
    return engines.train_ours(our_config(), seed, {"loss": "loss", "held_out": "eval/loss"})


def theirs(seed: int) -> dict[str, np.ndarray]:
    random.seed(seed)
    torch.manual_seed(seed)
    model = _model()
    tests = timm_parts.prepared([PIL.Image.fromarray(x) for x in cifar("test")[0]])

    def held_out(model) -> dict[str, float]:
        return {"held_out": float(np.mean([model(part).loss for part in tests.split(200)]))}

    return engines.train_theirs(
        model,
        _batches(seed),
        lambda model, images: model(images).loss,
        torch.optim.AdamW(
            engines.split_by_decay(model, DECAY, lambda name: False), lr=RATE, betas=(0.9, BETA)
        ),
        engines.cosine(RATE, WARMUP, STEPS),
        steps=STEPS,
        evaluate=held_out,
    )


def _model() -> torch.nn.Module:
    import transformers

    options = transformers.ViTMAEConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, image_size=SIDE, patch_size=PATCH, layer_norm_eps=EPSILON,
        norm_pix_loss=True, decoder_hidden_size=DECODER["width"],
        decoder_num_hidden_layers=DECODER["depth"], decoder_num_attention_heads=DECODER["heads"],
        decoder_intermediate_size=4 * DECODER["width"],
    )  # fmt: skip
    model = transformers.ViTMAEForPreTraining(options)
    # As the authors' code: transformers 5.24 draws all layers with a standard deviation of 0.02. There queries, keys
    # and values are one layer.
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            outputs, inputs = layer.weight.flatten(1).shape
            joined = name.endswith(("q_proj", "k_proj", "v_proj"))
            bound = math.sqrt(6 / (inputs + (3 if joined else 1) * outputs))
            torch.nn.init.uniform_(layer.weight, -bound, bound)
    # It also leaves fixed positions and tokens at zero, where the authors' code has sinusoids and draws tokens.
    embeddings, decoder = model.vit.embeddings, model.decoder
    for positions in (embeddings.position_embeddings, decoder.decoder_pos_embed):
        positions.data[0, 1:] = torch.from_numpy(_sinusoids(SIDE // PATCH, positions.shape[-1]))
    for token in (embeddings.cls_token, decoder.mask_token):
        torch.nn.init.normal_(token, std=0.02)
    return model.train()


def _sinusoids(side: int, width: int) -> np.ndarray:
    """(side², width): of the column and then of the row, sines and cosines of its products with 10000^(-4k / width)."""
    angles = np.outer(np.arange(side), 10_000 ** (-4 * np.arange(width // 4) / width))
    of_place = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    rows, columns = np.divmod(np.arange(side**2), side)
    return np.concatenate([of_place[columns], of_place[rows]], axis=1).astype(np.float32)


def _batches(seed: int):
    """Images (B, 3, H, W)."""
    images, _ = cifar("train")
    for chosen in engines.epochs(len(images), BATCH, np.random.default_rng(seed)):
        parts = [PIL.Image.fromarray(images[i]) for i in chosen]
        yield timm_parts.prepared([timm_parts.cropped(x, AREA, SIDE) for x in parts])
