"""Position embeddings, each kind at each place (ViT §D.4, Table 8; arXiv 2010.11929).

vit_jax train --config=configs/positions.py:B/16,learned2d,layers --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    the paper's run of that row, on JFT (configs/vit_jft.py).
vit_jax train --config=configs/positions.py:smoke,relative,shared --workdir=DIR
    a small ViT with a class token on digits, a minute on two CPU cores.

After the model come the kind (learned is 1-D, with a vector for every patch; learned2d has one for every row
and every column; sincos2d is fixed; relative is 1-D relative attention; none) and the place (stem; layers: in
every layer its own; shared: in every layer the same). `none,auto` has no place, and relative acts in layers.
Any other kind of `--config.model.position` can be named too, such as coordinates, deberta or transformer_xl.
With what is fixed, layers and shared are the same network.

Expect, of ImageNet's images by five examples of each class (Table 8; left) and of digits by the smoke runs
(right: % of 359 images, seed 0, so that a difference below 2 says nothing):
               stem             layers           shared
    none       61.38  83.8
    learned    64.21  96.1      63.96  98.3      64.29  96.7
    learned2d  64.00  97.5      64.05  97.5      64.02  96.7
    sincos2d     -    97.2        -    97.8        -    97.8
    relative   64.03    -         -    87.5        -    86.6
The paper prints one number for relative positions, without a place.
"""

from vit_jax import recipes
from vit_jax.models import positions


def get_config(arg="smoke,learned,stem"):
    model, kind, place = recipes.arguments(
        arg, model=("B/16", "smoke"), position=positions.KINDS, place=positions.PLACES
    )
    config = smoke() if model == "smoke" else paper(model)
    config.model.position = kind or "learned"
    config.model.position_at = place or "auto"
    return config


def paper(model):
    import vit_jft

    return vit_jft.get_config(model)


def smoke():
    import digits

    config = digits.get_config()
    config.model.pool = "token"
    config.duration = "20 epochs"
    return config
