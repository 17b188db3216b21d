"""Fine-tuning any checkpoint at any resolution: the ViT paper's recipe (Table 4, §B.1.1).

vit_jax train --config=configs/finetune.py:cifar10 --workdir=DIR --config.init_from=CHECKPOINT
    cifar10, cifar100, imagenet2012, oxford_iiit_pet (or pets), oxford_flowers102 (or flowers);
vit_jax train --config=configs/finetune.py:cifar10,big_vision --workdir=DIR
    with rates and crops of big_vision's transfer.py instead of the authors' own;
vit_jax train --config=configs/finetune.py:vtab/dtd --workdir=DIR
    one of the 19 tasks of VTAB-1k, all of which share one setting;
vit_jax train --config=configs/finetune.py:photos --workdir=DIR --config.data.path=IMAGES
    your own images at 224 px on one machine: 10 epochs or at least 300 steps of 64 images;
vit_jax train --config=configs/finetune.py --workdir=DIR --config.data.name=folder
    anything else; then set what fits it, e.g. --config.data.path, --config.duration="10 epochs".

The model is the checkpoint's, a file of any format or a run: name, sizes, conventions, mean, std.
Its head is new and zero, a tanh layer before it is removed, position embeddings are interpolated
to 384 px, or to --config.data.image_size; patches of 14 do not divide 384: take 518.

Rates are the authors' default. The paper chose from 0.001, 0.003, 0.01, 0.03 (ImageNet: 0.003,
0.01, 0.03, and in Table 4 also 0.06, which the text keeps for ResNets) by the images that
train_split leaves out, then trained on all of train: `vit_jax sweep` does so. For its Table 2 on
ImageNet with --config.optim.ema=0.9999 and at 512 px.

Expect, top-1 % (released ImageNet-21k checkpoints at 384 px, by their authors; left without
dropout, right with --config.model.dropout=0.1):
             CIFAR-10       CIFAR-100      ImageNet
    B/16     99.02 / 98.76  92.06 / 91.92  84.53 / 84.12
    B/32     98.88 / 98.75  92.31 / 92.05  81.66 / 81.31
    L/16     99.13 / 99.14  92.91 / 93.22  84.47 / 85.05
    L/32     99.06 / 99.09  93.29 / 93.34  81.89 / 81.13
    R50+B/16 98.72 / 98.94  90.88 / 92.30  83.72 / 85.08
and of AugReg's B/32 with big_vision's: ImageNet 83.27, CIFAR-10 98.55, CIFAR-100 91.35, Pets 93.78,
Flowers 99.43.

Where sources differ or say nothing: on CIFAR-10 the authors took 0.01 for B/16, 0.03 for others;
here it is 0.01. Warm-ups are those of their code, big_vision and AugReg. VTAB's images are neither
cropped nor flipped: some of its tasks ask where things are. A batch goes through in 8 parts, as in
the authors' code, so that one accelerator can do it; with memory to spare, --config.accumulate=1.
"""

from vit_jax import recipes
from vit_jax.base.errors import ConfigError
from vit_jax.data.sources.known_sets import NAMED, VTAB

# Trained on, evaluated on, steps (Table 4), warm-up, rate. Those held out are for choosing.
TASKS = {
    "cifar10": ("train[:98%]", "test", 10_000, 500, 0.01),
    "cifar100": ("train[:98%]", "test", 10_000, 500, 0.03),
    "imagenet2012": ("train[:99%]", "validation", 20_000, 500, 0.03),
    "oxford_iiit_pet": ("train[:90%]", "test", 500, 100, 0.03),
    "oxford_flowers102": ("train[:90%]", "test", 500, 100, 0.03),
    **{task: ("train800+val200", "test", 2500, 200, 0.01) for task in VTAB},
    "other": ("train", "test", 2500, 200, 0.01),
}
SHORT = {"pets": "oxford_iiit_pet", "flowers": "oxford_flowers102"}
# Rate, how training images are cut.
BIG_VISION = {
    "cifar10": (0.003, "random"),
    "cifar100": (0.01, "random"),
    "imagenet2012": (0.03, "inception"),
    "oxford_iiit_pet": (0.003, "inception"),
    "oxford_flowers102": (0.003, "inception"),
}


def get_config(arg="other"):
    task, source = recipes.arguments(arg, task=(*TASKS, *SHORT, "photos"), source=("big_vision",))
    task = SHORT.get(task, task)
    if task == "photos":
        return recipes.on_photos(get_config(), epochs=10, steps=300, lr=0.01, image_size=224)
    train, evaluated, steps, warmup, rate = TASKS[task]
    config = recipes.from_checkpoint()
    config.data.name = "TASK" if task == "other" else task  # Set it on the command line.
    config.data.train_split, config.data.eval_split = train, evaluated
    config.data.image_size = 384
    config.data.eval_crop = "resize"
    if task in NAMED:
        config.data.train_crop, config.data.eval_crop = NAMED[task].crops
        config.augment.flip = NAMED[task].flip
    config.duration = f"{steps} steps"
    config.batch_size, config.accumulate = 512, 8
    config.optim.update(dict(name="sgd", b1=0.9, moment_dtype="bfloat16", lr=rate))
    config.optim.schedule = "cosine"
    config.optim.warmup = f"{warmup} steps"
    config.optim.weight_decay = 0.0
    config.optim.clip = 1.0
    config.eval.every = "10%"
    config.checkpoint.every = "10%"
    if source:
        big_vision(config, task)
    return config


def big_vision(config, task):
    if task not in BIG_VISION:
        raise ConfigError(f"big_vision's transfer.py has no {task}, only {', '.join(BIG_VISION)}")
    config.optim.lr, config.data.train_crop = BIG_VISION[task]
    config.data.resize = 448
    config.data.eval_crop = "central"
    config.data.eval_resize = 448
