"""Images and texts that belong together: SigLIP (arXiv 2303.15343), CLIP (arXiv 2103.00020), and LiT (arXiv
2111.07991), from pairs of your own.

vit_jax train --config=configs/image_text.py:B/16 --workdir=DIR --config.data.path=PAIRS
    SigLIP of a ViT-B/16 at 224: PAIRS is a list of images and captions, or tar files; 32,768 pairs a batch
vit_jax train --config=configs/image_text.py:clip --workdir=DIR --config.data.path=PAIRS
    the same towers with CLIP's text tower and loss
vit_jax train --config=configs/image_text.py:lit --workdir=DIR --config.data.path=PAIRS --config.init_from=CHECKPOINT
    a text tower for an image tower of yours, which stays as it is and costs a forward pass alone; where captions
    repeat, as names of classes do, with --config.objective.loss=softmax, to which equal captions are equally right
vit_jax train --config=configs/image_text.py:dino_txt --workdir=DIR --config.data.path=PAIRS --config.init_from=RUN
    text for a frozen DINO, whose patches become like words: the recipe of configs/dino_txt.py
vit_jax train --config=configs/image_text.py:smoke --workdir=DIR
    small towers on coloured digits, some 64,000 pairs on two CPU cores; also clip,smoke; lit,smoke from a run of
    configs/digits.py; dino_txt,smoke from one of configs/dino.py:smoke,scenes

Of lit expect, on CIFAR-10 with captions by templates, a frozen DeiT-Ti and softmax, 44.7 to 46.6 % by names (three
seeds); a linear probe has 47.5. Of smoke expect, with one seed, 58 % of 359 grey digits by their names, and the right
one of 120 captions for 49 % of 2,154 images.

What comes out is judged by `vit_jax evaluate --checkpoint=DIR --suite=zero_shot`, by the templates of the run's own
zero_shot in config.eval.evaluators, or else by CLIP's. Tokens are bytes unless --config.objective.tokenizer names a
file; 'vit_jax prepare --tokenizer=8000' makes one of your captions.

SigLIP's rate 1e-3, decay 1e-4, clipping 1, batch, 20,000 steps of warm-up and 64 tokens are SigLIP 2's (arXiv
2502.14786 §2.1), which sees 40B pairs; here it is 10 % of that. b2 = 0.95 is not confirmed. LiT's optimizer is that of
big_vision's siglip_lit_coco.
"""

import digits
import dino_txt

from vit_jax import recipes
from vit_jax.config import CHECKPOINT, default_config


def get_config(arg="B/16"):
    kinds = ("B/16", "clip", "lit", "dino_txt", "smoke")
    kind, size = recipes.arguments(arg, kind=kinds, size=("smoke",))
    if kind == "dino_txt":
        return dino_txt.get_config(size or "L")
    if size or kind == "smoke":
        return smoke(kind)
    config = recipes.from_checkpoint() if kind == "lit" else default_config()
    config.objective.name, config.data.name = "image_text", "pairs"
    config.data.update(dict(image_size=224, train_crop="resize", eval_crop="resize"))
    config.augment.flip = False  # A mirrored image may not be what its caption says.
    config.optim.update(dict(lr=1e-3, clip=1.0, weight_decay_by="schedule"))
    config.eval.every = "5%"
    if kind == "lit":
        config.objective.update(dict(bias=-2.71, text_length=16))
        config.optim.update(dict(weight_decay=0.01, warmup="3%", freeze=("(?!objective/).*",)))
        config.batch_size, config.duration = 512, "5000 steps"
        return config
    config.model.update(dict(name="ViT-B/16", pool="map", dtype="bfloat16"))
    config.data.update(dict(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic"))
    config.optim.update(dict(weight_decay=1e-4, b2=0.95, warmup="20000 steps"))
    config.batch_size, config.duration = 32_768, "4e9 examples"
    if kind == "clip":
        config.objective.update(dict(loss="softmax", text="clip", text_length=77, embed=512))
        config.objective.update(dict(text_width=512, text_heads=8, text_mlp_dim=2048))
    return config


def smoke(kind):
    config = digits.get_config()
    config.data.name = "digit_pairs"
    config.objective.update(dict(name="image_text", text_length=16, text_depth=2))
    if kind == "lit":
        config.init_from, config.model = CHECKPOINT, recipes.from_checkpoint().model
        config.model.dtype = "float32"
        config.optim.freeze = ("(?!objective/).*",)
    else:
        config.model.update(dict(depth=3))
    if kind == "clip":
        config.objective.update(dict(loss="softmax", text="clip", embed=64))
    config.augment.mixup = 0.0
    config.optim.update(dict(ema=0.0, lr=2e-3, weight_decay=1e-4, clip=1.0))
    config.batch_size, config.duration = 64, "1000 steps"
    config.eval.every = "250 steps"
    templates = ("{} in white", "a white {}")
    options = {"data": {"name": "digits"}, "templates": templates, "names": dino_txt.NAMES}
    zero_shot = ("zero_shot", options)
    config.eval.evaluators = ("retrieval", zero_shot)
    return config
