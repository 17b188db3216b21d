"""DeiT without a teacher, on ImageNet ("Training data-efficient image transformers", arXiv
2012.12877).

vit_jax train --config=configs/deit.py:S --workdir=DIR
    Ti, S or B: the sizes of the paper, with patches of 16 pixels.

Expect 72.2, 79.9 and 81.8 % top-1 on ImageNet's validation set after 300 epochs.

As the authors' code and timm 0.3.2, which it uses, do it. Colour jitter, 0.3 or 0.4 in that code, is
off here: timm makes it only where there is no RandAugment. An average of the parameters
(--config.optim.ema=0.99996) is kept there too, but not evaluated.
"""

from vit_jax import recipes
from vit_jax.config import default_config


def get_config(arg="S"):
    (size,) = recipes.arguments(arg, size=("Ti", "S", "B"))
    config = default_config()
    config.data.name = "imagenet2012"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.crop_area = (0.08, 1.0)
    config.data.repeats = 3
    config.data.mean = (0.485, 0.456, 0.406)
    config.data.std = (0.229, 0.224, 0.225)
    recipes.randaugment_of_deit(config)
    config.augment.erasing = 0.25
    config.augment.mixup = 0.8
    config.augment.cutmix = 1.0
    config.augment.mix_switch = 0.5
    config.model.name = f"DeiT-{size}/16"
    config.model.num_classes = 1000
    # trunc_normal_(std=0.02) there, which cuts at ±2: a hundred standard deviations.
    config.model.head_init = "normal"
    config.model.drop_path = 0.1
    config.model.dtype = "bfloat16"
    config.objective.loss = "softmax"
    config.objective.label_smoothing = 0.1
    config.duration = "300 epochs"
    config.batch_size = 1024
    config.optim.lr = 5e-4 * 1024 / 512
    config.optim.lr_end = 1e-5
    config.optim.schedule = "cosine"
    config.optim.warmup = "5 epochs"
    config.optim.weight_decay = 0.05
    config.optim.clip = 0.0
    config.eval.every = "5 epochs"
    recipes.shard_by_size(config, f"{size}/16")
    return config
