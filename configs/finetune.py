"""Fine-tuning a pre-trained ViT at a higher resolution: the ViT paper's recipe (Table 4, §B.1.1).

vit_jax train --config=configs/finetune.py:cifar10 --workdir=DIR --config.init_from=CHECKPOINT
vit_jax train --config=configs/finetune.py:imagenet2012,L/16 --workdir=DIR
    --config.init_from=CHECKPOINT cifar10, cifar100, imagenet2012, oxford_iiit_pet or
    oxford_flowers102; then the checkpoint's model, by default B/16.

But for its head the model has to be as in the checkpoint: say --config.model.pool and
--config.model.position if they were not class token and learnt positions, which are interpolated.
Images have 384 px; 518 where patches are of 14.

The rate is the authors' default, worth choosing from 0.001, 0.003, 0.01, 0.03 (for ImageNet 0.003,
0.01, 0.03, and in Table 4 also 0.06, which the text keeps for ResNets), by the images left out of
training: for cifar10 --config.data.eval_split='train[98%:]'. The paper then trained again with
--config.data.train_split=train; for Table 2 on ImageNet with --config.optim.ema=0.9999 and at 512
px (--config.data.image_size).

Expect, top-1 % (released ImageNet-21k checkpoints at 384 px, by their authors; left without
dropout, right with --config.model.dropout=0.1):
             CIFAR-10       CIFAR-100      ImageNet
    B/16     99.02 / 98.76  92.06 / 91.92  84.53 / 84.12
    B/32     98.88 / 98.75  92.31 / 92.05  81.66 / 81.31
    L/16     99.13 / 99.14  92.91 / 93.22  84.47 / 85.05
    L/32     99.06 / 99.09  93.29 / 93.34  81.89 / 81.13
and of AugReg's B/32 (big_vision's transfer.py; rate): ImageNet 83.27 (0.03), Pets 93.78 (0.003),
Flowers 99.43 (0.003), and with --config.data.train_crop=random --config.data.resize=448 CIFAR-10
98.55 (0.003), CIFAR-100 91.35 (0.01); all evaluated with --config.data.eval_crop=central
--config.data.eval_resize=448.

A batch goes through in 8 parts, as in the authors' code, so that one accelerator can do it; with
more than 64 of them, or memory to spare, --config.accumulate=1.
"""

from vit_jax import recipes
from vit_jax.config import default_config

# Classes, share of the images trained on, what is evaluated, steps (Table 4), warm-up. Shares and
# warm-up are those of the authors' code and of big_vision's transfer.py.
TASKS = {
    "cifar10": (10, "98%", "test", 10_000, 500),
    "cifar100": (100, "98%", "test", 10_000, 500),
    "imagenet2012": (1000, "99%", "validation", 20_000, 500),
    "oxford_iiit_pet": (37, "90%", "test", 500, 100),
    "oxford_flowers102": (102, "90%", "test", 500, 100),
}


def get_config(arg="cifar10"):
    task, model = recipes.arguments(arg, task=TASKS, model=recipes.vit_names())
    model = model or "B/16"
    classes, share, evaluated, steps, warmup = TASKS[task]
    config = default_config()
    config.init_from = "CHECKPOINT"  # Has to be said: without it the run would start from nothing.
    config.init_reset = ("(head|representation)/.*",)
    config.data.name = task
    config.data.train_split = f"train[:{share}]"
    config.data.eval_split = evaluated
    config.data.image_size = 518 if model.endswith("/14") else 384
    config.data.eval_crop = "resize"
    config.model.name = f"ViT-{model}"
    config.model.num_classes = classes
    config.model.dtype = "bfloat16"
    config.duration = f"{steps} steps"
    config.batch_size = 512
    config.accumulate = 8
    config.optim.name = "sgd"
    config.optim.b1 = 0.9
    config.optim.moment_dtype = "bfloat16"
    config.optim.lr = 0.01 if (task, model) == ("cifar10", "B/16") else 0.03
    config.optim.schedule = "cosine"
    config.optim.warmup = f"{warmup} steps"
    config.optim.weight_decay = 0.0
    config.optim.clip = 1.0
    config.eval.every = "10%"
    return config
