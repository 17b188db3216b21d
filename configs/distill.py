"""A model learns from a teacher: from labels as well (DeiT, arXiv 2012.12877, §4), or from it alone, with patience
(arXiv 2106.05237).

vit_jax train --config=configs/distill.py:DeiT-S/16 --workdir=DIR \\
  --config.objective.teacher=CHECKPOINT
    DeiT-Ti/16, DeiT-S/16 or DeiT-B/16 with the distillation token; the teacher is a checkpoint of
    any format and family with the same classes, at its own image size and normalisation;
vit_jax train --config=configs/distill.py:DeiT-S/16,soft --workdir=DIR
    the teacher's probabilities instead of its decision;
vit_jax train --config=configs/distill.py:BiT-R50x1,patient --workdir=DIR \\
  --config.objective.teacher=CHECKPOINT
    nothing but the teacher's probabilities, for the crops and mixtures that the student sees, for 1,200 epochs;
vit_jax train --config=configs/distill.py:ViT-B/16,patient --workdir=DIR \\
  --config.objective.teacher=CHECKPOINT --config.init_from=CHECKPOINT
    the same on ImageNet-21k, from a teacher that the student begins as (FlexiViT, arXiv 2212.08013), for 90 epochs;
vit_jax train --config=configs/distill.py:photos --workdir=DIR --config.objective.teacher=RUN
    DeiT-Ti/16 on your own images (--config.data.path) on one machine, from a RUN fine-tuned on them;
vit_jax train --config=configs/distill.py:smoke --workdir=DIR --config.objective.teacher=RUN
    a small ViT on digits, 96.3 % (labels alone: 96.0), RUN being one of configs/digits.py; :smoke,soft or ,patient too.

--config.model.distilled=False removes the distillation token; patient students have none. Any model can be the
student, by --config.model.name, or the teacher. distill.py:features is configs/features.py:photos, features,smoke its
smoke.

Expect, of 300 epochs with RegNetY-16GF as the teacher and its decision, 74.5, 81.2 and 83.4 % top-1
on ImageNet (72.2, 79.9 and 81.8 without one: configs/deit.py, whose recipe this is). BiT-R50x1 with the patience of
the paper and BiT-M's R152x2 (83.0 %) as the teacher: 82.8 %; the authors publish both.

Where sources differ: soft distillation takes the paper's temperature of 3 and share of 0.1, the authors' code 1
and 0.5. The paper's teacher is a RegNet, which is not here. The patient recipes are big_vision's (bit_i1k.py,
FlexiViT's), which calls 1,200 epochs a good middle way.
"""

import deit
import features

from vit_jax import recipes
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config

KINDS = ("hard", "soft", "patient")
SIZES = {"DeiT-Ti/16": "Ti", "DeiT-S/16": "S", "DeiT-B/16": "B"}
PATIENT = {  # data set, trained on, evaluated on, classes; epochs; learning rate, decay
    "BiT-R50x1": (("imagenet2012", "train[:98%]", "validation", 1000), 1200, 0.03, 3e-4),
    "ViT-B/16": (("imagenet21k", "full[51200:]", "full[:51200]", 21_843), 90, 1e-4, 1e-5),
}


def get_config(arg="DeiT-S/16"):
    if arg.startswith("features"):
        return features.get_config(arg.removeprefix("features").removeprefix(",") or "photos")
    model, kind = recipes.arguments(arg, model=("smoke", "photos", *SIZES, *PATIENT), kind=KINDS)
    if model != "smoke" and (kind == "patient") != (model in PATIENT):
        raise ConfigError(f"config argument {arg!r}: patient are only {', '.join(PATIENT)}")
    if kind == "patient":
        return patient(smoke() if model == "smoke" else long(model))
    config = smoke() if model == "smoke" else deit.get_config(SIZES.get(model, "Ti"))
    if model == "photos":
        own = {"repeats": 1, "num_classes": None}
        recipes.on_photos(config, epochs=100, steps=1000, lr=5e-4 * 64 / 512, **own)
    smoothing = config.objective.label_smoothing
    config.objective.update(dict(name="distill", teacher="", label_smoothing=smoothing))
    config.objective.kind = kind or "hard"
    if kind == "soft":
        config.objective.alpha = 0.1
        config.objective.temperature = 3.0
    config.model.distilled = True
    return config


def patient(config):
    config.augment.mixup = 1.0
    config.objective.update(dict(name="distill", teacher="", kind="soft", alpha=1.0))
    return config


def long(model):
    (name, train, evaluated, classes), epochs, lr, decay = PATIENT[model]
    config = default_config()
    config.data.name = name
    config.data.train_split, config.data.eval_split = train, evaluated
    config.model.update(dict(name=model, num_classes=classes, dtype="bfloat16"))
    config.duration = f"{epochs} epochs"
    config.batch_size = 4096
    config.optim.lr = lr
    config.optim.warmup = "5000 steps"
    config.optim.moment_dtype = "bfloat16"
    config.optim.weight_decay = decay
    config.optim.weight_decay_by = "schedule"
    config.eval.every = "10 epochs"
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.model.update(dict(name="ViT-S/8", width=32, depth=2, heads=2, mlp_dim=128, pool="token"))
    return config
