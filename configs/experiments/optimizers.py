"""Adam against SGD for ResNets (ViT §D.1, Table 7; arXiv 2010.11929).

vit_jax train --config=configs/experiments/optimizers.py:smoke --workdir=DIR
    a small ResNet on digits, three rates each and two seeds: twelve runs, four to five minutes of a
    CPU core.
vit_jax train --config=configs/experiments/optimizers.py:cifar10 --workdir=DIR
    the same on CIFAR-10, three seeds each: 18 runs, eight minutes of a CPU core. The data comes by TFDS. For a tar
    file of its images as JPEG (train/CLASS/…, test/CLASS/…), add --config.data.name=tar --config.data.path=FILE.
vit_jax train --config=configs/experiments/optimizers.py --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    R50x1 and R152x2 on JFT for 7 epochs, by Adam as in configs/vit_jft.py and by BiT's SGD (configs/bit.py).

Expect of the paper's, after fine-tuning, in the mean of five tasks: R50x1 89.33 by Adam and 88.79 by SGD,
R152x2 94.01 and 93.72; on ImageNet alone R50x1 is better by SGD (78.24, Adam 77.54).
"""

from vit_jax import recipes

SGD = {"optim.name": "sgd", "optim.b1": 0.9, "optim.weight_decay_by": "gradient"}


def get_runs(arg="paper"):
    (size,) = recipes.arguments(arg, size=("paper", "cifar10", "smoke"))
    if size != "paper":
        config = recipes.beside(__file__, "../digits.py:resnet")
        if size == "cifar10":
            recipes.on_cifar10(config)
        else:
            recipes.quick(config, "300 steps")
        settings = [{"optim.name": "adamw", "optim.lr": rate} for rate in (3e-4, 1e-3, 3e-3)]
        decay = {"optim.weight_decay": 1e-4}
        settings += [SGD | decay | {"optim.lr": rate} for rate in (0.03, 0.1, 0.3)]
        return recipes.vary(config, settings, seeds=3 if size == "cifar10" else 2)
    runs = {}
    for model in ("R50x1", "R152x2"):
        adam = recipes.beside(__file__, f"../vit_jft.py:{model}")
        sgd = recipes.beside(__file__, f"../bit.py:L,{model}")
        sgd.duration = adam.duration
        falls = ("25%", "57.5%", "75%", "92.5%")  # of BiT-L's 40 epochs: 10, 23, 30, 37
        sgd.optim.boundaries = falls
        runs |= {f"{model}/adam": adam, f"{model}/sgd": sgd}
    return runs
