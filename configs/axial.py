"""Axial networks on JFT-300M: the ViT paper's comparison (§D.6).

vit_jax train --config=configs/axial.py:ViT-B/16 --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    an Axial-ViT, ViT-B/16 or ViT-B/32.
vit_jax train --config=configs/axial.py:ResNet-50 --workdir=DIR --config.data.name=YOUR_TFDS_NAME
    AxialResNet-50.
vit_jax train --config=configs/axial.py:smoke --workdir=DIR
    a small Axial-ViT on digits, a minute on two CPU cores; :smoke-resnet: a small AxialResNet.

Expect: the paper prints no numbers. In its Figure 13 both Axial-ViTs are above the ViTs of their patch in
ImageNet 5-shot accuracy, at more compute, and AxialResNet-50 is slow.

As Table 3 has it for ViT-B and ResNet-50 (configs/vit_jft.py), 7 epochs. For the Axial-ViTs, which have no
class token, the rate is 3e-4, with which the paper's mean of patches does as well as its class token
(Figure 9).
"""

from vit_jax import recipes

RATES = {"ViT-B/16": 3e-4, "ViT-B/32": 3e-4, "ResNet-50": 1e-3}


def get_config(arg="ViT-B/16"):
    (model,) = recipes.arguments(arg, model=("smoke", "smoke-resnet", *RATES))
    return smoke(model) if model.startswith("smoke") else paper(model)


def paper(model):
    import vit_jft

    config = vit_jft.get_config("B/16")
    config.model.name = "AxialResNet-50" if model == "ResNet-50" else f"Axial-{model}"
    config.model.representation = None  # of a ViT
    config.optim.lr = RATES[model]
    return config


def smoke(model):
    import digits

    config = digits.get_config()
    if model == "smoke":
        config.model.name = "Axial-ViT-B/4"
        config.model.depth = 2
        of_vit = ("pool",)
    else:
        config.model.name = "AxialResNet-50"
        config.model.units = (1, 1)
        config.model.width_factor = 0.5
        config.model.heads = 2
        of_vit = ("pool", "width", "depth", "mlp_dim")
    for option in of_vit:
        config.model[option] = None  # of a ViT
    config.duration = "20 epochs"
    return config
