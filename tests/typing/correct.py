"""Correct uses of the public names, in which a type checker must find nothing; nobody runs it."""

from typing import Any

import numpy as np
from ml_collections import ConfigDict

import vit_jax
from vit_jax import extend
from vit_jax.annotations import ModelOptions, OptimSection, RunConfig


def get_config(size: int = 224) -> RunConfig:
    config = vit_jax.default_config()
    config.model.name = f"ViT-B/{size // 14}"
    config.model.pool = "mean"
    config.model.dropout = None
    config.data.image_size = size
    config.data.mean = [0.5, 0.5, 0.5]
    config.data.image_size = (size, 2 * size)
    config.optim.lr = 1
    config.optim.lr *= 2
    config.eval.evaluators = ("accuracy", ("knn", {"k": 10}))
    config.eval.evaluators += ("loss",)
    config.nonfinite = "skip"
    config.update_from_flattened_dict({"augment.mixup": 0.2})
    config.optim.update(b2=0.95, clip=0.5)
    config.update({"seed": 3, "model": {"depth": 2}})
    faster(config.optim)
    return config


def faster(optim: OptimSection) -> None:
    optim.lr *= 2


def of_a_guest(config: ConfigDict, options: dict[str, Any]) -> None:
    """Families and objectives of users have options that only they know."""
    vit_jax.load_config("my_recipe.py").model["my_option"] = 3
    vit_jax.create_model("MyNet-S", **options)
    vit_jax.load_run("runs/mine").evaluate("photos", **options)
    vit_jax.train(config, "runs/mine")


options: ModelOptions = {"num_classes": 10, "registers": 4}
vit_jax.create_model("ViT-B/16", image_size=(224, 384), seed=1, **options)
vit_jax.load("hf://timm/deit_tiny_patch16_224.fb_in1k", num_classes=0, resize="bilinear")
run = vit_jax.load_run("runs/pets", dtype="bfloat16", remat="none", model={"heads": 6})
metrics: dict[str, float] = run.evaluate("photos", data__mean=(0.5, 0.5, 0.5), batch_size=64)
run.export("m.onnx", batch_size=8, precision="int8")
run.save("pets", format="timm", eval_resize=256)
run.push("me/pets", private=True, dry_run=True)
pixels: np.ndarray = run.transform("cat.jpg")
best: str = run("cat.jpg").names[0]
answers = [answer.names[0] for answer in run(["cat.jpg", pixels])]
learning_rate: float = run.config.optim.lr
of_a_guest(get_config(), {"my_option": 3})
try:
    vit_jax.train(get_config(), "runs/pets")
except (vit_jax.ConfigError, vit_jax.DataError, extend.UserError) as error:
    print(error)
