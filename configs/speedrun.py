"""A speedrun: CIFAR-10 to 60 % of its test images, as fast as possible.

vit_jax train --config=configs/speedrun.py:cifar10,muon --workdir=DIR
    adamw, muon or wide_steps: the entries, each faster than the one before. Data by TFDS; the JPEG copy with
    --config.data.name=tar --config.data.path=cifar10_jpeg.tar.
vit_jax report DIR --speedrun
    the table of docs/speedrun.md, with the rules.

Expect 60 % within minutes on two CPU cores.
"""

from vit_jax import recipes
from vit_jax.config import default_config

ENTRIES = ("adamw", "muon")


def get_config(arg="cifar10"):
    _, entry = recipes.arguments(arg, data=("cifar10",), entry=ENTRIES)
    config = default_config()
    config.data.name = "cifar10"
    config.data.image_size = 32
    config.data.train_crop = "pad"
    config.data.eval_crop = "resize"
    config.model.update(dict(name="ViT-Ti/4", pool="mean", position="sincos2d"))
    config.model.update(dict(width=128, depth=4, heads=2, mlp_dim=512, dtype="bfloat16"))
    config.duration = "10 epochs"
    config.batch_size = 128
    config.optim.lr = 2e-3
    config.optim.warmup = "5%"
    config.optim.weight_decay = 0.05
    config.eval.every = "0.5 epochs"
    config.eval.target = 0.6
    config.checkpoint.every = "0 steps"
    config.log.every = "50 steps"
    return config
