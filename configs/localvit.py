"""LocalViT on ImageNet ("LocalViT: Bringing Locality to Vision Transformers", arXiv 2104.05707).

vit_jax train --config=configs/localvit.py:T --workdir=DIR
    T, T-SE4 or S: the sizes of the authors' code, with patches of 16 pixels.
vit_jax train --config=configs/localvit.py:smoke --workdir=DIR
    a small one on digits, two minutes on two CPU cores.

Expect 74.8, 75.7 and 80.8 % top-1 on ImageNet's validation set, where DeiT-Ti and S have 72.2 and 79.8.

The authors' code (ofsoundof/LocalViT) trains as DeiT's does, 128 images on each of 8 GPUs: configs/deit.py.
"""

from vit_jax import recipes
from vit_jax.models.zoo import localvit


def get_config(arg="T"):
    (size,) = recipes.arguments(arg, size=("smoke", *localvit.SIZES))
    return smoke() if size == "smoke" else paper(size)


def paper(size):
    import deit

    config = deit.get_config()
    config.model.name = f"LocalViT-{size}"
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.model.name = "LocalViT-T"
    config.model.patch = 4
    config.model.reduction = 64
    config.model.pool = None  # of a ViT
    config.duration = "10 epochs"
    return config
