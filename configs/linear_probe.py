"""Linear probe of any checkpoint: its body stays as it is, a new head is trained on top.

vit_jax train --config=configs/linear_probe.py:cifar10 --workdir=DIR --config.init_from=CHECKPOINT
    and whatever else finetune.py takes: data, steps, crops and splits are the same.

Features of different models differ in size by orders of magnitude, so the head is trained by Adam,
whose steps do not depend on it: 1e-3, no decay, no clipping. This is a choice made here; published
probes each have their own. The rate is worth choosing: `vit_jax sweep ...
--grid=optim.lr=1e-4,1e-3,1e-2`.

At the checkpoint's own resolution (--config.data.image_size) nothing of the body changes; at
another, its position embeddings are interpolated once. What is frozen has no optimizer state and is
not differentiated: a step costs little more than a forward pass, so batches are whole (accumulate).
"""

import finetune

from vit_jax.models import classifier


def get_config(arg="other"):
    config = finetune.get_config(arg)
    config.accumulate = 1
    config.optim.freeze = (f"(?!{classifier.EXIT}head(_distilled)?/).*",)
    config.optim.name = "adamw"
    config.optim.b1 = 0.9
    config.optim.moment_dtype = "float32"
    config.optim.lr = 1e-3
    config.optim.clip = 0.0
    return config
