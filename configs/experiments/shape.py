"""Depth, width, MLP width, patch, and all together (ViT §D.2, Fig. 8; arXiv 2010.11929).

vit_jax train --config=configs/experiments/shape.py:smoke --workdir=DIR
    digits, two seeds each: 22 runs, eight minutes of a CPU core.
vit_jax train --config=configs/experiments/shape.py:cifar10 --workdir=DIR
    small ones on CIFAR-10, three seeds each: 33 runs, 15 minutes of a CPU core. The data comes by TFDS. For a tar
    file of its images as JPEG (train/CLASS/…, test/CLASS/…), add --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/shape.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    around the paper's centre, 8 layers of width 1024 with MLPs of 2048 and patches of 32, on JFT.

Expect of the paper's: depth helps most, less beyond 16 layers; width helps least; smaller patches help without
parameters; scaling all alike is robust. The report draws accuracy over compute, and over each field.
"""

from vit_jax import recipes

# Depth, width, MLP width, heads, patch.
SMALL = (2, 64, 128, 4, 8)
CENTRES = {"paper": (8, 1024, 2048, 16, 32), "cifar10": SMALL, "smoke": SMALL}
SEEDS = {"paper": 1, "cifar10": 3, "smoke": 2}
FIELDS = ("depth", "width", "mlp_dim", "heads", "patch")
PATCHES = {
    "paper": (16, 56),
    "cifar10": (4, 16),
    "smoke": (4, 16),
}  # 64 would not divide 224 pixels
# By what is scaled, the factors of depth, width and MLP width.
SCALED = {
    "depth": [(factor, 1, 1) for factor in (0.5, 2, 4)],
    "width": [(1, factor, 1) for factor in (0.5, 2)],
    "mlp_dim": [(1, 1, factor) for factor in (0.5, 2)],
    "all": [(2, 2, 2)],
}


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=CENTRES)
    config = recipes.beside(__file__, "../vit_jft.py:B/32" if size == "paper" else "../digits.py")
    if size == "paper":
        config.model.representation = 0
    elif size == "cifar10":
        recipes.on_cifar10(config)
    else:
        recipes.quick(config)
    centre = CENTRES[size]
    factors = [(1, 1, 1), *[factor for scaled in SCALED.values() for factor in scaled]]
    settings = [shape(centre, *factor) for factor in factors]
    settings += [settings[0] | {"model.patch": patch} for patch in PATCHES[size]]
    return recipes.vary(config, settings, seeds=SEEDS[size])


def shape(centre, deeper, wider, hidden):
    """The centre with these factors; heads keep their size."""
    depth, width, mlp_dim, heads, patch = centre
    values = (depth * deeper, width * wider, mlp_dim * hidden, heads * wider, patch)
    return {f"model.{name}": int(value) for name, value in zip(FIELDS, values, strict=True)}
