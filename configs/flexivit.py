"""One ViT for all patch sizes, that is for all speeds (FlexiViT, arXiv 2212.08013): each step has patches of another
size, and the model learns from itself as it was, at its own patch.

vit_jax train --config=configs/flexivit.py:B --workdir=DIR --config.init_from=CHECKPOINT
    S, B or L on ImageNet for 90 epochs, CHECKPOINT being DeiT III's at 384 pixels, in patches of 16;
vit_jax train --config=configs/flexivit.py:i21k --workdir=DIR --config.init_from=CHECKPOINT
    on ImageNet-21k, CHECKPOINT being AugReg's B/8;
vit_jax train --config=configs/flexivit.py:photos --workdir=DIR --config.init_from=CHECKPOINT
    on your own images (--config.data.path), CHECKPOINT being a run that was fine-tuned on them;
vit_jax train --config=configs/flexivit.py:smoke --workdir=DIR --config.init_from=CHECKPOINT
    on digits, two minutes on two CPU cores, CHECKPOINT being a run of configs/digits.py.

The checkpoint is where the student begins, and its teacher, unless --config.objective.teacher names another. Both see
the same pixels, mixed ones too, each at its own size. No label is used. Evaluations have the accuracy at each size.
Afterwards: vit_jax evaluate --checkpoint=DIR --config.model.patch=24 --config.data.image_size=240.

Expect, top-1 % on ImageNet at 240 pixels in patches of 16, as timm measured the released ones of S, B, L: 82.2, 84.4,
85.3 after 300 epochs, 82.6, 84.7, 85.7 after 1,200 (--config.duration="1200 epochs"). The authors report for S and 90
epochs 10 hours on v3-32, of which evaluations took 4:39.

Sizes, epochs, rates and mixing are those of big_vision's i1k_deit3_distill.py and i21k_distill.py. Different from them:
the stored positions are those of the checkpoint's patch at 240 pixels (15 x 15 or 30 x 30), not 7 x 7; the teacher sees
the student's crop enlarged, not one cut at 384 pixels. Kernels are resized as there, bilinearly without antialiasing.
"""

from vit_jax import recipes

SIZES = (48, 40, 30, 24, 20, 16, 15, 12, 10, 8)
MODELS = {"S": "S/16", "B": "B/16", "L": "L/16", "i21k": "B/16"}


def get_config(arg="B"):
    (kind,) = recipes.arguments(arg, kind=(*MODELS, "photos", "smoke"))
    config = recipes.from_checkpoint()
    config.init_reset, config.init_resize, config.init_channels = (), "bilinear", "error"
    config.objective.update(dict(name="distill", kind="soft", alpha=1.0))
    config.objective.teacher = config.get_oneway_ref("init_from")
    config.augment.mixup = 1.0
    config.data.update(dict(image_size=240, patch_sizes=SIZES))
    config.eval.update(dict(evaluators=("patch_sizes",), best="patch_sizes/16/accuracy"))
    config.optim.update(dict(lr=1e-4, clip=1.0, warmup="5000 steps", moment_dtype="bfloat16"))
    config.optim.update(dict(weight_decay=1e-5, weight_decay_by="schedule"))
    config.eval.every, config.duration, config.batch_size = "10 epochs", "90 epochs", 1024
    if kind == "smoke":
        return smoke(config)
    if kind == "photos":
        return recipes.on_photos(config, epochs=100, steps=1000, lr=1e-4)
    recipes.shard_by_size(config, MODELS[kind])
    i1k = dict(name="imagenet2012", train_split="train", eval_split="validation")
    i21k = dict(name="imagenet21k", train_split="full[51200:]", eval_split="full[:51200]")
    config.data.update(i21k if kind == "i21k" else i1k)
    if kind == "i21k":
        config.batch_size, config.objective.loss = 4096, "sigmoid"
    return config


def smoke(config):
    """With kernels of 4 pixels, three sizes."""
    config.data.update(dict(name="digits", image_size=32, patch_sizes=(4, 8, 16)))
    config.data.update(dict(train_crop="pad", pad=4, eval_crop="resize"))
    config.augment.update(dict(flip=False, mixup=0.2))
    config.model.dtype = "float32"
    config.duration, config.batch_size = "20 epochs", 64
    config.optim.update(dict(lr=3e-3, warmup="10%", moment_dtype="float32", weight_decay=0.01))
    config.checkpoint.every, config.log.every, config.eval.every = "200 steps", "50 steps", "25%"
    return config
