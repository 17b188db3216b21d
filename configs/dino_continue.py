"""DINOv3 continued: released weights continue learning from your own images, which need no classes, with the two late
phases of DINOv3 (arXiv 2508.10104 §4): Gram anchoring, and from half of the run on views of several larger sizes.

vit_jax train --config=configs/dino_continue.py --workdir=DIR --config.init_from=CHECKPOINT --config.data.path=IMAGES
    from DINOv2's weights, or any ViT's: sizes are such that patches of 14 and of 16 divide them;
vit_jax train --config=configs/dino_continue.py:dinov3 --workdir=DIR --config.init_from=CHECKPOINT …
    from DINOv3's (ViT-S to 7B), at its authors' sizes, up to 768 pixels, and with rescaled rotary positions;
vit_jax train --config=configs/dino_continue.py:photos --workdir=DIR --config.init_from=CHECKPOINT …
    with some thousand images on one machine: 20 epochs or at least 500 steps of 64 images, without the late phases;
vit_jax train --config=configs/dino_continue.py:smoke --workdir=DIR
    digits, without their labels or a checkpoint, on two CPU cores: rotary positions, Gram anchoring from half of the
    run on, views of two sizes in the last quarter.

Teacher, student and Gram teacher begin with the checkpoint's weights; heads, which are not
released, are new; those of a run of your own continue, as in DINOv3's later stages. Rates,
momentum and decay are constant after the warm-up, as the authors'; rate and length are our choice. The Gram teacher
sees the global views at twice their size (1.5 times in the second half) without changes of colours, takes the
teacher's weights after 20 and 40 % of the run, and stays as it is then. Local views of 168 pixels, which patches of 16
do not divide, are of 176. Not here: FP8, and norms of their own for class tokens and local views.
"""

import digits

from vit_jax import recipes

# Shares of the steps, sizes of global and of local views.
SIZES = {
    "continue": ((0.3, 448, 112), (0.6, 672, 112), (0.05, 672, 224), (0.05, 672, 336)),
    "dinov3": ((0.3, 512, 112), (0.3, 768, 112), (0.3, 768, 176), (0.05, 768, 224), (0.05, 768, 336)),
}  # fmt: skip


def get_config(arg="continue"):
    (model,) = recipes.arguments(arg, model=(*SIZES, "photos", "smoke"))
    if model == "smoke":
        return smoke()
    # Patches of 14 and of 16 divide 112.
    config = recipes.views_of_dinov2(recipes.from_checkpoint(), local_pixels=112)
    config.data.update(dict(name="folder", path="IMAGES"))  # Set its path on the command line.
    config.init_resize = "bicubic"
    config.objective.update(dict(temperature_warmup="0 steps", teacher_temperature=(0.07, 0.07)))
    config.batch_size = 256
    config.optim.update(dict(lr=2e-4, warmup="10%"))
    config.eval.every = "10%"
    if model == "photos":
        config.objective.prototypes = 4096
        return recipes.on_photos(config, epochs=20, steps=500, lr=1e-4)
    return late_phases(config, model)


def late_phases(config, model):
    *views, local = config.data.views
    config.data.views = (*(view | {"again": 2.0} for view in views), local)
    config.data.view_sizes = tuple(
        {"share": share, "sizes": (large, large, small), "again": 1.5, "start": "50%"}
        for share, large, small in SIZES[model]
    )
    config.objective.update(dict(gram_weight=2.0, gram_refresh="20%", gram_refreshes=2))
    config.objective.update(dict(momentum=(0.999, 0.999), centering="sinkhorn"))
    constant(config.optim, lr=5e-5)
    if model == "dinov3":
        config.data.image_size = 256
        config.model.rope_rescale = 2.0
    return config


def smoke():
    config = recipes.dinov2_on_digits(digits.get_config())
    large, blurred, small = config.data.views
    config.data.views = (large | {"again": 2.0}, blurred | {"again": 2.0}, small)
    config.data.view_sizes = (
        {"share": 0.5, "sizes": (16, 16, 8), "start": "75%"},
        {"share": 0.5, "sizes": (24, 24, 12), "start": "75%", "again": 1.5},
    )
    config.model.update(dict(position="none", rope="centred", rope_theta=100.0, rope_rescale=1.5))
    config.model.update(dict(rope_jitter=1.2, rope_shift=0.1))
    config.objective.update(dict(gram_weight=2.0, gram_start="50%"))
    config.objective.update(dict(gram_refresh="10%", gram_refreshes=2))
    constant(config.optim, lr=1e-3)
    return config


def constant(optim, lr):
    optim.update(dict(lr=lr, schedule="constant", lr_end=0.0, weight_decay_end=None))
