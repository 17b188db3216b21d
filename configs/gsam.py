"""A ViT learns ImageNet without augmentation, by sharpness-aware training: GSAM (arXiv 2203.08065).

vit_jax train --config=configs/gsam.py:B/32 --workdir=DIR
    or S/32, S/16, B/16;
vit_jax train --config=configs/gsam.py:smoke --workdir=DIR
    digits: 95 % after half the epochs of configs/digits.py, in about its time.

Any other recipe, of any objective, does the same with --config.optim.sam_rho=0.1,0.6 --config.optim.sam_alpha=0.6;
SAM (arXiv 2010.01412) is one radius and no alpha: --config.optim.sam_rho=0.2,0.2. Each step takes two gradients,
one after the other, and so twice the time, and memory for one gradient more.

Expect of B/32 5.4 points more on ImageNet than with AdamW alone, and 3.2 more than with SAM.

As big_vision has it (vit_i1k_gsam_no_aug.py): the radius follows the learning rate. Unlike there, the gradient that
says where to look is that of the whole batch, not one for each device, so that results do not depend on how many
devices there are, nor on config.accumulate. With fewer images to a gradient its direction is noisier, which the
authors of SAM found to help: a larger radius makes up for some of it.
The last 1 % of the training images is held out for choosing (--config.data.eval_split='train[99%:]').
"""

from vit_jax import recipes
from vit_jax.config import default_config


def get_config(arg="B/32"):
    (model,) = recipes.arguments(arg, model=("smoke", "S/32", "S/16", "B/32", "B/16"))
    config = smoke() if model == "smoke" else paper(model)
    config.optim.sam_alpha = 0.6
    return config


def paper(model):
    config = default_config()
    config.data.name = "imagenet2012"
    config.data.train_split = "train[:99%]"
    config.data.eval_split = "validation"
    config.model.name = f"ViT-{model}"
    config.model.num_classes = 1000
    config.model.pool = "mean"
    config.model.head_bias = -10.0
    config.model.dtype = "bfloat16"
    config.objective.loss = "sigmoid"
    config.duration = "300 epochs"
    config.batch_size = 4096
    config.optim.lr = 3e-3
    config.optim.lr_end = 3e-5
    config.optim.schedule = "linear"
    config.optim.warmup = "10000 steps"
    config.optim.weight_decay = 1e-3  # Not multiplied by the learning rate: 0.3 in the paper.
    config.optim.weight_decay_by = "schedule"
    config.optim.sam_rho = (0.1, 0.6)
    config.eval.every = "10 epochs"
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.augment.mixup = 0.0
    config.duration = "20 epochs"
    # So small a network stays where it begins with a larger radius, such as 0.02 to 0.1.
    config.optim.sam_rho = (0.005, 0.02)
    return config
