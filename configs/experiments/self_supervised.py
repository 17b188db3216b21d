"""What a ViT predicts of corrupted patches, and how many are corrupted (ViT §4.6 and §B.1.2; arXiv 2010.11929).

vit_jax train --config=configs/experiments/self_supervised.py:smoke --workdir=DIR
    digits without their labels, two seeds each: twelve runs, five minutes of a CPU core;
    judged by a linear fit of ten images of each class.
vit_jax train --config=configs/experiments/self_supervised.py:cifar10 --workdir=DIR
    CIFAR-10 without its labels, three seeds each: 18 runs, 30 minutes of a CPU core; judged by a linear fit of 100
    images of each class. The data comes by TFDS. For a tar file of its images as JPEG (train/CLASS/…, test/CLASS/…),
    add --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/self_supervised.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    the paper's B/16 on JFT for a million steps (configs/masked_patches.py), judged by a linear fit of five
    images of each class of ImageNet.
vit_jax train --config=configs/finetune.py:imagenet2012 --workdir=TUNED \\
  --config.init_from=DIR/target=mean_color,corrupted=0.5/seed=0
    then: fine-tunes one of them.

Expect of the paper's: all three targets work; the mean colour is best in few-shot evaluation and every pixel slightly
worse; so is 15 % instead of 50 %. Little is gained after the first 100,000 steps. It tried 15 % with the mean
colour; here every target has both.
"""

from vit_jax import recipes

SEEDS = {"paper": 1, "cifar10": 3, "smoke": 2}
TARGETS = ("mean_color", "downsized", "full")


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=SEEDS)
    recipe = "B/16" if size == "paper" else "smoke"
    config = recipes.beside(__file__, f"../masked_patches.py:{recipe}")
    if size == "paper":
        recipes.few_shot_on_imagenet(config)
    elif size == "cifar10":
        recipes.on_cifar10(config, "1500 steps")
        shots = {"shots": (100,), "data": {"train_split": recipes.of_each_class("train", 200)}}
        config.eval.evaluators, config.eval.best = (("few_shot", shots),), "few_shot/100shot"
        config.eval.every = "0 steps"
    else:
        recipes.quick(config, "300 steps")
        config.model.position = "learned"
        config.eval.evaluators = (("few_shot", {"shots": (10,)}),)
        config.eval.best = "few_shot/10shot"
    settings = [
        {"objective.target": target, "objective.corrupted": share}
        for target in TARGETS
        for share in (0.15, 0.5)
    ]
    return recipes.vary(config, settings, seeds=SEEDS[size])
