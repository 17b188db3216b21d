"""ViT on JFT-3B, from s/28 to G/14 ("Scaling Vision Transformers", arXiv 2106.04560).

vit_jax train --config=configs/scaling_vit.py:g/14 --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    s/28, s/16, Ti/16, S/32, S/16, B/32, B/28, B/16, L/16, g/14, G/14.

A million steps, but the schedule is made for any number: all that comes before the last 50,000 is
the beginning of every longer run. Up to 60,000 steps, --config.optim.cooldown="10000 steps".
Batches are 4,096; 16,384 for g/14 and G/14 (the paper went up to 32,768, on 2,048 TPUv3 chips, and
put 32 images on a core for g/14).

JFT is not public: `jft3b` and its splits stand for whatever you prepared. With other classes than
its 29,593, set --config.model.num_classes.

Expect, top-1 %: G/14 fine-tuned at 518 px ImageNet 90.45, V2 83.33, ReaL 90.81, ObjectNet 70.53;
few-shot on ImageNet 69.52, 83.0, 84.86 of G/14 (1, 5, 10 examples a class; 5 million steps' worth),
82.7, 84.5 of g/14 (5, 10; 6.3 million).

Decay is multiplied by the learning rate, as the paper writes it: 0.03, of the head 3. Adafactor
with its first moment in bfloat16 takes 2 bytes a parameter and little more. For g/14 and G/14 all
is sharded over 8 devices (--config.mesh.fsdp).
"""

from vit_jax import recipes
from vit_jax.config import default_config

MODELS = ("s/28", "s/16", "Ti/16", "S/32", "S/16", "B/32", "B/28", "B/16", "L/16", "g/14", "G/14")


def get_config(arg="g/14"):
    (model,) = recipes.arguments(arg, model=MODELS)
    config = default_config()
    config.data.name = "jft3b"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.model.name = f"ViT-{model}"
    config.model.num_classes = 29_593
    config.model.pool = "map"
    config.model.head_bias = -10.0
    config.model.dtype = "bfloat16"
    config.objective.loss = "sigmoid"
    config.duration = "1000000 steps"
    config.batch_size = 4096
    config.optim.name = "adafactor"
    config.optim.moment_dtype = "bfloat16"
    config.optim.lr = 8e-4
    config.optim.schedule = "rsqrt"
    config.optim.timescale = "10000 steps"
    config.optim.warmup = "10000 steps"
    config.optim.cooldown = "50000 steps"
    config.optim.weight_decay = 0.03
    config.optim.weight_decay_rules = (("head/kernel", 100.0), (".*kernel", 1.0))
    config.optim.clip = 1.0
    config.eval.every = "10000 steps"
    if model in ("g/14", "G/14"):
        config.batch_size = 16_384
        recipes.spread(config)
    else:
        recipes.shard_by_size(config, model)
    return config
