"""Position embeddings, every kind at every place (ViT §D.4, Table 8; arXiv 2010.11929).

vit_jax train --config=configs/experiments/positions.py:smoke --workdir=DIR
    digits of 4 x 4 patches, two seeds each: 22 runs, six to eight minutes of a CPU core.
vit_jax train --config=configs/experiments/positions.py:cifar10 --workdir=DIR
    CIFAR-10 of 8 x 8 patches, every kind at its usual place, three seeds each: 15 runs, ten minutes of a CPU core.
    The data comes by TFDS. For a tar file of its images as JPEG (train/CLASS/…, test/CLASS/…), add
    --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/positions.py:smoke,large --workdir=DIR
    digits at twice the resolution, 8 x 8 patches.
vit_jax train --config=configs/experiments/positions.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
vit_jax train --config=configs/experiments/positions.py:paper,large --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    the paper's ViT-B/16 on JFT at 224 px, and at 512 px, where a reader of the paper expected 2-D and
    relative positions to win; nobody has printed a number for that. On CIFAR-10 they do not: of 8 x 8 patches
    1-D and 2-D ones have 36.3 %, relative ones 33.7 % (three seeds); of 16 x 16 (cifar10,large) 1-D ones 38.5 %,
    2-D 37.9, relative 37.2 (two seeds).

Expect of the paper's: 61.4 without positions, 64.0 to 64.3 with any (5-shot ImageNet): that there are some
matters, not which. Of the table's twelve cells, none has no place, relative acts in layers only, and what is
fixed is the same in every layer: eleven settings here, with fixed ones (sincos2d) beside the paper's.
"""

from vit_jax import recipes

CELLS = [
    ("none", "auto"),
    *[(kind, place) for kind in ("learned", "learned2d") for place in ("stem", "layers", "shared")],
    *[("sincos2d", place) for place in ("stem", "shared")],
    *[("relative", place) for place in ("layers", "shared")],
]
KINDS = [(kind, "auto") for kind in ("none", "learned", "learned2d", "sincos2d", "relative")]
SEEDS = {"paper": 1, "cifar10": 3, "smoke": 2}


def get_runs(arg="paper"):
    size, resolution = recipes.arguments(arg, size=SEEDS, resolution=("usual", "large"))
    config = recipes.beside(__file__, "../vit_jft.py:B/16" if size == "paper" else "../digits.py")
    config.model.pool = "token"
    if size == "cifar10":
        recipes.on_cifar10(config)
        config.model.update(dict(name="ViT-S/4", depth=2))  # 64 tokens cost four times as much
    elif size == "smoke":
        recipes.quick(config, "300 steps")
    if resolution == "large":
        config.data.image_size = 512 if size == "paper" else 64
    cells = KINDS if size == "cifar10" else CELLS
    settings = [{"model.position": kind, "model.position_at": place} for kind, place in cells]
    return recipes.vary(config, settings, seeds=SEEDS[size])
