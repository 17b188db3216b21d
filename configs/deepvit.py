"""DeepViT on ImageNet ("DeepViT: Towards Deeper Vision Transformer", arXiv 2103.11886).

vit_jax train --config=configs/deepvit.py:S --workdir=DIR
    16, 24, 32, S or L: the sizes of the authors' code, with patches of 16 pixels.
vit_jax train --config=configs/deepvit.py:smoke --workdir=DIR
    a small one with both kinds of blocks on digits, two and a half minutes on two CPU cores.

Expect 79.1, 80.0, 80.9, 82.3 and 83.1 % top-1 on ImageNet's validation set; without re-attention
(--config.model.stages="(16,)") the first three have 78.9, 79.4 and 79.3. The smoke run: 98.1 % of digits.

From the yaml files of the authors' code (zhoudaquan/dvit_repo), whose recipe is DeiT's without repeated
augmentation. Nothing says on how many GPUs, 32 images on each; 8 are taken here. The code's last 10 epochs
at the smallest rate are skipped. An average (--config.optim.ema=0.99996) is kept there, but not evaluated.
"""

from vit_jax import recipes
from vit_jax.models.zoo import deepvit


def get_config(arg="S"):
    (size,) = recipes.arguments(arg, size=("smoke", *deepvit.SIZES))
    return smoke() if size == "smoke" else paper(size)


def paper(size):
    import deit

    config = deit.get_config()
    config.data.repeats = 1
    config.model.name = f"DeepViT-{size}"
    config.model.drop_path = 0.2
    config.batch_size = 8 * 32
    config.optim.lr = 5e-4
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.model.name = "DeepViT-S"
    config.model.patch = 4
    config.model.stages = (2, 2)
    config.model.pool = config.model.depth = None  # of a ViT
    config.duration = "14 epochs"
    return config
