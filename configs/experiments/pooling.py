"""Class token against global average pooling, each at two rates (ViT §D.3, Fig. 9; arXiv 2010.11929).

vit_jax train --config=configs/experiments/pooling.py:smoke --workdir=DIR
    digits, three seeds each: twelve runs, four minutes of a CPU core.
vit_jax train --config=configs/experiments/pooling.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    the paper's ViT-B/16 on JFT (configs/vit_jft.py), one seed each.

Expect the paper's claim: pooling at the class token's rate, 8e-4, is clearly worse; at 3e-4 it is as good.
The gap is one of rates, whose ratio is 8/3.
"""

from vit_jax import recipes

RATIO = 8 / 3


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=("paper", "smoke"))
    smoke = size == "smoke"
    config = recipes.beside(__file__, "../digits.py" if smoke else "../vit_jft.py:B/16")
    rate = config.optim.lr
    if smoke:
        recipes.quick(config)
    settings = [
        {"model.pool": pool, "optim.lr": lr}
        for pool in ("token", "mean")
        for lr in (rate, round(rate / RATIO, 10))
    ]
    return recipes.vary(config, settings, seeds=3 if smoke else 1)
