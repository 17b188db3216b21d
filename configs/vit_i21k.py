"""ViT on ImageNet-21k: the ViT paper's recipe, or AugReg's ("How to train your ViT?") at an
augmentation level.

vit_jax train --config=configs/vit_i21k.py:B/16 --workdir=DIR
    ViT Table 3: B/16, B/32, L/16, L/32 for 90 epochs; also printed for L: --config.duration="30
    epochs".
vit_jax train --config=configs/vit_i21k.py:B/16,light2 --workdir=DIR
    AugReg, 300 epochs: any ViT of `vit_jax models`, at level none, light1, light2, medium1,
    medium2, strong1, strong2, or augreg for the one that big_vision takes for Ti/16, S/32, S/16,
    B/32, B/16 or L/16. The paper also ran 30 epochs, decay 0.03 (--config.optim.weight_decay=3e-5)
    and --config.model.dropout=0.1 --config.model.drop_path=0.1.

The data set is big_vision's: 21,843 classes, the first 51,200 images held out. TFDS cannot make it.
'vit_jax prepare CLASSES --out=SET --holdout=0.0036' stores a folder of image-net.org's tar files, one for each class;
then set --config.data.name=prepared --config.data.path=SET --config.data.train_split=train
--config.data.eval_split=test and --config.model.num_classes=21841, the number of its classes.

Expect, ImageNet top-1 % after fine-tuning:
                                  Ti/16  S/32   S/16   B/32   B/16   L/32   L/16
    ViT Table 5, 384 px            -      -      -     81.28  83.97  80.99  85.15
    AugReg Table 3, 300 ep, 224   73.75  73.47  80.46  79.13  83.96   -     83.98
    AugReg Table 3, 300 ep, 384   78.22  79.58  83.73  83.59  85.49   -     85.59
and precision at 1 on held-out ImageNet-21k of the released ViTs: B/32 44.04, B/16 47.88, L/32
45.42, L/16 49.90 (their authors). Cost: L/16 230 TPUv3-core-days (ViT Table 2; the Mixer paper
prints 180).

Where sources differ or say nothing:
- big_vision's file pools AugReg's models by the mean; the released checkpoints have a class token,
  and so has this (--config.model.pool=mean for the other).
- The ViT paper states clipping for ImageNet alone, so its recipe has none here
  (--config.optim.clip=1).
"""

from vit_jax import recipes
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config

TABLE_3 = ("B/16", "B/32", "L/16", "L/32")
AUGREG = {
    "Ti/16": "none",
    "S/32": "none",
    "S/16": "light1",
    "B/32": "light2",
    "B/16": "light2",
    "L/16": "medium2",
}


def get_config(arg="B/16"):
    model, level = recipes.arguments(
        arg, model=recipes.vit_names(), level=[*recipes.AUGMENTATION, "augreg"]
    )
    config = default_config()
    config.data.name = "imagenet21k"
    config.data.train_split = "full[51200:]"
    config.data.eval_split = "full[:51200]"
    config.model.name = f"ViT-{model}"
    config.model.num_classes = 21_843
    config.model.head_bias = -10.0
    config.model.dtype = "bfloat16"
    config.objective.loss = "sigmoid"
    config.batch_size = 4096
    config.optim.lr = 1e-3
    config.optim.warmup = "10000 steps"
    config.eval.every = "5000 steps"
    (augreg if level else paper)(config, model, level)
    recipes.shard_by_size(config, model)
    return config


def paper(config, model, _):
    if model not in TABLE_3:
        known = ", ".join(TABLE_3)
        raise ConfigError(
            f"ViT Table 3 has {known} on ImageNet-21k; for {model} say a level, as in {model},light1"
        )
    config.duration = "90 epochs"
    config.model.representation = recipes.width(model)
    config.model.dropout = 0.1
    config.optim.schedule = "linear"
    config.optim.lr_end = 1e-5
    config.optim.weight_decay = 0.03
    config.optim.clip = 0.0


def augreg(config, model, level):
    if level == "augreg" and model not in AUGREG:
        known = ", ".join(recipes.AUGMENTATION)
        raise ConfigError(
            f"big_vision chose no level for {model} on ImageNet-21k; say one: {known}"
        )
    recipes.augment(config, AUGREG[model] if level == "augreg" else level)
    config.duration = "300 epochs"
    config.optim.schedule = "cosine"
    config.optim.moment_dtype = "bfloat16"
    config.optim.weight_decay = 1e-4  # Not multiplied by the learning rate: 0.1 in the paper.
    config.optim.weight_decay_by = "schedule"
    config.optim.clip = 1.0
