"""EfficientNet on ImageNet (arXiv 1905.11946), and as Noisy Student trains it (arXiv 1911.04252).

vit_jax train --config=configs/efficientnet.py:B0 --workdir=DIR
    B0 to B7, each at its own resolution: the first paper's recipe.
vit_jax train --config=configs/efficientnet.py:L2,noisy --workdir=DIR \\
  --config.data.name=mixture --config.data.mixture="(('imagenet2012', 1.0), ('PSEUDO_LABELLED', 14.0))"
    a student of Noisy Student, B0 to B7 or L2: on labelled images and such as a teacher has labelled (the
    paper keeps those of 300 million that it is sure of by 0.3, 130,000 of each class); all rounds of it, with
    soft labels: configs/noisy_student.py;
vit_jax train --config=configs/efficientnet.py:L2,noisy --workdir=DIR2 --config.init_from=DIR \\
  --config.init_reset="()" --config.data.image_size=800 --config.duration="1.5 epochs"
    then the higher resolution for a short time, on labelled images alone (FixRes).
vit_jax train --config=configs/efficientnet.py:smoke --workdir=DIR
    a small one on digits, a minute on two CPU cores.

Expect, top-1 % on ImageNet's validation set, of students:
     B0    B1    B2    B3    B4    B5    B6    B7    L2
    78.8  81.5  82.4  84.1  85.3  86.1  86.4  86.9  88.4 (88.2 at 475 pixels), in 6 days on 2048 TPUv3 cores.

As the authors' code does it (tensorflow/tpu, google-research/noisystudent). There the learning rate falls
during warm-up too, which does not show; here it rises to where it then is. Noisy Student's L2 has 14
images with a teacher's label for one of people's; the others fewer. Labels of the mixture are hard, and
no early stopping on held-out images is done.
"""

from vit_jax import recipes
from vit_jax.config import default_config
from vit_jax.models.zoo.efficientnet import SIZES

# RandAugment's magnitude (local_scripts/imagenet of the students' code); smaller ones have none.
MAGNITUDES = {"B2": 6, "B3": 12, "B4": 15, "B5": 18, "B6": 24, "B7": 27, "L2": 27}


def get_config(arg="B0"):
    size, kind = recipes.arguments(arg, size=("smoke", *SIZES), kind=("noisy",))
    return smoke() if size == "smoke" else paper(size, noisy=kind == "noisy")


def paper(size, noisy):
    resolution = 475 if size == "L2" else SIZES[size].resolution
    epochs, every = (700, 4.8) if noisy and size in ("B5", "B6", "B7", "L2") else (350, 2.4)
    config = default_config()
    config.data.name = "imagenet2012"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.image_size = resolution
    config.data.crop_area = (0.08, 1.0)
    config.data.interpolation = "bicubic"
    config.data.eval_resize = resolution + 32
    config.data.mean = (0.485, 0.456, 0.406)
    config.data.std = (0.229, 0.224, 0.225)
    config.augment.autoaugment = not noisy
    if noisy and size in MAGNITUDES:
        config.augment.randaugment_layers = 2
        config.augment.randaugment_magnitude = float(MAGNITUDES[size])
    config.model.name = f"EfficientNet-{size}"
    config.model.num_classes = 1000
    config.model.dropout = SIZES[size].dropout
    config.model.drop_path = 0.2
    config.model.dtype = "bfloat16"
    config.objective.loss = "softmax"
    config.objective.label_smoothing = 0.1
    config.duration = f"{epochs} epochs"
    config.batch_size = 2048 if noisy else 4096
    config.optim.name = "rmsprop"
    config.optim.b1 = config.optim.b2 = 0.9
    config.optim.eps = 1e-3
    config.optim.schedule = "staircase"
    config.optim.factor = 0.97
    config.optim.warmup = "5 epochs"
    falls = range(1, round(epochs / every))
    config.optim.boundaries = tuple(f"{n * every:g} epochs" for n in falls if n * every > 5)
    before = sum(n * every <= 5 for n in falls)
    config.optim.lr = 0.016 * config.batch_size / 256 * config.optim.factor**before
    config.optim.weight_decay = 1e-5
    config.optim.weight_decay_by = "gradient"
    config.optim.weight_decay_rules = ((".*kernel|.*gate/.*|head/bias", 1.0),)
    config.optim.clip = 0.0
    config.optim.ema = 0.9999
    config.eval.every = "5 epochs"
    if size == "L2":
        recipes.spread(config)
    return config


def smoke():
    import digits

    config = digits.get_config()
    config.model.name = "EfficientNet-B0"
    config.model.width_factor = 0.5
    config.model.units = (1, 2, 2)
    for option in ("pool", "width", "depth", "heads", "mlp_dim"):
        config.model[option] = None  # of a ViT
    config.duration = "20 epochs"
    return config
