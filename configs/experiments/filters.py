"""What the first layer of a ViT and that of a ResNet look for (ViT §4.5, Fig. 7 left; arXiv 2010.11929).

vit_jax train --config=configs/experiments/filters.py:smoke --workdir=DIR
    digits, two seeds each: four runs, two minutes of a CPU core.
vit_jax train --config=configs/experiments/filters.py:cifar10 --workdir=DIR
    small ones on CIFAR-10, ten times as long as the other experiments' runs, three seeds each: six runs, 25 minutes of
    a CPU core. The data comes by TFDS. For a tar file of its images as JPEG (train/CLASS/…, test/CLASS/…), add
    --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/filters.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    the paper's ViT-L/32 and BiT's R50x1 on JFT.
vit_jax inspect --checkpoint=DIR/vit/seed=0 --images=PHOTOS --out=REPORT
    then: draws the filters of one of them.

Expect of the paper's: the principal components of the patch embedding are like a basis of what is smooth within a
patch. A ResNet's filters are edges and spots of colour (not shown there).
"""

from vit_jax import recipes

MODELS = {"vit": "L/32", "resnet": "R50x1"}  # the paper's
SEEDS = {"paper": 1, "cifar10": 3, "smoke": 2}


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=SEEDS)
    runs = {}
    for family, model in MODELS.items():
        recipe = f"../vit_jft.py:{model}" if size == "paper" else f"../digits.py:{family}"
        config = recipes.beside(__file__, recipe)
        if size == "cifar10":
            recipes.on_cifar10(config, "4000 steps")
        elif size == "smoke":
            recipes.quick(config)
        runs |= recipes.vary(config, {family: {}}, seeds=SEEDS[size])
    return runs
