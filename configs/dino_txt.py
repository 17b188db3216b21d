"""dino.txt: text for a frozen DINO, of yours or released, whose patches become like words (arXiv 2412.16334).

vit_jax train --config=configs/dino_txt.py --workdir=DIR --config.data.path=PAIRS --config.init_from=CHECKPOINT
    two blocks on top of a ViT that stays as it is, and a text tower of 24 layers: 50,000 batches of 8,192 pairs
vit_jax train --config=configs/dino_txt.py:smoke --workdir=DIR --config.init_from=RUN
    the same on scenes of digits, RUN being one of configs/dino.py:smoke,scenes; judged by maps that no mask taught

Then: vit_jax predict --checkpoint=DIR slide.jpg --words="tumour,stroma,background" --out=maps/

Expect of smoke, with a DINO stopped after 200 steps, and one seed: the right one of 36 captions for 62 % of 200
scenes, and maps that are poor: a mean IoU of 3 %. On scenes filled by digits in five colours, a DINO of 600 steps and
1,000 steps of text, three seeds of text: 57 to 63 % for maps by colours and 23 to 24 % for maps by digits, where digits
are.
Expect, of DINOv3-L, mean IoU % of ADE20K 24.7 and of Cityscapes 36.9 (the authors', with windows at 512 pixels).

Sizes, rate, decay, warm-up and batch are the authors' (facebookresearch/dinov3, eval/text). Not theirs: the blocks see
no registers, the text tower has quick GELU and this package's initial weights, the temperature is at most 100.
"""

import digits

from vit_jax import recipes

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def get_config(arg="L"):
    (kind,) = recipes.arguments(arg, kind=("L", "smoke"))
    config = recipes.from_checkpoint()
    config.data.update(dict(name="pairs", image_size=224, train_crop="resize", eval_crop="resize"))
    config.augment.flip = False  # A mirrored image may not be what its caption says.
    config.objective.update(dict(name="image_text", image_blocks=2, image_drop_path=0.3))
    config.objective.update(dict(loss="softmax", text="clip", text_length=77))
    config.objective.update(dict(text_width=1280, text_depth=24, text_heads=20, text_mlp_dim=5120))
    config.optim.update(dict(lr=7e-4, b2=0.99, weight_decay=1e-4, clip=0.0, warmup="2000 steps"))
    config.optim.freeze = ("(?!objective/).*",)
    config.batch_size, config.duration = 8192, "50000 steps"
    config.eval.every = "5%"
    return smoke(config) if kind == "smoke" else config


def smoke(config):
    of_digits = digits.get_config()
    config.model.dtype = "float32"
    config.data.update(dict(name="digit_scene_pairs", image_size=32))
    config.objective.update(dict(image_drop_path=0.0, text_length=24))
    config.objective.update(dict(text_width=64, text_depth=2, text_heads=4, text_mlp_dim=256))
    config.optim.update(dict(lr=2e-3, clip=1.0, warmup="5%"))
    config.batch_size, config.duration = 64, "400 steps"
    config.log, config.checkpoint, config.eval.every = of_digits.log, of_digits.checkpoint, "25%"
    options = {"data": {"name": "digit_scenes"}, "templates": ("{}",), "names": ("nothing", *NAMES)}
    config.eval.evaluators = ("retrieval", ("word_maps", options))
    return config
