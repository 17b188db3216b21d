"""Dynamic Vision Transformers on ImageNet ("Not All Images are Worth 16x16 Words", arXiv 2105.15075).

vit_jax train --config=configs/dynamic_vit.py:DeiT-S --workdir=DIR
    T2T-12, T2T-14 or DeiT-S: three of these networks, which see 7 x 7, 10 x 10 and 14 x 14 tokens.
    Without reuse: --config.model.feature_reuse=False --config.model.relation_reuse=False; two exits:
    --config.model.grids=7,14; the paper's ablations: other values of the feature_… and relation_… options.
vit_jax train --config=configs/dynamic_vit.py:smoke --workdir=/tmp/dvt
    A small one on scikit-learn's handwritten digits, with 2 x 2, 4 x 4 and 8 x 8 tokens:
    98.1 % of the 359 test images at the last exit (seed 0).

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
    config = default_config()
    config.objective.loss = "softmax"
    config.objective.label_smoothing = 0.1
    (smoke if size == "smoke" else paper)(config, size)
    return config


def paper(config, size):
    config.data.name = "imagenet2012"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.crop_area = (0.08, 1.0)
    config.data.interpolation = "bicubic"
    config.data.eval_resize = 256
    config.data.mean = (0.485, 0.456, 0.406)
    config.data.std = (0.229, 0.224, 0.225)
    config.augment.randaugment_kind = "timm-inc1"  # rand-m9-mstd0.5-inc1
    config.augment.randaugment_layers = 2
    config.augment.randaugment_magnitude = 9.0
    config.augment.randaugment_std = 0.5
    config.augment.erasing = 0.25
    config.augment.mixup = 0.8
    config.augment.cutmix = 1.0
    config.augment.mix_switch = 0.5
    backbone, _, number = size.partition("-")
    config.model.name = f"DVT-T2T-ViT-{number}" if backbone == "T2T" else f"DVT-{size}"
    config.model.num_classes = 1000
    config.model.head_init = "normal"
    config.model.drop_path = 0.1
    config.model.dtype = "bfloat16"
    batch, rate, decay, warmup, duration = SCHEDULES[size]
    config.batch_size, config.duration = batch, duration
    config.optim.lr, config.optim.weight_decay, config.optim.warmup = rate, decay, warmup
    config.optim.lr_end = 1e-5
    config.optim.schedule = "cosine"
    config.optim.clip = 0.0
    config.optim.ema = 0.99996
    config.eval.every = "5 epochs"


def smoke(config, _):
    config.data.name = "digits"
    config.data.image_size = 32
    config.data.train_crop = "pad"
    config.data.eval_crop = "resize"
    config.augment.flip = False  # A mirrored digit is another digit, or none.
    config.model.name = "DVT-DeiT-S"
    config.model.grids = (2, 4, 8)
    config.model.depth = 3
    config.model.width = 64
    config.model.mlp_dim = 128
    config.model.heads = 4
    config.model.feature_hidden = 32
    config.model.feature_width = 16
    config.duration = "30 epochs"
    config.batch_size = 64
    config.optim.lr = 2e-3
    config.optim.warmup = "5%"
    config.optim.weight_decay = 0.05
    config.optim.ema = 0.995
    config.log.every = "50 steps"
