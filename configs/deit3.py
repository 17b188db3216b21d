"""DeiT III: supervised training of plain ViTs, from scratch ("DeiT III: Revenge of the ViT", arXiv 2204.07118).

vit_jax train --config=configs/deit3.py:S/16 --workdir=DIR
    S/16, B/16, L/16 or H/14 on ImageNet-1k: 800 epochs in DIR/pretrain, S at 224 pixels, B and L at 192, H at 160;
    then B, L and H 20 epochs in DIR/at_224.
vit_jax train --config=configs/deit3.py:B/16,384 --workdir=DIR
    S, B or L, and then 20 epochs at 384 pixels in DIR/at_384.
vit_jax train --config=configs/deit3.py:smoke --workdir=/tmp/deit3
    A small one in two stages on scikit-learn's handwritten digits: SMOKE_ACCURACY of the 359 test images (seed 0).

Expect, top-1 % on ImageNet's validation set (README_revenge.md of facebookresearch/deit):
              S/16   B/16   L/16   H/14
    at 224    81.4   83.8   84.9   85.2
    at 384    83.4   85.0   85.8    -
Beside every evaluation stands what the authors had at that epoch (docs/pretraining.md). With ImageNet-21k before:
configs/deit3_i21k.py.

COST

Different from the authors' code: rates change at every step and not every epoch, and rise from 0 and not 1e-6; colour
jitter keeps the order brightness, contrast, saturation. It keeps an average of the weights, 0.99996, too, which it
does not evaluate.
"""

from vit_jax import recipes
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config

# Pixels and peak rate; drop path there, at 224 and at 384 pixels.
SIZES = {
    "S/16": (224, 4e-3, 0.05, None, 0.0),
    "B/16": (192, 3e-3, 0.2, 0.2, 0.15),
    "L/16": (192, 3e-3, 0.45, 0.45, 0.4),
    "H/14": (160, 3e-3, 0.6, 0.55, None),
}


def get_runs(arg="S/16"):
    model, size = recipes.arguments(arg, model=(*SIZES, "smoke"), size=("224", "384"))
    if model == "smoke":
        return smoke(pretrain("S/16", 24, 4e-3, 0.05))
    pixels, rate, first, at_224, at_384 = SIZES[model]
    if size == "384" and at_384 is None:
        raise ConfigError(f"config argument {arg!r}: the authors have no {model} at 384 pixels")
    runs, curve = (
        {"pretrain": pretrain(model, pixels, rate, first)},
        f"deit3-{model.replace('/', '')}",
    )
    runs["pretrain"].reference.curve = f"{curve}-{pixels}"
    for larger, drop_path in ((224, at_224), (384, at_384 if size == "384" else None)):
        if drop_path is not None:
            runs[f"at_{larger}"] = finetune(runs, larger, drop_path)
            runs[f"at_{larger}"].reference.curve = f"{curve}-{larger}-finetuned"
    return runs


def get_config(arg="S/16"):
    """The first stage, for `vit_jax plan`."""
    return next(iter(get_runs(arg).values()))


def pretrain(model, pixels, rate, drop_path):
    config = default_config()
    recipes.images_of_deit3(config, pixels)
    config.data.repeats = 3
    config.augment.update(dict(three_augment=True, color_jitter=0.3))
    config.augment.update(dict(mixup=0.8, cutmix=1.0, mix_switch=0.5))
    config.model.update(dict(name=f"ViT-{model}", num_classes=1000, dtype="bfloat16"))
    config.model.update(dict(activation="gelu", position_of_class=False, layer_scale="all"))
    config.model.update(dict(layer_scale_init=1e-4, init="deit", head_init="normal"))
    config.model.update(dict(drop_path=drop_path, drop_path_by="constant"))
    config.model.crop_to_patches = pixels % int(model.split("/")[1]) > 0  # H/14 at 160 pixels
    config.objective.loss, config.eval.every = "binary", "5 epochs"
    config.duration, config.batch_size = "800 epochs", 2048
    config.optim.update(dict(name="lamb", lr=rate, lr_end=1e-5, warmup="5 epochs"))
    config.optim.update(dict(weight_decay=0.05, clip=1.0))
    recipes.shard_by_size(config, model)
    return config


def finetune(runs, pixels, drop_path):
    config = recipes.images_of_deit3(recipes.next_stage(runs), pixels)
    config.data.repeats = 1
    config.augment.update(dict(three_augment=False, color_jitter=0.0))
    recipes.randaugment_of_deit(config)
    config.model.update(dict(drop_path=drop_path, crop_to_patches=False))
    config.objective.update(dict(loss="softmax", label_smoothing=0.1))
    config.duration, config.batch_size = "20 epochs", 512
    config.optim.update(dict(name="adamw", lr=1e-5, weight_decay=0.1, clip=0.0))
    return config


def smoke(config):
    """Two stages on digits, of 24 and of 32 pixels."""
    recipes.on_digits(config, "30 epochs", lr=8e-3)
    larger = recipes.next_stage({"pretrain": config})
    larger.data.image_size, larger.duration = 32, "4 epochs"
    larger.optim.name, larger.optim.lr = "adamw", 3e-4
    return {"pretrain": config, "at_32": larger}
