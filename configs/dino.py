"""DINO, iBOT and KoLeo as DINOv2 joins them: a ViT learns from images alone, without labels, from its own
moving average (DINOv2, arXiv 2304.07193; facebookresearch/dinov2).

vit_jax train --config=configs/dino.py:L/16 --workdir=DIR
    L/16, B/16 or S/16 on ImageNet; k-NN accuracy as it trains;
vit_jax train --config=configs/dino.py:continue --workdir=DIR --config.init_from=CHECKPOINT --config.data.path=IMAGES
    continues from released weights on your own images; continue and photos are those of dino_continue.py;
vit_jax train --config=configs/dino.py:smoke --workdir=DIR
    digits, without their labels, on two CPU cores: k-NN accuracy 95 %, of the random network 75.

Then fine-tune it: vit_jax train --config=configs/finetune.py:imagenet2012 --config.init_from=DIR. What is
evaluated, fine-tuned and converted is the teacher, as the authors do.

Expect, L/16, ImageNet top-1 % of frozen features: k-NN 81.6, linear 82.9 (the authors' vitl16_short: 125,000
steps of 2,048 images, 1,250 of which they call an epoch). For B/16 and S/16 none are published.

As that run does it: centring (Sinkhorn-Knopp: --config.objective.centering=sinkhorn), one head, learned
positions, no registers; but stochastic depth grows with the layer. `vit_jax/objectives/dino/dino.py` says what else
is not theirs.
"""

from vit_jax import recipes
from vit_jax.config import default_config

EPOCH = 1250  # steps
CHANGES = {"jitter": (0.4, 0.4, 0.2, 0.1), "jitter_probability": 0.8, "grey": 0.2}
GLOBAL = {"crop_area": (0.32, 1.0)} | CHANGES
LOCAL = {"count": 8, "image_size": 96, "crop_area": (0.05, 0.32), "blur": 0.5} | CHANGES


def get_config(arg="continue"):
    models = ("continue", "photos", "smoke", "L/16", "B/16", "S/16")
    (model,) = recipes.arguments(arg, model=models)
    if model in ("continue", "photos"):
        import dino_continue

        return dino_continue.get_config(model)
    return smoke() if model == "smoke" else paper(model)


def with_views(config, local):
    config.objective.name = "dino"
    config.data.update(dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))
    config.data.views = (GLOBAL | {"blur": 1.0}, GLOBAL | {"blur": 0.1, "solarize": 0.2}, local)
    config.data.update(dict(image_size=224, interpolation="bicubic"))
    config.model.update(dict(dtype="bfloat16", drop_path=0.3))
    config.optim.lr_end = 1e-6
    config.optim.update(dict(weight_decay=0.04, weight_decay_end=0.4))
    config.optim.weight_decay_rules = ((".*(kernel|token|registers|position|mask)", 1.0),)
    config.optim.update(dict(clip=3.0, lr_rules=(("embedding/.*", 0.2),), layer_decay=0.9))
    return config


def paper(model):
    config = with_views(default_config(), LOCAL)
    config.data.name = "imagenet2012"
    config.data.eval_split = "validation"
    config.model.update(dict(name=f"ViT-{model}", activation="gelu", layer_scale="all"))
    config.objective.temperature_warmup = f"{30 * EPOCH} steps"
    config.objective.frozen_prototypes = f"{EPOCH} steps"
    config.duration, config.batch_size = f"{100 * EPOCH} steps", 2048
    config.optim.update(dict(lr=4e-3 * (2048 / 1024) ** 0.5, warmup=f"{10 * EPOCH} steps"))
    config.eval.update(dict(every=f"{10 * EPOCH} steps", evaluators=("knn",)))
    recipes.shard_by_size(config, model)
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.objective.update(dict(prototypes=256, head_hidden=128, bottleneck=32, head_std=0.1))
    config.objective.update(dict(name="dino", momentum=(0.99, 1.0), patch_weight=0.5))
    config.objective.update(dict(temperature_warmup="0 steps", teacher_temperature=(0.04, 0.04)))
    large = {"crop_area": (0.7, 1.0), "jitter": (0.4, 0.4, 0.0, 0.0)}
    small = {"count": 2, "image_size": 8, "crop_area": (0.4, 0.7), "blur": 0.5}
    views = (large, large | {"blur": 0.5}, large | small)
    config.data.update(dict(image_size=16, train_crop="inception", views=views))
    config.augment.mixup = 0.0
    config.model.update(dict(pool="token", depth=2, position="sincos2d"))
    config.duration = "1500 steps"
    config.optim.update(dict(lr=1e-3, warmup="10%", clip=3.0, ema=0.0))
    config.optim.update(dict(weight_decay=0.04, weight_decay_end=0.4))
    config.eval.update(dict(every="10%", evaluators=("knn",)))
    return config
