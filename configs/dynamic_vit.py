"""Dynamic Vision Transformers on ImageNet ("Not All Images are Worth 16x16 Words", arXiv 2105.15075).

vit_jax train --config=configs/dynamic_vit.py:DeiT-S --workdir=DIR
    T2T-12, T2T-14 or DeiT-S: three of these networks, which see 7 x 7, 10 x 10 and 14 x 14 tokens.
    Without reuse: --config.model.feature_reuse=False --config.model.relation_reuse=False; two exits:
    --config.model.grids=7,14.
vit_jax train --config=configs/dynamic_vit.py:smoke --workdir=/tmp/dvt
    A small one on scikit-learn's handwritten digits, with 2 x 2, 4 x 4 and 8 x 8 tokens:
    96.9 to 98.1 % of the 359 test images at the last exit (seed 0: it depends on roundings).

Expect, ImageNet top-1 % of T2T-12 at its exits (G multiply-adds), by what is reused:
    none       70.33 (0.47)  73.54 (1.37)  76.74 (3.15)
    features   69.42 (0.47)  75.31 (1.43)  79.21 (3.31)
    relations  69.03 (0.47)  75.34 (1.41)  78.86 (3.34)
    both       69.04 (0.47)  75.65 (1.46)  80.00 (3.50)
and where images leave early, on average 76.22 at 1.0 G and 79.75 at 2.0 G; T2T-14 79.24 at 2.0 G and
82.42 at 4.0 G; DeiT-S 79.30 at 2.37 G, 81.20 at 3.61 G and 81.67 at 4.63 G.

T2T as the authors' code does it on 8 GPUs; of DeiT-S it says no rates: they are DeiT's. Different here:
its cosine ends after 300 epochs, 10 more follow at 1e-5; ours ends after all 310. Colour jitter is off,
since timm makes none beside RandAugment.
"""

from vit_jax import recipes
from vit_jax.config import default_config

# Batch, peak learning rate, weight decay, warm-up, epochs.
SCHEDULES = {
    "T2T-12": (1024, 2e-3, 0.03, "20 epochs", "310 epochs"),
    "T2T-14": (512, 5e-4, 0.05, "20 epochs", "310 epochs"),
    "DeiT-S": (1024, 1e-3, 0.05, "5 epochs", "300 epochs"),
}


def get_config(arg="T2T-12"):
    (size,) = recipes.arguments(arg, size=(*SCHEDULES, "smoke"))
    return smoke() if size == "smoke" else paper(size)


def paper(size):
    import deit

    config = deit.get_config()
    config.data.repeats = 1
    config.data.interpolation = "bicubic"
    backbone, _, number = size.partition("-")
    config.model.name = f"DVT-T2T-ViT-{number}" if backbone == "T2T" else f"DVT-{size}"
    batch, rate, decay, warmup, duration = SCHEDULES[size]
    config.batch_size, config.duration = batch, duration
    config.optim.lr, config.optim.weight_decay, config.optim.warmup = rate, decay, warmup
    config.optim.ema = 0.99996
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.augment.mixup = 0.0
    config.objective.label_smoothing = 0.1
    config.model = default_config().model
    config.model.name = "DVT-DeiT-S"
    config.model.grids = (2, 4, 8)
    config.model.depth = 3
    config.model.width = 64
    config.model.mlp_dim = 128
    config.model.heads = 4
    config.model.feature_hidden = 32
    config.model.feature_width = 16
    config.duration = "30 epochs"
    config.optim.lr = 2e-3
    return config
