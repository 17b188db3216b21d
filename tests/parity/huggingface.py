"""ViT as transformers has it, trained as its Trainer does, on CIFAR-10."""

import numpy as np
import torch

from tests.parity import engines
from tests.parity.images import CIFAR, CLASSES, cifar, normalized
from vit_jax.config import default_config

STEPS, BATCH, WARMUP, SIDE, PATCH, PAD = 200, 64, 20, 32, 8, 4
WIDTH, DEPTH, HEADS = 48, 2, 4
RATE, DECAY, CLIP, EPSILON = 2e-3, 0.05, 1.0, 1e-12
# Of the Trainer: what has no decay are biases and norms, so that positions and the class token have it.
DECAYING = ((".*(kernel|token|position)", 1.0),)
_SIZES = dict(
    hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
    intermediate_size=4 * WIDTH, image_size=SIDE, patch_size=PATCH,
)  # fmt: skip


def our_config():
    config = default_config()
    config.data.update(dict(name="tar", path=str(CIFAR), image_size=SIDE))
    config.data.update(dict(train_crop="pad", pad=PAD, eval_crop="resize"))
    config.model.update(dict(name=f"ViT-S/{PATCH}", width=WIDTH, depth=DEPTH, heads=HEADS))
    config.model.update(dict(mlp_dim=4 * WIDTH, activation="gelu", epsilon=EPSILON))
    config.model.update(dict(init="deit", head_init="normal"))
    config.duration, config.batch_size = f"{STEPS} steps", BATCH
    config.optim.update(dict(lr=RATE, warmup=f"{WARMUP} steps", schedule="linear"))
    config.optim.update(dict(weight_decay=DECAY, weight_decay_rules=DECAYING, clip=CLIP))
    return config


def ours(seed: int) -> dict[str, np.ndarray]:
    named = {"loss": "loss", "accuracy": "eval/accuracy"}
    return engines.train_ours(our_config(), seed, named)


def theirs(seed: int) -> dict[str, np.ndarray]:
    import transformers

    torch.manual_seed(seed)
    options = transformers.ViTConfig(num_labels=CLASSES, layer_norm_eps=EPSILON, **_SIZES)
    model = transformers.ViTForImageClassification(options)
    # As DeiT's code, which ours is drawn like: transformers draws it with a standard deviation of 0.02 here too.
    model.vit.embeddings.patch_embeddings.projection.reset_parameters()
    optimizer = torch.optim.AdamW(engines.split_by_decay(model, DECAY, lambda name: False), lr=RATE)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
    images, labels = cifar("test")
    judge = engines.accuracy_of(normalized(images), torch.from_numpy(labels))
    return engines.train_theirs(
        model,
        batches(seed),
        lambda model, batch: model(batch[0], labels=batch[1]).loss,
        optimizer,
        lambda made: RATE * scheduler.lr_lambdas[0](made),
        steps=STEPS,
        evaluate=lambda model: judge(lambda part: model(part).logits),
        clip=CLIP,
    )


def batches(seed: int):
    """Images (B, 3, H, W), moved by up to `PAD` pixels and mirrored, and labels (B,)."""
    images, labels = cifar("train")
    random = np.random.default_rng(seed)
    padded = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    for chosen in engines.epochs(len(images), BATCH, random):
        places = random.integers(0, 2 * PAD + 1, (BATCH, 2))
        parts = [padded[n, i : i + SIDE, j : j + SIDE] for n, (i, j) in zip(chosen, places, strict=True)]  # fmt: skip
        parts = [x[:, ::-1] if random.random() < 0.5 else x for x in parts]
        yield normalized(np.stack(parts)), torch.from_numpy(labels[chosen])
