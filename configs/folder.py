"""A small ViT from scratch on your own images, on any machine.

vit_jax train --config=configs/folder.py --workdir=DIR --config.data.path=IMAGES
    IMAGES has a sub-folder for each class, or train/ and test/ with such sub-folders, or is a CSV
    file of path,label. Without a test set, a tenth of the images is held out. The classes come from
    the images.

The recipe of vit_s16_i1k.py made small: at 128 px ViT-Ti/16 needs 0.7 GFLOPs an image, and two busy
CPU cores trained
on 50 to 100 images a second: half an hour or less for 100 epochs of 1,000 images. If left and right
matter in them, --config.augment.flip=False. No accuracy can be promised for your images; with few
of them, fine-tune (finetune.py).
"""

from vit_jax import recipes
from vit_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "folder"
    config.data.examine, config.data.on_bad_image = True, "skip"
    config.data.image_size = 128
    config.data.crop_area = (0.2, 1.0)
    config.data.eval_resize = 146
    recipes.augment(config, "light2")
    config.model.name = "ViT-Ti/16"
    config.model.pool = "mean"
    config.model.position = "sincos2d"
    config.model.dtype = "bfloat16"
    config.duration = "100 epochs"
    config.batch_size = 64
    config.optim.lr = 1e-3
    config.optim.warmup = "10%"
    config.optim.weight_decay = 0.05
    config.eval.every = "10%"
    config.checkpoint.every = "200 steps"
    config.log.every = "20 steps"
    return config
