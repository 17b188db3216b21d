"""ViTs, hybrids, ResNets and Mixers by what their training costs (ViT §4.4, Fig. 5, Table 6; Mixer §3.3).

vit_jax train --config=configs/experiments/compute.py:smoke --workdir=DIR
    small ones on digits, two seeds each: 16 runs, five to six minutes of a CPU core.
vit_jax train --config=configs/experiments/compute.py:cifar10 --workdir=DIR
    the same small ones on CIFAR-10, three seeds each: 24 runs, 14 minutes of a CPU core. The data comes by TFDS.
    For a tar file of its images as JPEG (train/CLASS/…, test/CLASS/…), add --config.data.name=tar
    --config.data.path=FILE.
vit_jax train --config=configs/experiments/compute.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    thirteen of the papers' on JFT (configs/vit_jft.py and mixer.py).

Expect of the paper's: for equal transfer ViTs need two to four times less compute than ResNets; hybrids are ahead
at small budgets only. The report draws accuracy over exaFLOPs.
"""

from vit_jax import recipes

PAPER = (
    "B/32", "B/16", "L/32", "L/16", "H/14", "R50x1", "R50x2", "R101x1", "R152x2", "R50+B/16", "R50+L/16",
)  # fmt: skip
MIXERS = ("B/16,jft300m", "L/16,jft300m")
# By the recipe of the digits: what makes a network smaller or larger. A ViT learns less from a step, and costs less.
SMALL = {
    "vit": [{"depth": 2}, {"depth": 4}],
    "mixer": [{"depth": 2}, {"depth": 4}],
    "resnet": [{"width_factor": 0.5}, {"width_factor": 1.0}],
    "hybrid": [{"depth": 1}, {"depth": 2}],
}


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=("paper", "cifar10", "smoke"))
    if size == "paper":
        runs = {name: recipes.beside(__file__, f"../vit_jft.py:{name}") for name in PAPER}
        mixers = {
            f"Mixer-{name.split(',')[0]}": recipes.beside(__file__, f"../mixer.py:{name}")
            for name in MIXERS
        }
        return {name.replace("/", "-"): config for name, config in (runs | mixers).items()}
    runs = {}
    for family, sizes in SMALL.items():
        config = recipes.beside(__file__, f"../digits.py:{family}")
        if size == "cifar10":
            recipes.on_cifar10(config)
        else:
            recipes.quick(config, "600 steps" if family == "vit" else "300 steps")
        settings = [
            {f"model.{name}": value for name, value in size_options.items()}
            for size_options in sizes
        ]
        for name, run in recipes.vary(
            config, settings, seeds=3 if size == "cifar10" else 2
        ).items():
            runs[f"{family},{name}"] = run
    return runs
