"""ViT on ImageNet alone, 300 epochs: the ViT paper's recipe, or AugReg's ("How to train your ViT?")
at a level.

vit_jax train --config=configs/vit_i1k.py:B/16 --workdir=DIR
    ViT Table 3, last row: any ViT of `vit_jax models`. Strong decay (0.3) and dropout instead of
    augmentation.
vit_jax train --config=configs/vit_i1k.py:B/16,medium2 --workdir=DIR
    AugReg, at level none, light1, light2, medium1, medium2, strong1, strong2, or augreg for the one
    big_vision takes for Ti/16, S/32, S/16, B/32, B/16 or L/16. The paper also ran decay 0.03
    (--config.optim.weight_decay=3e-5) and --config.model.dropout=0.1 --config.model.drop_path=0.1.

The last 1 % of the training images is held out for choosing
(--config.data.eval_split='train[99%:]'); what is evaluated is the validation set.

Expect, ImageNet top-1 %:
                                          Ti/16  S/32   S/16   B/32   B/16   L/32   L/16
    this recipe of ViT (its authors)       -      -      -     69.19  74.79   -      -
    and fine-tuned, 384 px (ViT Table 5)   -      -      -     73.38  77.91  71.16  76.53
    AugReg Table 3 ("i1k up")             72.59  72.07  79.00  74.42  79.84   -     75.72
    and fine-tuned, 384 px                74.64  75.65  80.70  76.60  81.63   -     77.21
big_vision's vit_i1k.py: about 79 for B/16. A better recipe for plain ViTs is vit_s16_i1k.py.

Where sources say nothing: the loss of the ViT paper on ImageNet is taken to be AugReg's, sigmoid
with a bias of -6.9.
"""

from vit_jax import recipes
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config

AUGREG = {"Ti/16": "light1", "S/32": "medium1"} | dict.fromkeys(
    ("S/16", "B/32", "B/16", "L/16"), "medium2"
)


def get_config(arg="B/16"):
    model, level = recipes.arguments(
        arg, model=recipes.vit_names(), level=[*recipes.AUGMENTATION, "augreg"]
    )
    config = default_config()
    config.data.name = "imagenet2012"
    config.data.train_split = "train[:99%]"
    config.data.eval_split = "validation"
    config.model.name = f"ViT-{model}"
    config.model.num_classes = 1000
    config.model.representation = recipes.width(model)
    config.model.head_bias = -6.9
    config.model.dtype = "bfloat16"
    config.objective.loss = "sigmoid"
    config.duration = "300 epochs"
    config.batch_size = 4096
    config.optim.schedule = "cosine"
    config.optim.warmup = "10000 steps"
    config.optim.clip = 1.0
    config.eval.every = "10 epochs"
    (augreg if level else paper)(config, model, level)
    recipes.shard_by_size(config, model)
    return config


def paper(config, *_):
    config.model.dropout = 0.1
    config.optim.lr = 3e-3
    config.optim.weight_decay = 0.3


def augreg(config, model, level):
    if level == "augreg" and model not in AUGREG:
        known = ", ".join(recipes.AUGMENTATION)
        raise ConfigError(f"big_vision chose no level for {model} on ImageNet; say one: {known}")
    recipes.augment(config, AUGREG[model] if level == "augreg" else level)
    config.optim.lr = 1e-3
    config.optim.moment_dtype = "bfloat16"
    config.optim.weight_decay = 1e-4  # Not multiplied by the learning rate: 0.1 in the paper.
    config.optim.weight_decay_by = "schedule"
