"""Masked autoencoders: a ViT learns from images alone, without labels (MAE, arXiv 2111.06377).

vit_jax train --config=configs/mae.py:L/16 --workdir=DIR
    B/16, L/16 or H/14 on ImageNet; your own images need no classes:
    --config.data.name=folder --config.data.path=IMAGES;
vit_jax train --config=configs/mae.py:photos --workdir=DIR --config.data.path=IMAGES
    some thousand of them on one machine: ViT-S/16 at 224 px with a smaller decoder, 400 epochs or at least 2,000
    steps of 64 images, 16 at a time; our choice, no paper's;
vit_jax train --config=configs/mae.py:smoke --workdir=DIR
    digits, without their labels, in a minute on two CPU cores.

Then fine-tune it, which trains its positions too: vit_jax train --config=configs/finetune.py:imagenet2012
--config.init_from=DIR --config.model.position=learned --config.optim.layer_decay=0.65 (0.75 for L and H). The class
token is read then; the authors' code reads the mean of the patches.

Expect, ImageNet top-1 % after 1,600 epochs: fine-tuned B 83.6, L 85.9, H 86.9; linear probe 68.0, 75.8, 76.6.
A step takes about 0.56, 0.34 and 0.29 of the products of one with labels.

As the authors' code does it: images are cut to 20 to 100 % of their area with bicubic filters and mirrored, no
more; targets are normalised patch by patch; 800 epochs (the results above: 1,600).
"""

from vit_jax import recipes
from vit_jax.config import default_config


def get_config(arg="L/16"):
    (model,) = recipes.arguments(arg, model=("smoke", "photos", "B/16", "L/16", "H/14"))
    config = {"smoke": smoke, "photos": photos}.get(model, lambda: paper(model))()
    config.objective.name = "mae"
    config.model.position = "fixed2d"
    config.model.activation = "gelu"
    return config


def paper(model):
    config = default_config()
    config.data.name = "imagenet2012"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.crop_area = (0.2, 1.0)
    config.data.interpolation = "bicubic"
    config.data.mean = (0.485, 0.456, 0.406)
    config.data.std = (0.229, 0.224, 0.225)
    config.model.name = f"ViT-{model}"
    config.model.dtype = "bfloat16"
    config.duration = "800 epochs"
    config.batch_size = 4096
    config.optim.lr = 1.5e-4 * 4096 / 256
    config.optim.b2 = 0.95
    config.optim.schedule = "cosine"
    config.optim.warmup = "40 epochs"
    config.optim.weight_decay = 0.05
    config.optim.clip = 0.0
    config.eval.every = "10 epochs"
    recipes.shard_by_size(config, model)
    return config


def photos():
    config = recipes.on_photos(paper("S/16"), epochs=400, steps=2000, lr=1.5e-4 * 64 / 256)
    config.objective.update(dict(width=256, depth=4, heads=8))
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.augment.mixup = 0.0
    config.objective.width = 32
    config.objective.depth = 2
    config.objective.heads = 4
    config.optim.lr = 2e-3
    return config
