"""NaFlexViT: a ViT that is trained with images of any aspect, each at as many patches as the batch has (timm's
NaFlexVit; SigLIP 2's NaFlex, arXiv 2502.14786 §2.4.2).

vit_jax train --config=configs/naflex.py:B/16 --workdir=DIR
    ViT-B/16 on ImageNet-1k, 300 epochs;
vit_jax train --config=configs/naflex.py:B/16,par --workdir=DIR
    the same with positions that keep the aspect;
vit_jax train --config=configs/naflex.py:smoke --workdir=/tmp/naflex
    a small one on crops of handwritten digits of several aspects, in two minutes of two CPU cores.

Expect, top-1 % on ImageNet's validation set at 576 patches (timm's README, for its own training): 83.50, par 83.67;
as squares of 384 pixels 83.34 and 83.51. No run of this file was made.

timm's: the network, 300 epochs, the five lengths, each equally often, as many images as a budget of patches allows,
the loss by the share of images, mixup and cutmix with a neighbour by aspect, evaluation at 576. Ours, since timm
publishes none: the budget, of 2,048 images on average, and DeiT III's rates, decay, loss, crops, jitter and mixing;
its 3-Augment works on whole images alone, and DeiT's erasing stands in for it.
"""

import digits

from vit_jax import recipes
from vit_jax.config import default_config


def get_config(arg="B/16"):
    model, positions = recipes.arguments(arg, model=("B/16", "smoke"), positions=("par",))
    if model == "smoke":
        return smoke()
    config = default_config()
    recipes.images_of_deit3(config, 256)  # the grid of the stored positions: 16 x 16
    config.data.native_tokens = 576
    config.data.native_lengths = (128, 256, 576, 784, 1024)
    config.data.native_budget, config.data.native_multiple = 40 * 16_384, 64
    config.augment.update(dict(color_jitter=0.3, erasing=0.25))
    config.augment.update(dict(mixup=0.8, cutmix=1.0, mix_switch=0.5))
    config.model.update(dict(name=f"ViT-{model}", num_classes=1000, dtype="bfloat16"))
    network(config, positions == "par")
    config.model.update(dict(layer_scale_init=1e-5, init="deit", head_init="normal"))
    config.model.update(dict(drop_path=0.2, drop_path_by="constant"))
    config.objective.loss, config.eval.every = "binary", "5 epochs"
    config.duration, config.batch_size = "300 epochs", 2048
    config.eval.batch_size = 1024
    config.optim.update(dict(name="lamb", lr=3e-3, lr_end=1e-5, warmup="5 epochs"))
    config.optim.update(dict(weight_decay=0.05, clip=1.0))
    recipes.shard_by_size(config, model)
    return config


def network(config, keep_aspect):
    config.model.update(dict(pool="mean", last_norm="pooled", registers=4, layer_scale="all"))
    config.model.update(dict(activation="gelu", position_of_registers=False))
    config.model.update(dict(native_resize="bicubic", native_aspect=keep_aspect))


def smoke():
    config = digits.get_config()
    config.data.update(dict(train_crop="inception", crop_area=(0.6, 1.0), crop_aspect=(0.6, 1.6)))
    config.data.update(dict(native_tokens=64, native_lengths=(16, 36, 64), native_budget=4096))
    config.augment.update(dict(mixup=0.2, cutmix=0.5, erasing=0.1))
    network(config, keep_aspect=True)
    config.model.update(dict(layer_scale_init=0.1, depth=2))
    config.duration, config.eval.every = "20 epochs", "10 epochs"
    return config
