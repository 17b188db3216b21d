"""Semantic segmentation with a plain ViT, from a checkpoint of any format: the class of every pixel.

vit_jax train --config=configs/segmentation.py --config.init_from=CHECKPOINT --config.data.path=SCENES --workdir=DIR
    EoMT (arXiv 2503.19108): queries go through the last blocks with the patches, and all is trained;
vit_jax train --config=configs/segmentation.py:linear ...
    BatchNorm and a linear layer on the patches of a frozen model, DINOv2's probe;
vit_jax train --config=configs/segmentation.py:multilevel ...
    four layers of a frozen model, fused by a convolution;
vit_jax train --config=configs/segmentation.py:panoptic ...
    EoMT on panoptic masks: each thing by itself, from SCENES/masks/NAME.png and SCENES/masks.json in COCO's form;
vit_jax train --config=configs/segmentation.py:smoke --config.init_from=/tmp/digits --workdir=DIR
    EoMT on scenes made of digits, from the checkpoint of configs/digits.py, in minutes; also smoke,linear and so on.

SCENES has images/NAME.jpg, masks/NAME.png of the same names, and classes.csv with lines name,value or
name,red,green,blue. Instead of a path --config.data.name=oxford_iiit_pet or cityscapes takes what TFDS has prepared.
The model is the checkpoint's; at 512 px its position embeddings are interpolated, and patches of 14 take 518.

EoMT is trained as its authors do on ADE20K from DINOv2: AdamW at 1e-4, layer decay 0.8, 16 images a batch, images
enlarged by 0.5 to 2, 31 epochs. Queries and heads warm up for 500 steps and then the model for 1,000; both rates fall
by a polynomial of power 0.9. For DINOv3 they take 2e-4, no layer decay and a tenth of that for the backbone, 16 epochs,
warm-ups of 2,000 and 3,000 steps: --config.optim.lr=2e-4 --config.optim.layer_decay=1 --config.duration="16 epochs"
--config.optim.lr_rules="(('objective/.*',1.0),('.*',0.1))" --config.optim.warmup="2000 steps"
--config.optim.late_warmup="3000 steps".

Expect, ADE20K mean IoU % of EoMT from DINOv3-L at 512 px: 59.5, by its authors. The smoke tests: 84 to 89.
"""

from vit_jax import recipes

MODEL = r"(?!objective/).*"  # parameters that are not the objective's own
HEADS = ("eomt", "linear", "multilevel", "panoptic")


def get_config(arg="eomt"):
    kind, head = recipes.arguments(arg, kind=(*HEADS, "smoke"), head=HEADS)
    head = (head or "eomt") if kind == "smoke" else kind
    config = recipes.from_checkpoint()
    config.objective.name = "segmentation"
    config.objective.head = "eomt" if head == "panoptic" else head
    config.data.name, config.data.mask_feature = "masks", "auto"
    config.data.image_size = 512
    config.data.update(dict(train_crop="jitter", crop_scale=(0.5, 2.0), eval_crop="resize"))
    config.batch_size = 16
    config.duration = "31 epochs"
    config.optim.lr = 1e-4
    config.optim.update(dict(weight_decay=0.05, layer_decay=0.8, schedule="polynomial"))
    config.optim.warmup, config.optim.late_warmup = "500 steps", "1000 steps"
    config.optim.late = (MODEL,)
    config.eval.evaluators = (("segmentation", {"windows": "sliding"}),)
    config.eval.every = "10%"
    config.checkpoint.every = "10%"
    if head in ("linear", "multilevel"):
        probe(config)
    if kind == "smoke":
        smoke(config)
    if head == "panoptic":
        things(config)
    return config


def probe(config):
    """The model stays as it is: a step costs little more than a forward pass."""
    config.optim.freeze, config.optim.late = (MODEL,), ()
    config.optim.update(dict(lr=1e-3, weight_decay=1e-4, layer_decay=1.0))
    config.optim.update(dict(schedule="linear", warmup="1000 steps"))
    config.duration = "40000 steps"


def things(config):
    """Single things are found in whole images: those of two windows cannot be matched."""
    config.eval.evaluators = (("segmentation", {"windows": "whole"}),)
    if config.data.name == "masks":
        config.objective.queries, config.objective.segments = 200, 100
    else:
        config.data.name = "digit_things"
        config.eval.evaluators[0][1].update(score=0.5, overlap=0.5)


def smoke(config):
    config.data.name = "digit_scenes"
    config.data.image_size = 48
    config.data.train_crop = "resize"
    config.augment.flip = False
    config.model.dtype = "float32"
    config.objective.blocks = 2
    config.objective.queries = 20
    config.objective.points = 128
    config.objective.width = 16
    config.optim.freeze = ()  # Digits by themselves are not features of scenes: all is trained.
    config.optim.layer_decay = 1.0
    config.optim.update(dict(name="muon", lr=5e-3, weight_decay=0.05))
    config.batch_size = 16
    steps = {"eomt": 1100, "linear": 2000, "multilevel": 1600}
    config.duration = f"{steps[config.objective.head]} steps"
    config.optim.update(dict(schedule="linear", warmup="10%", late=()))
    config.optim.ema = 0.98
    config.eval.evaluators = ("segmentation",)
    config.eval.every, config.checkpoint.every, config.log.every = "50%", "200 steps", "50 steps"
