"""What Mixers and ResNets know of images before they learn: training on permuted ones (Mixer §4.4, Fig. 4 and 6;
arXiv 2105.01601).

vit_jax train --config=configs/experiments/permutations.py:smoke --workdir=DIR
    digits, two seeds each: twelve runs, three to four minutes of a CPU core.
vit_jax train --config=configs/experiments/permutations.py:cifar10 --workdir=DIR
    small ones on CIFAR-10, three seeds each: 18 runs, eight minutes of a CPU core. The data comes by TFDS. For a tar
    file of its images as JPEG (train/CLASS/…, test/CLASS/…), add --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/permutations.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    Mixer-B/16 and R50x1 on JFT (configs/mixer.py and vit_jft.py), judged by a linear fit of five images of each
    class of ImageNet.

All images are permuted alike, in training and evaluation: not at all; the 16 x 16 patches and the pixels in each of
them; or all pixels of the image. Expect of the paper's: the Mixer does not notice the first permutation; that of
all pixels costs it about 45 % of its accuracy, and the ResNet about 75 %.
"""

from vit_jax import recipes

KINDS = ("none", "both", "all pixels")
PAPER = {"Mixer-B-16": "../mixer.py:B/16,jft300m", "R50x1": "../vit_jft.py:R50x1"}
SMALL = {"mixer": "../digits.py:mixer", "resnet": "../digits.py:resnet"}
SEEDS = {"paper": 1, "cifar10": 3, "smoke": 2}


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=SEEDS)
    runs = {}
    for model, recipe in (PAPER if size == "paper" else SMALL).items():
        config = recipes.beside(__file__, recipe)
        if size == "paper":
            recipes.few_shot_on_imagenet(config)
        else:
            config.data.permute_patch = 8  # the Mixer's
        if size == "cifar10":
            recipes.on_cifar10(config)
        elif size == "smoke":
            recipes.quick(config, "300 steps")
        settings = [{"data.permute": kind} for kind in KINDS]
        for name, run in recipes.vary(config, settings, seeds=SEEDS[size]).items():
            runs[f"{model},{name}"] = run
    return runs
