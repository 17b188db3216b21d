"""AlgoPerf's ViT: ViT-S/16 by NAdamW, the baseline that optimizers are measured against (github.com/mlcommons/
algorithmic-efficiency, workload imagenet_vit).

vit_jax train --config=configs/algoperf.py --workdir=DIR
    nadamw: the baseline, to the end of its schedule.
vit_jax train --config=configs/algoperf.py:smoke --workdir=/tmp/algoperf
    A small one on scikit-learn's handwritten digits: SMOKE_ACCURACY of the 359 test images (seed 0).

Expect 78.3 % top-1 on ImageNet's validation set (five seeds: 78.1 to 78.3), and the target of 77.31 % after 153,837
steps, the median of five seeds, 19.5 hours on 8 V100. What five seeds had at each step stands beside every evaluation
(--config.reference.curve=algoperf-nadamw); the curves of other optimizers, over shorter schedules, are
algoperf-shampoo, algoperf-schedule-free, algoperf-schedule-free-self-tuning and algoperf-caspr.

COST

The network and images are those of configs/vit_s16_i1k.py. Decay acts on all parameters and gradients are not
clipped, as in the baseline's code. Where sources say nothing: the length. Its warm-up of 6,999 steps is a twentieth of
three quarters of 186,666, which is taken; the published runs ended at 170,400 when their time was over.
"""

import vit_s16_i1k

from vit_jax import recipes


def get_config(arg="nadamw"):
    (optimizer,) = recipes.arguments(arg, optimizer=("nadamw", "smoke"))
    config = vit_s16_i1k.get_config()
    config.data.train_split = "train"
    config.objective.label_smoothing = 0.2
    config.duration = "186666 steps"
    config.optim.update(dict(name="nadamw", lr=8.445e-4, b1=0.8896, b2=0.99785, clip=0.0))
    config.optim.update(dict(weight_decay=0.0814, weight_decay_by="lr", warmup="6999 steps"))
    config.optim.weight_decay_rules = ((".*", 1.0),)
    config.optim.moment_dtype = "float32"
    config.eval.every = "1000 steps"
    config.reference.curve = "algoperf-nadamw"
    if optimizer == "smoke":
        config.data.image_size = 32
        config.augment.randaugment_layers = 0
        recipes.on_digits(config, "20 epochs", lr=3e-3, representation=64)
    return config
