"""RoPE-ViT: DeiT III's recipe with rotary positions that each layer and head learns ("Rotary Position Embedding for
Vision Transformer", arXiv 2403.13298).

vit_jax train --config=configs/rope_vit.py:S/16 --workdir=DIR
    S/16, B/16 or L/16 on ImageNet-1k: 400 epochs in DIR/pretrain, S at 224 pixels, B and L at 192; then B and L 20
    epochs at 224 in DIR/at_224.
vit_jax train --config=configs/rope_vit.py:B/16,learned --workdir=DIR
    rope or learned: the same with DeiT III's learned positions, to compare with.
vit_jax train --config=configs/rope_vit.py:smoke --workdir=/tmp/rope_vit
    A small one on scikit-learn's handwritten digits: SMOKE_ACCURACY of the 359 test images (seed 0).

Expect, top-1 % on ImageNet's validation set at 224 pixels, and of the same weights at 384:
               S/16          B/16          L/16
    rope       80.9, 81.8    83.8, 84.4    84.8, 85.6
    learned    80.4, 79.4    83.4, 82.8    84.6, 84.2

COST

Different from the authors' code: what configs/deit3.py says.
"""

import deit3

from vit_jax import recipes

# Pixels, peak rate, drop path, and that at 224 pixels.
SIZES = {
    "S/16": (224, 4e-3, 0.0, None),
    "B/16": (192, 3e-3, 0.1, 0.2),
    "L/16": (192, 3e-3, 0.4, 0.45),
}


def get_runs(arg="S/16"):
    model, positions = recipes.arguments(
        arg, model=(*SIZES, "smoke"), positions=("rope", "learned")
    )
    pixels, rate, drop_path, at_224 = SIZES["S/16" if model == "smoke" else model]
    config = deit3.pretrain("S/16" if model == "smoke" else model, pixels, rate, drop_path)
    config.duration, config.optim.weight_decay = "400 epochs", 0.03
    if positions != "learned":
        config.model.update(dict(position="none", rope="mixed", rope_theta=10.0))
    if model == "smoke":
        config.data.image_size = 32
        recipes.on_digits(config, "30 epochs", lr=8e-3)
    runs = {"pretrain": config}
    if model != "smoke" and at_224 is not None:
        runs["at_224"] = deit3.finetune(runs, 224, at_224)
    return runs


def get_config(arg="S/16"):
    """The first stage, for `vit_jax plan`."""
    return get_runs(arg)["pretrain"]
