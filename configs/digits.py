"""A small ViT on scikit-learn's handwritten digits, shown at 32x32: the smoke test, a minute on two
CPU cores.

vit_jax train --config=configs/digits.py --workdir=/tmp/digits

Expect 99.2 % of the 359 test images in about 50 s (seeds 0, 1 and 2).
"""

from vit_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "digits"
    config.data.image_size = 32
    config.data.train_crop = "pad"
    config.data.pad = 4
    config.data.eval_crop = "resize"
    config.augment.flip = False  # A mirrored digit is another digit, or none.
    config.augment.mixup = 0.2
    config.model.name = "ViT-S/4"
    config.model.pool = "mean"
    config.model.width = 64
    config.model.depth = 4
    config.model.heads = 4
    config.model.mlp_dim = 256
    config.duration = "40 epochs"
    config.batch_size = 64
    config.optim.lr = 3e-3
    config.optim.warmup = "5%"
    config.optim.weight_decay = 0.05
    config.optim.ema = 0.995
    config.checkpoint.every = "200 steps"
    config.log.every = "50 steps"
    return config
