"""Masked patch prediction: a ViT learns from images alone, without labels (ViT, arXiv 2010.11929,
§4.6 and §B.1.2).

vit_jax train --config=configs/masked_patches.py:B/16 --workdir=DIR
    what is predicted is the mean colour of a patch; a folder of images needs no classes:
    --config.data.name=folder --config.data.path=IMAGES;
vit_jax train --config=configs/masked_patches.py:B/16,downsized --workdir=DIR
vit_jax train --config=configs/masked_patches.py:B/16,full --workdir=DIR
    the paper's other two targets: the colours of 4 x 4 parts, and every pixel;
vit_jax train --config=configs/masked_patches.py:smoke --workdir=DIR
    digits, without their labels, in a minute on two CPU cores.

Then fine-tune it: vit_jax train --config=configs/finetune.py:imagenet2012 --config.init_from=DIR.
15 % of patches instead of 50: --config.objective.corrupted=0.15.

Expect, after a million steps on JFT and fine-tuning, 79.9 % top-1 on ImageNet: 2 points more than
from scratch, 4 fewer than with labels; little is gained after the first 100,000 steps. The mean
colour was best in few-shot evaluation, full patches slightly worse, 15 % slightly worse.

Where the paper says nothing: weight decay is 0.1, as in its recipes for JFT; images are cut and
mirrored as there; the rate falls to 0. Pixels, not normalised values, are what is predicted.
"""

from vit_jax import recipes
from vit_jax.config import default_config
from vit_jax.objectives.masked_patches import MaskedPatchesOptions

TARGETS = {"color": "mean_color", "downsized": "downsized", "full": "full"}


def get_config(arg="B/16"):
    model, target = recipes.arguments(arg, model=["smoke", *recipes.vit_names()], target=TARGETS)
    config = smoke() if model == "smoke" else paper(model)
    config.objective.name = "masked_patches"
    config.objective.target = TARGETS[target] if target else MaskedPatchesOptions.target
    return config


def paper(model):
    config = default_config()
    config.data.name = "jft300m"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.model.name = f"ViT-{model}"
    config.model.dtype = "bfloat16"
    config.duration = "1000000 steps"
    config.batch_size = 4096
    config.optim.lr = 2e-4
    config.optim.warmup = "10000 steps"
    config.optim.weight_decay = 0.1
    config.eval.every = "1%"
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.augment.mixup = 0.0
    config.optim.lr = 1e-3
    return config
