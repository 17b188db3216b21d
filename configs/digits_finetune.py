"""Fine-tunes the digits model at 48x48: more tokens, interpolated position embeddings, a new zero head.

vit_jax train --config=configs/digits_finetune.py --config.init_from=/tmp/digits \\
  --workdir=/tmp/digits_48
"""

import digits

from vit_jax.config import CHECKPOINT


def get_config():
    config = digits.get_config()
    config.init_from = CHECKPOINT
    config.data.image_size = 48
    config.data.pad = 6
    config.duration = "8 epochs"
    config.optim.lr = 1e-3
    config.optim.warmup = "10%"
    config.optim.ema = 0.99
    return config
