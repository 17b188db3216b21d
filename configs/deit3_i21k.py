"""DeiT III on ImageNet-21k and then on ImageNet-1k ("DeiT III: Revenge of the ViT", arXiv 2204.07118).

vit_jax train --config=configs/deit3_i21k.py:L/16 --workdir=DIR
    S/16, B/16, L/16 or H/14: 240 epochs on ImageNet-21k at 224 pixels (H: 90 at 128) in DIR/pretrain, then 50 on
    ImageNet-1k at 224 pixels in DIR/imagenet1k.
vit_jax train --config=configs/deit3_i21k.py:smoke --workdir=/tmp/deit3_i21k
    A small one on scikit-learn's handwritten digits, the second stage with a new head: SMOKE_ACCURACY of the 359 test
    images (seed 0).

Expect, top-1 % on ImageNet's validation set: S 83.1, B 85.7, L 87.0, H 87.2 (README_revenge.md of
facebookresearch/deit). Beside every evaluation of the second stage stands what the authors had at that epoch.

COST

Different from the authors' code: images are cropped from 8 pixels more, there from the same size with 4 mirrored
ones around. The source does not say which images its curves of the first stage are of: they are not compared. The
rest as in configs/deit3.py.
"""

import deit3

from vit_jax import recipes

# Pixels, epochs, drop path; that on ImageNet-1k.
SIZES = {
    "S/16": (224, 240, 0.05, 0.05),
    "B/16": (224, 240, 0.1, 0.15),
    "L/16": (224, 240, 0.3, 0.4),
    "H/14": (128, 90, 0.5, 0.45),
}


def get_runs(arg="S/16"):
    (model,) = recipes.arguments(arg, model=(*SIZES, "smoke"))
    name = "S/16" if model == "smoke" else model
    pixels, epochs, drop_path, later = SIZES[name]
    config = deit3.pretrain(name, pixels, 1e-3, drop_path)
    config.data.update(dict(name="imagenet21k", train_split="full[51200:]", repeats=1))
    config.data.update(dict(eval_split="full[:51200]", train_crop="random", resize=pixels + 8))
    config.augment.mixup = 0.0
    config.model.num_classes = 21_843
    config.objective.update(dict(loss="softmax", label_smoothing=0.1))
    config.duration, config.optim.weight_decay = f"{epochs} epochs", 0.02
    if model == "smoke":
        config.data.image_size = 32
        recipes.on_digits(config, "30 epochs", lr=8e-3)
    runs = {"pretrain": config}
    runs["imagenet1k"] = config = recipes.next_stage(runs)
    config.init_reset = ("head/.*",)
    config.model.drop_path = later
    if model == "smoke":
        config.duration, config.optim.lr = "5 epochs", 5e-3
        return runs
    recipes.images_of_deit3(config, 224)
    config.data.resize = 232
    config.model.update(dict(num_classes=1000, crop_to_patches=False))
    config.duration, config.optim.lr = "50 epochs", 3e-4
    config.reference.curve = f"deit3-{model.replace('/', '')}-224-21k"
    return runs


def get_config(arg="S/16"):
    """The first stage, for `vit_jax plan`."""
    return get_runs(arg)["pretrain"]
