"""How much data ViTs and ResNets need (ViT §4.3, Fig. 4; arXiv 2010.11929).

vit_jax train --config=configs/experiments/data_size.py:smoke --workdir=DIR
    10, 30 and 100 % of the digits, for as many steps each, two seeds: twelve runs, five minutes of a CPU core.
vit_jax train --config=configs/experiments/data_size.py:cifar10 --workdir=DIR
    small ones on 500, 5,000 and 50,000 images of CIFAR-10, for as many steps each, three seeds: 18 runs, seven
    minutes of a CPU core. The data comes by TFDS. For a tar file of its images as JPEG (train/CLASS/…,
    test/CLASS/…), add --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/data_size.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    B/32, L/16, R50x1 and R152x2 on 3, 10, 30 and 100 % of JFT (9, 30, 90 and 300 M images), judged by a linear fit
    of five images of each class of ImageNet.

Subsets are nested: each holds the smaller ones. As in the paper all have the same settings and no further
regularisation, and are stopped early where they get no better; at most they take the steps of all the data. Small ones
are not stopped.
Expect its crossing: at 9 M images B/32 is below R50x1, from 90 M on above; so are L/16 and R152x2.
"""

from vit_jax import recipes

SHARES = {"paper": (3, 10, 30, 100), "smoke": (10, 30, 100)}
IMAGES = (500, 5_000, 50_000)  # of CIFAR-10
SEEDS = {"paper": 1, "cifar10": 3, "smoke": 2}
JFT = 303_000_000  # images
MODELS = ("B/32", "R50x1", "L/16", "R152x2")


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=SEEDS)
    runs = {}
    for model in MODELS if size == "paper" else ("vit", "resnet"):
        recipe = f"../vit_jft.py:{model}" if size == "paper" else f"../digits.py:{model}"
        config = recipes.beside(__file__, recipe)
        if size == "paper":
            recipes.few_shot_on_imagenet(config)
            config.eval.patience, config.checkpoint.best = 5, True
            epochs = int(config.duration.split()[0])
            config.duration = f"{epochs * JFT // config.batch_size} steps"
        elif size == "cifar10":
            recipes.on_cifar10(config)
        else:
            recipes.quick(config)
        if size == "cifar10":
            settings = recipes.cifar10_subsets(*IMAGES)
        else:
            splits = [f"train[:{share}%]" if share < 100 else "train" for share in SHARES[size]]
            settings = [{"data.train_split": split} for split in splits]
        for name, run in recipes.vary(config, settings, seeds=SEEDS[size]).items():
            runs[f"{model.replace('/', '-')},{name}"] = run
    return runs
