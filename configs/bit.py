"""BiT's ResNets from the beginning: BiT-S, M and L ("Big Transfer", arXiv 1912.11370, §3.2).

vit_jax train --config=configs/bit.py:S,R50x1 --workdir=DIR
    S is trained on ImageNet, M on ImageNet-21k, L on JFT; R50x1, R101x1, R50x3, R101x3, R152x4 and the
    others of `vit_jax models`.
vit_jax train --config=configs/bit.py:L,R152x4 --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    JFT is not public: `jft300m` and its splits stand for whatever you prepared,
    --config.model.num_classes for its classes.

Expect 76.0 % top-1 on ImageNet of S,R50x1 as it comes (the paper's comparison of norms); fine-tune by
configs/bit_hyperrule.py, which says what to expect of R152x4 then.

SGD with momentum 0.9 and a rate of 0.03 for 256 images, divided by 10 three times (L: four times); weight decay
of 1e-4.

Where the paper says nothing: the decay is part of the gradient, as usual with SGD; the loss is that of
big_vision, softmax for S, for M and L sigmoid with a bias of -10; no clipping.
"""

from vit_jax import recipes
from vit_jax.config import default_config
from vit_jax.models.zoo import resnet

# Data set, trained on, evaluated on, classes; epochs, and after how many of them the rate falls.
KINDS = {
    "S": (("imagenet2012", "train", "validation", 1000), 90, (30, 60, 80)),
    "M": (("imagenet21k", "full[51200:]", "full[:51200]", 21_843), 90, (30, 60, 80)),
    "L": (("jft300m", "train", "validation", 18_291), 40, (10, 23, 30, 37)),
}


def get_config(arg="S,R50x1"):
    names = [name.removeprefix("BiT-") for name in resnet.VARIANTS if name.startswith("BiT-")]
    kind, model = recipes.arguments(arg, kind=KINDS, model=names)
    (name, train, evaluated, classes), epochs, falls = KINDS[kind]
    config = default_config()
    config.data.name = name
    config.data.train_split, config.data.eval_split = train, evaluated
    config.model.name = f"BiT-{model or 'R50x1'}"
    config.model.num_classes = classes
    config.model.dtype = "bfloat16"
    if kind != "S":
        config.model.head_bias = -10.0
    config.objective.loss = "softmax" if kind == "S" else "sigmoid"
    config.duration = f"{epochs} epochs"
    config.batch_size = 4096
    config.optim.name = "sgd"
    config.optim.b1 = 0.9
    config.optim.lr = 0.03 * 4096 / 256
    config.optim.schedule = "staircase"
    config.optim.factor = 0.1
    config.optim.boundaries = tuple(f"{epoch} epochs" for epoch in falls)
    config.optim.warmup = "5000 steps"
    config.optim.weight_decay = 1e-4
    config.optim.weight_decay_by = "gradient"
    config.optim.clip = 0.0
    config.eval.every = "5000 steps"
    return config
