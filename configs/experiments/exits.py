"""A Dynamic Vision Transformer, fine-tuned, and what its exits reach within a budget (arXiv 2105.15075, Table 3).

vit_jax train --config=configs/experiments/exits.py:smoke --workdir=DIR
    from a half of the digits to the other half, two seeds: with exits at 2 x 2, 4 x 4 and 8 x 8 tokens, and the same
    DeiT without exits at 8 x 8: 6 runs.
vit_jax train --config=configs/experiments/exits.py:cifar10 --workdir=DIR
    the same from five classes of CIFAR-10 to the other five, three seeds: 8 runs, some ten minutes of a CPU core. It
    takes a tar file of CIFAR-10's images as JPEG (train/CLASS/…, test/CLASS/…), since classes are slices of it:
    --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/exits.py --workdir=DIR --config.init_from=CHECKPOINT
    a released checkpoint on CIFAR-10 at 224 px, with the rates of configs/finetune.py.
vit_jax exits --checkpoint=DIR/dynamic/seed=0 --budgets=0.002,0.004,0.008
    then: the table of budgets of a run.

Expect of the paper's, on CIFAR-10: 98.19 % with T2T-14 for 4.80 G multiply-adds, and as much with exits for 0.77 G.
"""

from vit_jax import recipes
from vit_jax.config import default_config
from vit_jax.models import classifier

SEEDS = {"cifar10": 3, "smoke": 2}
NETWORKS = ("dynamic", "single")


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=("paper", *SEEDS))
    if size == "paper":
        config = recipes.beside(__file__, "../finetune.py:cifar10")
        config.data.image_size = 224
        return {"dynamic": config}
    runs = {}
    for network in NETWORKS:
        runs[f"{network}_pretrained"] = _pretrained(size, network)
        runs |= recipes.vary(_finetuned(runs, size), {network: {}}, seeds=SEEDS[size])
    return runs


def _pretrained(size, network):
    config = recipes.beside(__file__, "../dynamic_vit.py:smoke")
    if network == "single":
        sizes = {name: config.model[name] for name in ("depth", "width", "mlp_dim", "heads")}
        config.model = default_config().model
        config.model.update(sizes | {"name": "DeiT-S/16", "patch": 4})
    recipes.on_first_half(config, size)
    return config


def _finetuned(runs, size):
    config = recipes.next_stage(runs)
    config.init_reset = (classifier.HEADS,)
    if size == "smoke":
        config.data.train_split = "train[50%:]"
    else:
        recipes.on_classes(config, range(5, 10))
    return config
