"""The plain recipe, a ViT on digits with AdamW, warm-up and cosine, beside Flax's own layers and optax."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets

from tests.parity import engines
from tests.parity.comparison import TENTHS
from vit_jax.config import default_config
from vit_jax.data.sources import digits

STEPS, BATCH, WARMUP, RATE, DECAY = 400, 64, 40, 5e-3, 0.05
WIDTH, DEPTH, HEADS, PATCH = 48, 2, 4, 2
_NORMAL = nn.initializers.normal


def our_config():
    config = default_config()
    config.data.update(dict(name="digits", image_size=8, train_crop="resize"))
    config.data.eval_crop = "resize"
    config.augment.flip = False
    config.model.update(dict(name=f"ViT-S/{PATCH}", width=WIDTH, depth=DEPTH, heads=HEADS))
    config.model.update(dict(mlp_dim=4 * WIDTH))
    config.duration, config.batch_size = f"{STEPS} steps", BATCH
    config.optim.update(dict(lr=RATE, warmup=f"{WARMUP} steps", weight_decay=DECAY))
    return config


def ours(seed: int) -> dict[str, np.ndarray]:
    named = {"loss": "loss", "accuracy": "eval/accuracy"}
    return engines.train_ours(our_config(), seed, named)


class Vit(nn.Module):
    """The ViT of the paper, of Flax's layers."""

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), padding="VALID")(images)
        x = x.reshape(len(x), -1, WIDTH)
        token = self.param("token", nn.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], axis=1)
        x += self.param("position", _NORMAL(0.02), (1, x.shape[1], WIDTH))
        dense = functools.partial(
            nn.Dense, kernel_init=nn.initializers.xavier_uniform(), bias_init=_NORMAL(1e-6)
        )
        for _ in range(DEPTH):
            y = nn.LayerNorm()(x)
            x += nn.MultiHeadDotProductAttention(
                HEADS, kernel_init=nn.initializers.xavier_uniform()
            )(y, y)
            x += dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(10, kernel_init=nn.initializers.zeros)(nn.LayerNorm()(x)[:, 0])


_rate = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, STEPS)
_optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
        _rate, weight_decay=DECAY,
        mask=lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key == "kernel", params
        ),
    ),
)  # fmt: skip


@jax.jit
def _step(params, state, images, labels):
    def loss_of(params):
        logits = Vit().apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = _optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


_predict = jax.jit(lambda params, images: Vit().apply(params, images).argmax(-1))


def theirs(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    images, labels, test = _digits()
    params = Vit().init(jax.random.key(seed), _prepared(images[:1]))
    state, train = _optimizer.init(params), np.setdiff1d(np.arange(len(labels)), test)
    losses, accuracies = [], []
    for step, batch in zip(range(STEPS), engines.epochs(len(train), BATCH, random), strict=False):
        chosen = train[batch]
        params, state, loss = _step(params, state, _prepared(images[chosen]), labels[chosen])
        losses.append(float(loss))
        if (step + 1) % (STEPS // TENTHS) == 0:
            right = _predict(params, _prepared(images[test])) == labels[test]
            accuracies.append(float(right.mean()))
    return {"loss": np.reshape(losses, (TENTHS, -1)).mean(1), "accuracy": np.array(accuracies)}


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images (n, 8, 8, 3) uint8, labels, and which are tested: those that ours are, or results would differ by them."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    levels = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    return np.repeat(levels, 3, axis=3), labels, digits._split(labels)["test"]


def _prepared(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 127.5 - 1
