"""Several objectives over one ViT, a weighted sum: here SigLIP, and for the last 20 % of the steps masked patches too,
as SigLIP 2 adds terms of patches at its end (arXiv 2502.14786 §2.1).

vit_jax train --config=configs/sum.py:B/16 --workdir=DIR --config.data.path=PAIRS
    the SigLIP of configs/image_text.py:B/16 with that term
vit_jax train --config=configs/sum.py:smoke --workdir=DIR
    small towers on coloured digits, some 64,000 pairs on two CPU cores

Other terms stand in config.objective.terms, such as the features of a DINO, which then share SigLIP's forward pass:
(("image_text", {}), ("features", {"teachers": ("DINO",), "adaptor": "mlp", "weight": 0.5})). What comes out is judged
as that of configs/image_text.py.

SigLIP 2's masked term learns the patches of a moving average, this one their colours (ViT §B.1.2). Its weight, 0.25, is
that of SigLIP 2's for B. No published figure belongs to this sum.
"""

import image_text

from vit_jax import recipes


def get_config(arg="B/16"):
    (kind,) = recipes.arguments(arg, kind=("B/16", "smoke"))
    config = image_text.get_config(kind)
    text = {"text_depth": config.objective.text_depth} if kind == "smoke" else {}
    masked = {"weight": 0.25, "start": "80%"}
    config.objective.update(dict(name="sum", tokenizer="bytes", text_depth=None))
    config.objective.terms = (("image_text", text), ("masked_patches", masked))
    return config
