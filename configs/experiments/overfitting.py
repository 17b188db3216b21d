"""How Mixers and ViTs overfit little data (Mixer §3.3, Fig. 2; arXiv 2105.01601).

vit_jax train --config=configs/experiments/overfitting.py:smoke --workdir=DIR
    5, 20 and 100 % of the digits, for as many steps each, two seeds: twelve runs, three to four minutes of a CPU core.
vit_jax train --config=configs/experiments/overfitting.py:cifar10 --workdir=DIR
    small ones on 500, 5,000 and 50,000 images of CIFAR-10, for as many steps each, three seeds: 18 runs, five
    minutes of a CPU core. The data comes by TFDS. For a tar file of its images as JPEG (train/CLASS/…,
    test/CLASS/…), add --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/overfitting.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    B/32 and L/16 of both on 3, 10, 30 and 100 % of JFT for 233, 70, 23 and 7 epochs, judged by a linear fit of five
    images of each class of ImageNet.

Subsets are nested, and none is stopped early: the loss of training beside that of other images shows how far
each is learned by heart. Expect the paper's claim: on little data Mixers overfit more than ViTs, and they gain more
from further data; the larger the model the more.
"""

from vit_jax import recipes

EPOCHS = {3: 233, 10: 70, 30: 23, 100: 7}
SMOKE = (5, 20, 100)
IMAGES = (500, 5_000, 50_000)  # of CIFAR-10
SEEDS = {"paper": 1, "cifar10": 3, "smoke": 2}
SMALL = {"mixer": "../digits.py:mixer", "vit": "../digits.py:vit"}
PAPER = {
    "Mixer-B-32": "../mixer.py:B/32,jft300m",
    "Mixer-L-16": "../mixer.py:L/16,jft300m",
    "ViT-B-32": "../vit_jft.py:B/32",
    "ViT-L-16": "../vit_jft.py:L/16",
}


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=SEEDS)
    runs = {}
    for model, recipe in (PAPER if size == "paper" else SMALL).items():
        config = recipes.beside(__file__, recipe)
        if size == "paper":
            recipes.few_shot_on_imagenet(config)
            config.eval.evaluators += ("accuracy",)  # and the loss, on other images of JFT
        elif size == "cifar10":
            recipes.on_cifar10(config)
        else:
            recipes.quick(config)
        settings = recipes.cifar10_subsets(*IMAGES) if size == "cifar10" else [
            {"data.train_split": f"train[:{share}%]" if share < 100 else "train",
             "duration": config.duration if size == "smoke" else f"{EPOCHS[share]} epochs"}
            for share in (SMOKE if size == "smoke" else EPOCHS)
        ]  # fmt: skip
        for name, run in recipes.vary(config, settings, seeds=SEEDS[size]).items():
            runs[f"{model},{name}"] = run
    return runs
