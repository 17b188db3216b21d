"""ViT-S/16 on ImageNet, done plainly and well ("Better plain ViT baselines for ImageNet-1k", arXiv
2205.01580).

vit_jax train --config=configs/vit_s16_i1k.py:90 --workdir=DIR
    90, 150 or 300 epochs.

Expect 76.5, 78.5 and 80.0 % top-1 on ImageNet's validation set; 90 epochs take 6 to 7 hours on 8
TPUv3 cores. And after 90 epochs 73.6 without RandAugment and mixup, 74.7 with batches of 4,096,
75.0 with learned positions, 75.0 with a class token, 76.7 with a linear head.

The last 1 % of the training images is held out for choosing
(--config.data.eval_split='train[99%:]').
"""

from vit_jax import recipes
from vit_jax.config import default_config


def get_config(arg="90"):
    (epochs,) = recipes.arguments(arg, epochs=("90", "150", "300"))
    config = default_config()
    config.data.name = "imagenet2012"
    config.data.train_split = "train[:99%]"
    config.data.eval_split = "validation"
    config.augment.randaugment_layers = 2
    config.augment.randaugment_magnitude = 10.0
    config.augment.mixup = 0.2
    config.model.name = "ViT-S/16"
    config.model.num_classes = 1000
    config.model.pool = "mean"
    config.model.position = "sincos2d"
    config.model.representation = recipes.width("S/16")
    config.model.dtype = "bfloat16"
    config.objective.loss = "softmax"
    config.duration = f"{epochs} epochs"
    config.batch_size = 1024
    config.optim.lr = 1e-3
    config.optim.schedule = "cosine"
    config.optim.warmup = "10000 steps"
    config.optim.moment_dtype = "bfloat16"
    config.optim.weight_decay = 1e-4  # Not multiplied by the learning rate: 0.1 as papers write it.
    config.optim.weight_decay_by = "schedule"
    config.optim.clip = 1.0
    config.eval.every = "5 epochs"
    return config
