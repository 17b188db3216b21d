"""Self-distillation continued with and without Gram anchoring (DINOv3, arXiv 2508.10104 §4), from a checkpoint of this
framework.

vit_jax train --config=configs/experiments/gram.py:smoke --workdir=DIR
    a small ViT on digits without their labels: DINO from the beginning, and then from its weights on with new heads,
    without Gram anchoring and with it;
vit_jax train --config=configs/experiments/gram.py:cifar10 --workdir=DIR --config.data.path=CIFAR10.tar
    the same on 10,000 photos of CIFAR-10, from tar files with the folders train/CLASS and test/CLASS, which are sorted;
vit_jax train --config=configs/experiments/gram.py --workdir=DIR --config.init_from=CHECKPOINT --config.data.path=IMAGES
    DINOv3's late phases on your own images (configs/dino_continue.py:dinov3), without and with it.

Expect of the paper's: vectors of whole images improve either way, and maps of patches get worse without it. The
small ones, one seed each, showed no difference.
"""

from vit_jax import recipes

CLASSES, TRAIN, TEST = (
    10,
    (5000, 1000),
    (1000, 200),
)  # CIFAR-10's images of a class: all, and those used
WEIGHTS = [{"objective.gram_weight": weight} for weight in (0.0, 2.0)]


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=("paper", "cifar10", "smoke"))
    if size == "paper":
        config = recipes.beside(__file__, "../dino_continue.py:dinov3")
        return recipes.vary(config, WEIGHTS, seeds=1)
    runs = {"start": cifar10() if size == "cifar10" else digits()}
    continued = recipes.next_stage(runs)
    continued.objective.momentum = (0.99, 0.99)
    continued.init_reset = ("objective/.*",)  # as with released weights, which have no heads
    # Heads are new: they learn first.
    continued.optim.update(
        dict(lr=continued.optim.lr / 2, late=(r"(?!objective/).*",), late_warmup="10%")
    )
    return runs | recipes.vary(continued, WEIGHTS, seeds=1)


def digits():
    """Constant rates, as the late phases have them."""
    config = recipes.beside(__file__, "../dino.py:smoke")
    config.model.update(dict(name="ViT-S/8", patch=8, position="sincos2d"))
    large, blurred, small = config.data.views
    sizes = [{"image_size": size} for size in (32, 32, 16)]
    views = zip((large, blurred, small), sizes, strict=True)
    config.data.update(dict(image_size=32, views=tuple(view | size for view, size in views)))
    config.duration, config.eval.every, config.checkpoint.every = "400 steps", "20%", "50%"
    config.optim.update(dict(schedule="constant", weight_decay_end=None))
    return config


def cifar10():
    config = digits()
    config.data.update(dict(name="tar", path="CIFAR10.tar"))  # Set its path on the command line.
    config.data.train_split, config.data.eval_split = some("train", *TRAIN), some("test", *TEST)
    colors = {"jitter": (0.4, 0.4, 0.2, 0.1), "jitter_probability": 0.8, "grey": 0.2}
    large = {"crop_area": (0.3, 1.0)} | colors
    small = {"count": 2, "image_size": 16, "crop_area": (0.1, 0.4)} | colors
    config.data.views = (large, large | {"solarize": 0.2}, small)
    config.augment.flip = True
    config.model.update(dict(depth=4, width=192, heads=3, mlp_dim=768))
    return config


def some(split, all_of_class, used):
    """So many images of each class, of a split that is sorted by class."""
    firsts = (c * all_of_class for c in range(CLASSES))
    return "+".join(f"{split}[{first}:{first + used}]" for first in firsts)
