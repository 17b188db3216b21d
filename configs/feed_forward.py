"""Feed-forward-only networks on ImageNet ("Do You Even Need Attention?", arXiv 2105.02723).

vit_jax train --config=configs/feed_forward.py:B/16 --workdir=DIR
    Ti/16, B/16 or L/32: the sizes of the authors' code.
vit_jax train --config=configs/feed_forward.py:smoke --workdir=DIR
    a small one on digits, two to three minutes on two CPU cores.

Expect 61.4, 74.9 and 71.4 % top-1 on ImageNet's validation set. The smoke run: 98.9 % of digits (seed 0).

The paper trains as DeiT does (configs/deit.py), with dropout of 0.1.
"""

from vit_jax import recipes
from vit_jax.models.zoo import feed_forward


def get_config(arg="B/16"):
    sizes = [name.removeprefix("FF-") for name in feed_forward.VARIANTS]
    (size,) = recipes.arguments(arg, size=("smoke", *sizes))
    return smoke() if size == "smoke" else paper(size)


def paper(size):
    import deit

    config = deit.get_config()
    config.model.name = f"FF-{size}"
    config.model.dropout = 0.1
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.model.name = "FF-Ti/4"
    config.model.position_grid = (8, 8)
    config.model.pool = "token"
    config.model.heads = None  # of a ViT
    config.duration = "20 epochs"
    return config
