"""MLP-Mixer: the paper's recipes on ImageNet, ImageNet-21k and JFT ("MLP-Mixer: An all-MLP Architecture
for Vision", arXiv 2105.01601, Table 4).

vit_jax train --config=configs/mixer.py:B/16,imagenet2012 --workdir=DIR
    B and L on imagenet2012 or imagenet21k (300 epochs).
vit_jax train --config=configs/mixer.py:L/16,jft300m --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    S (5 epochs), B and L (7; L/16 also --config.duration="14 epochs") and H (14). JFT is not public:
    `jft300m` and its splits stand for whatever you prepared, --config.model.num_classes for its classes.
vit_jax train --config=configs/finetune.py:cifar10 --workdir=DIR --config.init_from=CHECKPOINT
    fine-tunes them as ViTs, at 224 or at a multiple (--config.data.image_size=448); the paper gives only
    the rates, 0.003 to 0.06.

Expect, top-1 % after fine-tuning at 224 (Table 3):
                              ImageNet  ReaL   mean of 5 tasks
    ImageNet     B/16          76.44    82.36  88.33
                 L/16          71.76    77.08  87.25
    ImageNet-21k B/16          80.64    85.80  92.50
                 L/16          82.89    87.54  93.63
    JFT          S/32          68.70    75.83  87.13
                 S/16          73.83    80.60  89.50
                 B/32          75.53    81.94  90.99
                 B/16          80.00    85.56  92.60
                 L/32          80.67    85.62  93.24
                 L/16          84.05    88.14  94.51
                 L/16, 14 ep.  84.82    88.48  94.77
                 H/14          86.32    89.14  95.49
and at 448: L/16 from ImageNet-21k 84.15, H/14 from JFT 87.94 (Table 2).

Where the paper says nothing: sigmoid loss with a bias of -6.9 on ImageNet and -10 elsewhere, and a rate
that ends at 1e-5, as big_vision has them.
"""

from vit_jax import recipes
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.models.zoo import mixer

# Table 4, by data and size: epochs, rate, weight decay, level of augmentation, stochastic depth.
TABLE_4 = {
    "imagenet2012": {size: (300, 1e-3, 0.1, "medium2", 0.1) for size in "BL"},
    "imagenet21k": {"B": (300, 1e-3, 0.1, "light2", 0.1), "L": (300, 1e-3, 0.1, "strong1", 0.1)},
    "jft300m": {
        "S": (5, 3e-3, 0.03, "none", 0.0),
        "B": (7, 3e-3, 0.03, "none", 0.0),
        "L": (7, 1e-3, 0.03, "none", 0.0),
        "H": (14, 1e-3, 0.03, "none", 0.0),
    },
}
# Trained on, evaluated on, classes, the head's bias.
DATA = {
    "imagenet2012": ("train[:99%]", "validation", 1000, -6.9),
    "imagenet21k": ("full[51200:]", "full[:51200]", 21_843, -10.0),
    "jft300m": ("train", "validation", 18_291, -10.0),
}


def get_config(arg="B/16"):
    names = [name.removeprefix("Mixer-") for name in mixer.VARIANTS]
    model, data = recipes.arguments(arg, model=names, data=DATA)
    data = data or "imagenet2012"
    if model[0] not in TABLE_4[data]:
        known = ", ".join(TABLE_4[data])
        raise ConfigError(f"Mixer Table 4 has {known} on {data}, and no {model[0]}")
    epochs, lr, decay, level, drop_path = TABLE_4[data][model[0]]
    config = default_config()
    config.data.name = data
    config.data.train_split, config.data.eval_split, classes, bias = DATA[data]
    recipes.augment(config, level)
    config.model.name = f"Mixer-{model}"
    config.model.num_classes = classes
    config.model.head_bias = bias
    config.model.drop_path = drop_path
    config.model.dtype = "bfloat16"
    config.objective.loss = "sigmoid"
    config.duration = f"{epochs} epochs"
    config.batch_size = 4096
    config.optim.lr = lr
    config.optim.schedule = "linear"
    config.optim.lr_end = 1e-5
    config.optim.warmup = "10000 steps"
    config.optim.weight_decay = decay
    config.optim.clip = 1.0
    config.eval.every = "5000 steps"
    return config
