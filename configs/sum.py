"""Several objectives over one ViT, a weighted sum: here SigLIP, and for the last 20 % of the steps a term of patches or
views too, as SigLIP 2 has at its end (arXiv 2502.14786 §2.1).

vit_jax train --config=configs/sum.py:B/16 --workdir=DIR --config.data.path=PAIRS
    the SigLIP of configs/image_text.py:B/16 with masked patches
vit_jax train --config=configs/sum.py:B/16,dino --workdir=DIR --config.data.path=PAIRS
    with DINO and iBOT, whose teacher is a moving average: SigLIP sees the whole image, DINO ten crops of it
vit_jax train --config=configs/sum.py:smoke --workdir=DIR
    small towers on coloured digits, some 64,000 pairs on two CPU cores; smoke,dino too, in the last 10 %

Other terms stand in config.objective.terms, such as the features of a DINO, which then share SigLIP's forward pass:
(("image_text", {}), ("features", {"teachers": ("DINO",), "adaptor": "mlp", "weight": 0.5})). What comes out is judged
as that of configs/image_text.py.

The weight, 0.25, is SigLIP 2's for B, parts of the image and a momentum that does not rise SILC's (arXiv 2310.13355).
Not theirs: the teacher sees two crops (one in SigLIP 2), is the average of the text tower too, and colours and the
momentum of 0.992 are DINOv2's; the masked patches of the first command have their colours as targets. No published
figure belongs to these sums.
"""

import image_text

from vit_jax import recipes
from vit_jax.config import default_config


def get_config(arg="B/16"):
    kind, other = recipes.arguments(arg, kind=("B/16", "smoke"), other=("masked_patches", "dino"))
    config = image_text.get_config(kind)
    text = {"text_depth": config.objective.text_depth} if kind == "smoke" else {}
    config.objective.update(dict(name="sum", tokenizer="bytes", text_depth=None))
    other, late = other or "masked_patches", {"weight": 0.25, "start": "80%"}
    if other == "dino":
        late |= {"momentum": (0.992, 0.992), "temperature_warmup": "2%"}
        late |= {"frozen_prototypes": "0.2%"}
        config.data.views = views(kind)
        if kind == "smoke":
            late |= dict(start="90%")  # Such a step takes three times as long.
            late |= dict(prototypes=256, head_hidden=128, bottleneck=32, head_std=0.1)
    config.objective.terms = (("image_text", text), (other, late))
    return config


def views(kind):
    """The whole image first, which SigLIP sees; DINO the others."""
    if kind == "smoke":
        large = {"train_crop": "inception", "crop_area": (0.7, 1.0)}
        return {}, large | {"count": 2}, large | {"count": 2, "image_size": 8, "blur": 0.5}
    config = recipes.views_of_dinov2(default_config())
    return {}, *({"train_crop": "inception", "flip": True} | view for view in config.data.views)
