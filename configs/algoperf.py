"""AlgoPerf's ViT: ViT-S/16 by NAdamW, the baseline that optimizers are measured against (github.com/mlcommons/
algorithmic-efficiency, workload imagenet_vit).

vit_jax train --config=configs/algoperf.py --workdir=DIR
    nadamw: the baseline, to the end of its schedule.
vit_jax train --config=configs/algoperf.py:schedule_free --workdir=DIR
    Schedule-free AdamW as tuned for this workload: the target after 109,824 steps, no schedule, longer at will.
vit_jax train --config=configs/algoperf.py:smoke --workdir=/tmp/algoperf
    A small one on scikit-learn's handwritten digits, to see that it runs.

Expect 78.3 % top-1 on ImageNet's validation set (five seeds: 78.1 to 78.3), and the target of 77.31 % after 153,837
steps, the median of five seeds, 19.5 hours on 8 V100. What five seeds had at each step stands beside every evaluation
(--config.reference.curve=algoperf-nadamw); the curves of other optimizers, over shorter schedules, are
algoperf-shampoo, algoperf-schedule-free, algoperf-schedule-free-self-tuning and algoperf-caspr.

Cost: 18.5 v5e chip-hours, what the products of all training steps take at 40 % of the chip's peak.

The network and images are those of configs/vit_s16_i1k.py. Decay acts on all parameters and gradients are not
clipped, as in the baseline's code. Where sources say nothing: the length. Its warm-up of 6,999 steps is a twentieth of
three quarters of 186,666, which is taken; the published runs ended at 170,400 when their time was over. Schedule-free
takes those three quarters, 140,000 steps, and its warm-up is 2 % of them; the published runs ended at 114,700.
"""

import vit_s16_i1k

from vit_jax import recipes


def get_config(arg="nadamw"):
    (optimizer,) = recipes.arguments(arg, optimizer=("nadamw", "schedule_free", "smoke"))
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
    if optimizer == "schedule_free":
        config.duration = "140000 steps"
        config.optim.update(dict(name="schedule_free", schedule="constant", lr=2e-3))
        config.optim.update(dict(b1=0.9, b2=0.9955, weight_decay=0.08, warmup="2%"))
        config.reference.curve = "algoperf-schedule-free"
    if optimizer == "smoke":
        config.data.image_size = 32
        config.augment.randaugment_layers = 0
        recipes.on_digits(config, "20 epochs", lr=3e-3, representation=64)
    return config
