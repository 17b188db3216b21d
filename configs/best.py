"""The most accurate known recipe for a plain ViT on ImageNet-1k that costs no more than given v5e chip-hours.

vit_jax train --config=configs/best.py:B/16,150 --workdir=DIR
    SIZE,HOURS: S/16, B/16 or L/16, and hours of one v5e chip; without HOURS the best there is. Its stages are runs in
    DIR, as of the recipe that it takes, which the log names. --dry_run lists them.
vit_jax train --config=configs/best.py:smoke --workdir=/tmp/best
    That of ViT-5, on scikit-learn's handwritten digits.

Expect, top-1 % on ImageNet's validation set at 224 pixels, by v5e chip-hours:
    S/16   76.5 from 11, 78.5 from 19, 80.0 from 37, 80.9 from 50, 82.2 from 105
    B/16   83.8 from 149, 84.2 from 295
    L/16   84.9 from 535
The figures are those of the recipes' authors. The hours are what the products of all training steps of all stages take
at 40 % of the chip's peak; 'vit_jax plan' says what a slice takes.
"""

import importlib

from absl import logging

from vit_jax import recipes
from vit_jax.base.errors import ConfigError

# Chip-hours, accuracy, recipe and its argument; rising.
RECIPES = {
    "S/16": (
        (11, 76.5, "vit_s16_i1k", "90"),
        (19, 78.5, "vit_s16_i1k", "150"),
        (37, 80.0, "vit_s16_i1k", "300"),
        (50, 80.9, "rope_vit", "S/16"),
        (105, 82.2, "vit5", "S/16"),
    ),
    "B/16": ((149, 83.8, "rope_vit", "B/16"), (295, 84.2, "vit5", "B/16")),
    "L/16": ((535, 84.9, "vit5", "L/16"),),
}


def get_runs(arg="S/16"):
    size, _, text = arg.partition(",")
    recipes.arguments(size, size=(*RECIPES, "smoke"))
    if size == "smoke":
        return runs_of("vit5", "smoke")
    hours, accuracy, name, argument = chosen(arg, size, text)
    logging.info(
        "configs/best.py: configs/%s.py:%s, %g %% expected, %g v5e chip-hours",
        name, argument, accuracy, hours,
    )  # fmt: skip
    return runs_of(name, argument)


def get_config(arg="S/16"):
    """The first stage, for `vit_jax plan`."""
    return next(iter(get_runs(arg).values()))


def chosen(arg, size, text):
    try:
        limit = float(text or "inf")
    except ValueError:
        raise ConfigError(
            f"config argument {arg!r}: HOURS = {text!r} is no number of v5e chip-hours, such as 150"
        ) from None
    fitting = [recipe for recipe in RECIPES[size] if recipe[0] <= limit]
    if not fitting:
        known = "; ".join(
            f"{accuracy} % from {hours} hours ({name}.py:{argument})"
            for hours, accuracy, name, argument in RECIPES[size]
        )
        raise ConfigError(
            f"config argument {arg!r}: no recipe for {size} takes {limit:g} v5e chip-hours or fewer. There is {known}"
        )
    return fitting[-1]


def runs_of(name, argument):
    module = importlib.import_module(name)
    if hasattr(module, "get_runs"):
        return module.get_runs(argument)
    return {"train": module.get_config(argument)}
