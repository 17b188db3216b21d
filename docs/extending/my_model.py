"""my_model.py: tokens mixed by averages of their neighbours, without attention (PoolFormer, arXiv 2111.11418)."""

import dataclasses
import re
import sys

from flax import nnx

from vit_jax.extend import (
    ClassifierConfig,
    Mlp,
    StackedConfig,
    StackedModel,
    default_config,
    drop_path,
    make_norm,
    option,
    register_model,
    split_key,
)

SIZES = {
    "Ti": dict(depth=2, width=32, mlp_dim=64),
    "S": dict(depth=6, width=64, mlp_dim=256),
}
VARIANTS = ["Pool-Ti/4", "Pool-S/4"]  # listed by `vit_jax models`; other patch sizes work as well


@dataclasses.dataclass(frozen=True)
class Config(StackedConfig, ClassifierConfig):
    window: int = option(
        3, "side of the square of patches that are averaged", minimum=1, role="convention"
    )
    pool: str = option(
        "mean", "how tokens become one vector", choices=("mean", "gem"), role="structure"
    )


def options_from_name(name: str) -> dict | None:
    match = re.fullmatch(r"Pool-(Ti|S)/(\d+)", name)
    return SIZES[match[1]] | dict(patch=int(match[2])) if match else None


class Block(nnx.Module):
    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        width = config.width
        self.pool_norm = make_norm("layer", width, config.epsilon, dtype, rngs)
        self.mlp_norm = make_norm("layer", width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(
            width, config.mlp_dim, activation="gelu", dropout=0.0, dtype=dtype, rngs=rngs
        )
        self.grid, self.window = config.grid, (config.window, config.window)

    def __call__(self, x, drop_path_rate, key, *, training: bool):
        keys = split_key(key, 2)
        patches = self.pool_norm(x).reshape(len(x), *self.grid, -1)
        means = nnx.avg_pool(patches, self.window, padding="SAME", count_include_pad=False)
        mixed = (means - patches).reshape(x.shape)
        x = x + drop_path(mixed, drop_path_rate, keys[0])
        x = x + drop_path(self.mlp(self.mlp_norm(x)), drop_path_rate, keys[1])
        return x, {"mixed": mixed}


class Model(StackedModel):
    Block = Block


register_model(sys.modules[__name__])


def get_config():
    config = default_config()
    config.data.name, config.data.image_size = "digits", 32
    config.data.train_crop, config.data.eval_crop = "pad", "resize"
    config.augment.flip = False
    config.model.name = "Pool-S/4"
    config.duration, config.batch_size = "20 epochs", 64
    config.optim.lr = 3e-3
    return config
