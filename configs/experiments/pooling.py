"""Class token against global average pooling, each at two rates (ViT §D.3, Fig. 9; arXiv 2010.11929).

vit_jax train --config=configs/experiments/pooling.py:smoke --workdir=DIR
    digits, three seeds each: twelve runs, four minutes of a CPU core.
vit_jax train --config=configs/experiments/pooling.py:cifar10 --workdir=DIR
    the same of a small ViT on CIFAR-10; and beside them, at the lower rate, the generalised mean (GeM), attention
    pooling (MAP) and the class token of a weighted sum of all layers; three seeds each: 21 runs, nine minutes of a CPU
    core. The data comes by TFDS. For a tar file of its images as JPEG (train/CLASS/…, test/CLASS/…), add
    --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/pooling.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    the paper's ViT-B/16 on JFT (configs/vit_jft.py), one seed each.

Expect the paper's claim: pooling at the class token's rate, 8e-4, is clearly worse; at 3e-4 it is as good.
The gap is one of rates, whose ratio is 8/3.
"""

from vit_jax import recipes

RATIO = 8 / 3
SEEDS = {"paper": 1, "cifar10": 3, "smoke": 3}
OTHERS = (
    {"model.pool": "gem"},
    {"model.pool": "map"},
    {"model.pool": "token", "model.weighted_layers": True},
)


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=SEEDS)
    config = recipes.beside(__file__, "../vit_jft.py:B/16" if size == "paper" else "../digits.py")
    rate = config.optim.lr
    if size == "cifar10":
        recipes.on_cifar10(config)
        rate = config.optim.lr
    elif size == "smoke":
        recipes.quick(config)
    lower = round(rate / RATIO, 10)
    settings = [
        {"model.pool": pool, "optim.lr": lr} for pool in ("token", "mean") for lr in (rate, lower)
    ]
    if size == "cifar10":
        settings += [other | {"optim.lr": lower} for other in OTHERS]
    return recipes.vary(config, settings, seeds=SEEDS[size])
