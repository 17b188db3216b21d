"""DINO, iBOT and KoLeo as DINOv2 joins them: a ViT learns from images alone, without labels, from its own
moving average (DINOv2, arXiv 2304.07193; facebookresearch/dinov2).

vit_jax train --config=configs/dino.py:L/16 --workdir=DIR
    L/16, B/16 or S/16 on ImageNet; k-NN accuracy as it trains;
vit_jax train --config=configs/dino.py --workdir=DIR --config.init_from=CHECKPOINT --config.data.path=IMAGES
    goes on from released weights (DINOv2's) on your own images, which need no classes;
    --config.init_resize=dinov2 for those without registers. Local views are of 112 pixels, which
    patches of 14 and of 16 divide (the authors' are of 98, for 14). Images are normalised as DINOv2's;
    for other models --config.data.mean="()" --config.data.std="()" takes what the checkpoint says;
vit_jax train --config=configs/dino.py:smoke --workdir=DIR
    digits, without their labels, in three minutes on two CPU cores.

Then fine-tune it: vit_jax train --config=configs/finetune.py:imagenet2012 --config.init_from=DIR. What is
evaluated, fine-tuned and converted is the teacher, as the authors do.

Expect, L/16, ImageNet top-1 % of frozen features: k-NN 81.6, linear 82.9 (the authors' vitl16_short: 125,000
steps of 2,048 images). No results of B/16 and S/16 with this recipe are published.

As that run does it: centring (Sinkhorn-Knopp: --config.objective.centering=sinkhorn, the authors' for their
released models), one head for class tokens and patches, learned positions, no registers. An "epoch" of the
authors is 1,250 steps. Where it is not as theirs, `vit_jax/objectives/dino.py` says so; stochastic depth
grows with the layer here, and is the same in all there. Going on from released weights, rate and length are
our choice, a tenth of the authors' rate and 10 epochs; heads are not released and start anew.
"""

from vit_jax import recipes
from vit_jax.config import default_config

EPOCH = 1250  # steps
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def get_config(arg="continue"):
    (model,) = recipes.arguments(arg, model=("continue", "smoke", "L/16", "B/16", "S/16"))
    if model == "smoke":
        return smoke()
    config = recipes.from_checkpoint() if model == "continue" else paper(model)
    config.objective.name = "dino"
    config.data.image_size = 224
    config.data.interpolation = "bicubic"
    config.data.views = views(112 if model == "continue" else 96)
    config.model.dtype = "bfloat16"
    config.model.drop_path = 0.3
    config.optim.b2 = 0.999
    config.optim.schedule = "cosine"
    config.optim.lr_end = 1e-6
    config.optim.weight_decay = 0.04
    config.optim.weight_decay_end = 0.4
    config.optim.weight_decay_rules = ((".*(kernel|token|registers|position|mask)", 1.0),)
    config.optim.clip = 3.0
    config.optim.lr_rules = (("embedding/.*", 0.2),)
    config.optim.layer_decay = 0.9
    if model == "continue":
        going_on(config)
    return config


def views(local):
    """2 global views and 8 local ones."""
    changes = {"jitter": (0.4, 0.4, 0.2, 0.1), "jitter_probability": 0.8, "grey": 0.2}
    large = {"crop_area": (0.32, 1.0), **changes}
    small = {"count": 8, "image_size": local, "crop_area": (0.05, 0.32), "blur": 0.5, **changes}
    return ({"blur": 1.0, **large}, {"blur": 0.1, "solarize": 0.2, **large}, small)


def paper(model):
    config = default_config()
    config.data.name = "imagenet2012"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.mean, config.data.std = MEAN, STD
    config.model.name = f"ViT-{model}"
    config.model.activation = "gelu"
    config.model.layer_scale = "all"
    config.objective.temperature_warmup = f"{30 * EPOCH} steps"
    config.objective.frozen_prototypes = f"{EPOCH} steps"
    config.duration = f"{100 * EPOCH} steps"
    config.batch_size = 2048
    config.optim.lr = 4e-3 * (2048 / 1024) ** 0.5
    config.optim.warmup = f"{10 * EPOCH} steps"
    config.eval.every = f"{10 * EPOCH} steps"
    config.eval.evaluators = ("knn",)
    return config


def going_on(config):
    config.data.name = "folder"
    config.data.path = "IMAGES"  # To be said on the command line.
    config.data.mean, config.data.std = MEAN, STD
    config.init_reset = ()
    config.init_resize = "bicubic"
    config.objective.temperature_warmup = "0 steps"
    config.objective.teacher_temperature = (0.07, 0.07)
    config.objective.momentum = (0.994, 1.0)
    config.duration = "10 epochs"
    config.batch_size = 256
    config.optim.lr = 2e-4
    config.optim.warmup = "10%"
    config.optim.weight_decay = 0.04
    config.eval.every = "10%"


def smoke():
    import digits

    config = digits.get_config()
    config.objective.name = "dino"
    config.augment.mixup = 0.0
    config.data.train_crop = "inception"
    large = {"crop_area": (0.5, 1.0), "jitter": (0.4, 0.4, 0.0, 0.0)}
    small = {"count": 2, "image_size": 16, "crop_area": (0.2, 0.5), "blur": 0.5}
    config.data.views = (large, large | {"blur": 0.5}, small)
    config.model.pool = "token"
    config.model.depth = 2
    config.objective.prototypes = 256
    config.objective.head_hidden = 128
    config.objective.bottleneck = 32
    config.objective.momentum = (0.98, 1.0)
    config.objective.temperature_warmup = "30%"
    config.objective.frozen_prototypes = "1 epoch"
    config.duration = "20 epochs"
    config.optim.lr = 1e-3
    config.optim.warmup = "10%"
    config.optim.weight_decay = 0.04
    config.optim.weight_decay_end = 0.4
    config.optim.clip = 3.0
    config.optim.ema = 0.0
    config.eval.every = "25%"
    config.eval.evaluators = ("knn",)
    return config
