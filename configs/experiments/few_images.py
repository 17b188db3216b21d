"""Fine-tuning with few images: for longer, and with re-initialised last layers (arXiv 2006.05987, of BERT).

vit_jax train --config=configs/experiments/few_images.py:smoke --workdir=DIR
    from a half of the digits to 200 others, of all classes, two seeds each: 17 runs.
vit_jax train --config=configs/experiments/few_images.py:cifar10 --workdir=DIR
    a small ViT on five classes of CIFAR-10, in DIR/pretrained; then on 40 images of each of the other five, for 60 and
    300 steps: all of it, with one or two of four layers re-initialised, or with two frozen; three seeds each: 25 runs,
    three minutes of a CPU core. It takes a tar file of CIFAR-10's images as JPEG (train/CLASS/…, test/CLASS/…), since
    classes are slices of it: --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/few_images.py --workdir=DIR --config.init_from=B_16.npz
    a checkpoint of twelve layers on VTAB-1k's DTD, 1,000 images, for 500, 2,500 and 10,000 steps.

Expect of the source, of BERT on sets of 1,000 to 10,000 sentences: it is better, and differs less between seeds, if it
is fine-tuned for longer than three epochs, and with its last layers re-initialised.
"""

from vit_jax import recipes

SEEDS = {"paper": 3, "cifar10": 3, "smoke": 2}
STEPS = {"paper": (500, 2_500, 10_000), "cifar10": (60, 300), "smoke": (60, 300)}
LAYERS = {"paper": (2, 4), "cifar10": (1, 2), "smoke": (1, 2)}  # of 12 and 4


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=SEEDS)
    if size == "paper":
        config, runs = recipes.beside(__file__, "../finetune.py:vtab/dtd"), {}
    else:
        runs = {"pretrained": _pretrained(size)}
        config = _finetuned(runs, size)
    settings = {
        f"{part},steps={steps}": {"duration": f"{steps} steps", **fields}
        for part, fields in _parts(config.init_reset, LAYERS[size]).items()
        for steps in STEPS[size]
    }
    return runs | recipes.vary(config, settings, seeds=SEEDS[size])


def _parts(head, counts):
    """By names: all layers are fine-tuned, or the last of them re-initialised, or the first frozen."""
    reset = {f"reset={n}": {"init_reset": (*head, f"encoder/layers[-{n}:]/.*")} for n in counts}
    n = max(counts)
    freeze = {f"freeze={n}": {"optim.freeze": ("embedding/.*", f"encoder/layers[:{n}]/.*")}}
    return {"all": {}} | reset | freeze


def _pretrained(size):
    config = recipes.beside(__file__, "../digits.py")
    recipes.on_first_half(config, size)
    return config


def _finetuned(runs, size):
    config = recipes.next_stage(runs)
    config.init_reset = ("head/.*",)
    config.batch_size, config.optim.warmup = 32, "10%"
    config.optim.lr /= 4
    if size == "smoke":
        config.data.train_split = "train[800:1000]"
    else:
        recipes.on_classes(config, range(5, 10), images=40)
    return config
