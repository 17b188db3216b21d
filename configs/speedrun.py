"""A speedrun: CIFAR-10 to 60 % of its test images as fast as possible, from the start of the process on.

vit_jax train --config=configs/speedrun.py:cifar10,adamw --workdir=DIR/adamw
    adamw, muon, small_images, whole_images or growing_images: each is made to be faster than the previous; by
    default the last.
    The data comes by TFDS. For tar files of its images as JPEG (train/CLASS/…, test/CLASS/…), add
    --config.data.name=tar --config.data.path=FILE.
vit_jax report DIR --speedrun
    prints the table of times. An entry has three seeds or more, each a process of its own.

Expect an end at 60 %: on two cores of an AMD EPYC after 224 s (muon) to 108 s (whole_images), on slower ones after
193 s (whole_images) and 164 s (growing_images).
"""

from vit_jax import recipes
from vit_jax.config import default_config

# What each changes beside all before it.
ENTRIES = {
    "adamw": {"duration": "10 epochs"},
    "muon": {"duration": "4 epochs", "optim.name": "muon"},  # fewer steps
    "small_images": {"data.image_size": 24},  # 36 patches instead of 64: shorter steps
    # In so few epochs no image is learned by heart, and images without shifts are learned sooner.
    "whole_images": {"duration": "2.5 epochs", "data.train_crop": "resize"},
    # Three quarters of the steps on 16 patches for 36; only the last evaluation can reach the target.
    "growing_images": {"data.size_schedule": ((0, 16), (0.75, 24)), "eval.every": "1.25 epochs"},
}


def get_config(arg="cifar10"):
    _, entry = recipes.arguments(arg, data=("cifar10",), entry=ENTRIES)
    config = default_config()
    config.data.update(dict(name="cifar10", image_size=32, train_crop="pad", eval_crop="resize"))
    config.model.update(dict(name="ViT-Ti/4", pool="mean", position="sincos2d", dtype="bfloat16"))
    config.model.update(dict(width=128, depth=4, heads=2, mlp_dim=512))
    config.batch_size = 64
    config.optim.update(dict(lr=2e-3, warmup="5%", weight_decay=0.05))
    config.eval.update(dict(every="0.5 epochs", target=0.6))
    config.checkpoint.every = "0 steps"
    config.compilation_cache = ""  # compiling counts
    config.log.update(dict(every="100 steps", tensorboard=False))
    for name, fields in ENTRIES.items():
        config.update_from_flattened_dict(fields)
        if name == entry:
            break
    return config
