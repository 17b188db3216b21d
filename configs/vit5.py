"""ViT-5: a plain ViT of today's parts, trained as DeiT III is ("ViT-5: Vision Transformers for the Mid-2020s", arXiv
2602.08071).

vit_jax train --config=configs/vit5.py:S/16 --workdir=DIR
    S/16, B/16 or L/16 on ImageNet-1k: S 800 epochs at 224 pixels, B 800 and L 400 at 192 in DIR/pretrain; then 20
    epochs at 224 in DIR/at_224, from the averaged weights.
vit_jax train --config=configs/vit5.py:B/16,384 --workdir=DIR
    B or L, and then 20 epochs at 384 pixels in DIR/at_384.
vit_jax train --config=configs/vit5.py:smoke --workdir=/tmp/vit5
    A small one on scikit-learn's handwritten digits: SMOKE_ACCURACY of the 359 test images (seed 0).

Expect, top-1 % on ImageNet's validation set: S 82.2, B 84.2, L 84.9 at 224 pixels; B 85.4, L 86.0 at 384. The
authors publish no curves.

COST

Its parts: RMS norms, also on queries and keys; LayerScale from 1e-4; learned positions and rotary ones; four
registers with rotations of their own; no biases of queries, keys and values; GELU.

Where sources say nothing: whether 82.2 is before or after S's fine-tuning, which their README has; drop path at 384
pixels is taken from 224. Different from the authors' code: averaged weights are evaluated in the first stage; the rest
as in configs/deit3.py.
"""

import deit3

from vit_jax import recipes
from vit_jax.base.errors import ConfigError

# Pixels, epochs, peak rate, drop path, and that of fine-tuning.
SIZES = {
    "S/16": (224, 800, 4e-3, 0.05, 0.05),
    "B/16": (192, 800, 3e-3, 0.2, 0.25),
    "L/16": (192, 400, 3e-3, 0.35, 0.5),
}
PARTS = dict(
    norm="rms", qk_norm=True, qkv_bias=False, registers=4, rope="axial", rope_registers=100.0
)


def get_runs(arg="S/16"):
    model, size = recipes.arguments(arg, model=(*SIZES, "smoke"), size=("224", "384"))
    name = "S/16" if model == "smoke" else model
    pixels, epochs, rate, drop_path, later = SIZES[name]
    config = deit3.pretrain(name, pixels, rate, drop_path)
    config.duration = f"{epochs} epochs"
    # Rotations keep the places of the grid that they were first trained on.
    config.model.update(PARTS | dict(rope_grid=(pixels // 16, pixels // 16)))
    runs = {"pretrain": config}
    if model == "smoke":
        config.data.image_size = 32
        recipes.on_digits(config, "30 epochs", lr=8e-3, rope_grid=(8, 8))
        return runs
    if model == "S/16" and size == "384":
        raise ConfigError(f"config argument {arg!r}: the authors have no {model} at 384 pixels")
    config.optim.ema = 0.99996
    for larger in (224, 384) if size == "384" else (224,):
        runs[f"at_{larger}"] = deit3.finetune(runs, larger, later)
        runs[f"at_{larger}"].optim.ema = 0.0
    return runs


def get_config(arg="S/16"):
    """The first stage, for `vit_jax plan`."""
    return get_runs(arg)["pretrain"]
