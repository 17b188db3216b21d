"""Fine-tuning at other resolutions than that of pre-training, with interpolated positions (ViT §3.2; DeiT §6,
arXiv 2012.12877).

vit_jax train --config=configs/experiments/resolution.py:smoke --workdir=DIR
    a small ViT on digits at 32 pixels, in DIR/pretrained; from its weights fine-tuned at 24, 32 and 48 pixels, two
    seeds each: seven runs.
vit_jax train --config=configs/experiments/resolution.py:cifar10 --workdir=DIR
    the same on CIFAR-10, three seeds each: ten runs, three minutes of a CPU core. The data comes by TFDS. For a tar
    file of its images as JPEG (train/CLASS/…, test/CLASS/…), add --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/resolution.py --workdir=DIR --config.init_from=B_16.npz
    any checkpoint at 160, 224, 320, 384 and 512 pixels on ImageNet, by the ViT paper's recipe.

Expect of DeiT-B, trained at 224 pixels: 79.9 after fine-tuning at 160, 81.8 at 224, 82.7 at 320, 83.1 at 384.
"""

from vit_jax import recipes

SEEDS = {"paper": 1, "cifar10": 3, "smoke": 2}


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=SEEDS)
    if size == "paper":
        config = recipes.beside(__file__, "../finetune.py:imagenet2012")
        return recipes.vary(config, _sizes(160, 224, 320, 384, 512), seeds=1)
    config = recipes.beside(__file__, "../digits.py")
    (recipes.on_cifar10 if size == "cifar10" else recipes.quick)(config)
    config.model.position = "learned"  # fixed ones are computed for any grid
    runs = {"pretrained": config}
    config = recipes.next_stage(runs)
    config.duration = "150 steps"
    config.optim.lr /= 4
    return runs | recipes.vary(config, _sizes(24, 32, 48), seeds=SEEDS[size])


def _sizes(*pixels):
    return [{"data.image_size": size} for size in pixels]
