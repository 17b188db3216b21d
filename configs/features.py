"""A small model learns the features of one large model, or of several, from images alone: no labels, no heads
(UNIC, ECCV 2024; naver/unic).

vit_jax train --config=configs/features.py:photos --workdir=DIR --config.data.path=PHOTOS \\
  --config.objective.teachers='("dinov3_vitl16.safetensors",)'
    a ViT-S/16 of your own images on one machine; also configs/distill.py:features;
vit_jax train --config=configs/features.py:unic --workdir=DIR \\
  --config.objective.teachers='("DINO", "DEIT3", "IBOT", "DBOT")'
    a ViT-B/16 on ImageNet for 200 epochs, better than each of its four teachers on the mean of their tasks;
vit_jax train --config=configs/features.py:smoke --workdir=DIR --config.objective.teachers='("RUN",)'
    a small ViT on digits, on two CPU cores, RUN being one of configs/digits.py.

Teachers are checkpoints of any format and family, each at its own size and normalisation. Any model can be the
student, by --config.model.name. What is saved for use, converted and fine-tuned is the student alone.

UNIC's own: ladder, loss, dropping of teachers, running moments, decay 0.03, rate 3e-4 for 256 images, warm-up of 10
epochs, colours of its crops. Of its blur, with a kernel of 9 pixels, the deviation is ours. Of photos the rate of
5e-4 for 1,536 images, by the root of the batch, and mixed images are LightlyTrain's (its distillation v3).
"""

import digits

from vit_jax import recipes
from vit_jax.config import default_config


def get_config(arg="photos"):
    (kind,) = recipes.arguments(arg, kind=("photos", "unic", "smoke"))
    if kind == "smoke":
        return smoke()
    config = default_config()
    config.objective.name = "features"
    config.model.update(dict(name="ViT-S/16", dtype="bfloat16", pool="token", activation="gelu"))
    config.data.update(dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))
    config.data.update(dict(image_size=224, interpolation="bicubic", crop_area=(0.08, 1.0)))
    config.optim.update(dict(b2=0.99, weight_decay=0.03, lr_end=1e-6, warmup="10 epochs"))
    return photos(config) if kind == "photos" else unic(config)


def unic(config):
    config.data.update(dict(name="imagenet2012", train_split="train", eval_split="validation"))
    config.model.update(dict(name="ViT-B/16", drop_path=0.1))
    config.augment.update(dict(jitter=(0.4, 0.4, 0.2, 0.1), jitter_probability=0.8, grey=0.2))
    config.augment.update(dict(blur=0.2, solarize=0.2))
    config.duration, config.batch_size = "200 epochs", 512
    config.optim.lr = 3e-4 * 512 / 256
    config.eval.update(dict(every="10 epochs", evaluators=("knn",)))
    return config


def photos(config):
    config.objective.adaptor = "mlp"
    config.augment.mixup = 1.0
    config.eval.evaluators = ("loss",)  # Of images without classes; with them knn says more.
    config.optim.update(dict(b2=0.999, weight_decay=0.04))
    return recipes.on_photos(config, epochs=100, steps=1000, lr=5e-4 * (64 / 1536) ** 0.5)


def smoke():
    config = digits.get_config()
    config.objective.update(dict(name="features", hidden=64, last_hidden=128))
    config.augment.mixup = 0.0
    config.optim.ema, config.duration = 0.0, "20 epochs"
    config.eval.evaluators = ("knn",)
    return config
