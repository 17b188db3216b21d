"""DINO, iBOT and KoLeo as DINOv2 joins them: a ViT learns from images alone, without labels, from its own
moving average (DINOv2, arXiv 2304.07193; facebookresearch/dinov2).

vit_jax train --config=configs/dino.py:L/16 --workdir=DIR
    L/16, B/16 or S/16 on ImageNet; k-NN accuracy as it trains;
vit_jax train --config=configs/dino.py:continue --workdir=DIR --config.init_from=CHECKPOINT --config.data.path=IMAGES
    continues from released weights on your own images; continue and photos are those of dino_continue.py;
vit_jax train --config=configs/dino.py:smoke --workdir=DIR
    digits, without their labels, on two CPU cores: k-NN accuracy 95 %, of the random network 75; smoke,scenes learns
    from scenes of digits, whose patches configs/dino_txt.py:smoke gives words.

Then fine-tune it: vit_jax train --config=configs/finetune.py:imagenet2012 --config.init_from=DIR. What is
evaluated, fine-tuned and converted is the teacher, as the authors do.

Expect, L/16, ImageNet top-1 % of frozen features: k-NN 81.6, linear 82.9 (the authors' vitl16_short: 125,000
steps of 2,048 images, 1,250 of which they call an epoch). For B/16 and S/16 none are published.

As that run does it: centring (Sinkhorn-Knopp: --config.objective.centering=sinkhorn), one head, learned
positions, no registers; but stochastic depth grows with the layer. `vit_jax/objectives/dino/dino.py` says what else
is not theirs.
"""

import digits
import dino_continue

from vit_jax import recipes
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config

EPOCH = 1250  # steps


def get_config(arg="continue"):
    models = ("continue", "photos", "smoke", "L/16", "B/16", "S/16")
    model, data = recipes.arguments(arg, model=models, data=("scenes",))
    if data and model != "smoke":
        raise ConfigError(f"config argument {arg!r}: {data} is of smoke alone")
    if model in ("continue", "photos"):
        return dino_continue.get_config(model)
    if model != "smoke":
        return paper(model)
    config = recipes.dinov2_on_digits(digits.get_config())
    return scenes(config) if data else config


def paper(model):
    config = recipes.views_of_dinov2(default_config())
    config.data.name = "imagenet2012"
    config.data.eval_split = "validation"
    config.model.update(dict(name=f"ViT-{model}", activation="gelu", layer_scale="all"))
    config.model.init = "deit"
    config.objective.temperature_warmup = f"{30 * EPOCH} steps"
    config.objective.frozen_prototypes = f"{EPOCH} steps"
    config.duration, config.batch_size = f"{100 * EPOCH} steps", 2048
    config.optim.update(dict(lr=4e-3 * (2048 / 1024) ** 0.5, warmup=f"{10 * EPOCH} steps"))
    config.eval.update(dict(every=f"{10 * EPOCH} steps", evaluators=("knn",)))
    recipes.shard_by_size(config, model)
    return config


def scenes(config):
    """Views of twice the size."""
    config.data.update(dict(name="digit_scenes", image_size=32))
    large, blurred, small = config.data.views
    large, blurred = (view | {"crop_area": (0.5, 1.0)} for view in (large, blurred))
    config.data.views = (large, blurred, small | {"image_size": 16, "crop_area": (0.15, 0.5)})
    config.duration, config.eval.evaluators = "400 steps", ("loss",)
    return config
