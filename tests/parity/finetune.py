"""Fine-tuning at a larger size, with SGD, interpolated positions and a new head, beside timm's models and its
interpolation.
"""

import functools

import numpy as np
import torch

from tests.parity import engines, huggingface, timm_parts
from tests.parity.images import CLASSES, cifar, normalized

STEPS, BATCH, WARMUP, BEFORE, SIDE, PATCH = 200, 64, 20, 16, 32, 4
RATE, MOMENTUM, CLIP = 0.03, 0.9, 1.0


@functools.cache
def checkpoint() -> str:
    """A ViT that learned CIFAR-10 at `BEFORE` pixels, in timm's format: where all runs start."""
    config = huggingface.our_config()
    config.data.update(dict(image_size=BEFORE, pad=2))
    config.model.update(dict(name=f"ViT-S/{PATCH}", epsilon=1e-6))
    return engines.checkpoint_of(config)


def our_config():
    config = huggingface.our_config()
    config.data.image_size = SIDE
    config.model.update(dict(name=f"ViT-S/{PATCH}", epsilon=1e-6, init="vit", head_init="zeros"))
    config.init_from, config.init_resize = checkpoint(), "torch"
    config.duration, config.batch_size = f"{STEPS} steps", BATCH
    config.optim.update(dict(name="sgd", b1=MOMENTUM, lr=RATE, schedule="cosine", clip=CLIP))
    config.optim.update(dict(warmup=f"{WARMUP} steps", weight_decay=0.0))
    return config


def ours(seed: int) -> dict[str, np.ndarray]:
    named = {"loss": "loss", "accuracy": "eval/accuracy"}
    return engines.train_ours(our_config(), seed, named)


def theirs(seed: int) -> dict[str, np.ndarray]:
    import safetensors.torch

    torch.manual_seed(seed)
    transformer = timm_parts.part("models.vision_transformer")
    model = transformer.VisionTransformer(
        SIDE, PATCH, num_classes=CLASSES, embed_dim=huggingface.WIDTH, depth=huggingface.DEPTH,
        num_heads=huggingface.HEADS,
    )  # fmt: skip
    weights = safetensors.torch.load_file(checkpoint())
    weights = transformer.checkpoint_filter_fn(weights, model)
    model.load_state_dict(weights)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    images, labels = cifar("test")
    return engines.train_theirs(
        model,
        huggingface.batches(seed),
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM),
        engines.cosine(RATE, WARMUP, STEPS),
        steps=STEPS,
        evaluate=engines.accuracy_of(normalized(images), torch.from_numpy(labels)),
        clip=CLIP,
    )
