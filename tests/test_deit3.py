"""Ten steps of DeiT III and of ViT-5 in small, their images given, against the authors' formulas written again in
PyTorch: network, loss, LAMB and rate, as configs/deit3.py and configs/vit5.py set them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import lazily
from vit_jax.base import patterns
from vit_jax.models import registry
from vit_jax.objectives.networks import model_config_of
from vit_jax.recipes.user_files import load_recipe
from vit_jax.training.assembly import assemble, resolve

torch = lazily.Package("torch")
SMALL = dict(
    name="ViT-S/4",
    width=32,
    depth=2,
    heads=2,
    mlp_dim=64,
    num_classes=10,
    dtype="float32",
    drop_path=0.0,
)
STEPS, BATCH = 10, 8


def small(recipe, **model):
    """The first stage of a recipe, small, with nothing random in a step but what is given."""
    config = load_recipe(recipe)["pretrain"]
    config.data.update(dict(name="digits", train_split="train", eval_split="test", image_size=16))
    config.augment.update(
        dict(three_augment=False, color_jitter=0.0, flip=False, mixup=0.0, cutmix=0.0)
    )
    config.model.update(SMALL | model)
    config.duration, config.batch_size, config.optim.warmup = f"{STEPS} steps", BATCH, "3 steps"
    config.reference.curve, config.data.repeats = "", 1
    return resolve(config)


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        labels = np.zeros((BATCH, 10), np.float32)
        for row in labels:  # some of them mixed, as cutmix leaves them
            first, second = rng.choice(10, 2, replace=False)
            row[first], row[second] = (0.7, 0.3) if rng.random() < 0.5 else (1, 0)
        yield {"image": rng.integers(0, 256, (BATCH, 16, 16, 3), np.uint8), "label": labels}


def ours(config):
    """Parameters before and after the ten steps, by name."""
    assembly = assemble(config, num_classes=10, examples_per_epoch=1000)
    state = assembly.init(jax.random.key(3))
    before = patterns.named(jax.device_get(state.params))
    step = jax.jit(assembly.train_step)
    for batch in batches():
        state, _ = step(state, batch)
    rates = [float(assembly.learning_rate(jnp.int32(i))) for i in range(STEPS)]
    return before, patterns.named(jax.device_get(state.params)), rates


def rotated(x, theta, grid):
    """Pairs of channels (…, N, C) turned, half of them by rows and half by columns. A pair are channels i and i + C/2,
    where the authors have 2i and 2i + 1: a product of queries and keys does not see it.
    """
    quarter = x.shape[-1] // 4
    frequencies = theta ** (-torch.arange(quarter, dtype=x.dtype) / quarter)
    places = torch.arange(grid, dtype=x.dtype)[:, None] * frequencies
    rows = places[:, None].expand(grid, grid, quarter)
    columns = places[None].expand(grid, grid, quarter)
    angles = torch.cat([rows, columns], -1).reshape(grid * grid, 2 * quarter)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def norm(x, p, name):
    scale, bias = p[f"{name}/scale"], p.get(f"{name}/bias")
    if bias is None:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
    return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, eps=1e-6)


def logits(p, images):
    """Of DeiT III; of ViT-5 where there are registers."""
    b, side, width = len(images), 4, 32
    x = images.reshape(b, side, 4, side, 4, 3).permute(0, 1, 3, 2, 4, 5).reshape(b, side * side, 48)
    x = x @ p["embedding/kernel"].reshape(48, width) + p["embedding/bias"] + p["position"]
    tokens = [p["class_token"].expand(b, 1, width), x]
    if "registers" in p:
        tokens.append(p["registers"].expand(b, 4, width))
    x = torch.cat(tokens, 1)
    for layer in range(2):
        start = "encoder/layers/"
        own = {n.removeprefix(start): v[layer] for n, v in p.items() if n.startswith(start)}
        y = norm(x, own, "attention_norm")
        qkv = torch.einsum("bnd,dthc->tbhnc", y, own["attention/qkv/kernel"])
        if "attention/qkv/bias" in own:
            qkv = qkv + own["attention/qkv/bias"][:, None, :, None]
        q, k, v = qkv
        if "registers" in p:
            q, k = norm(q, own, "attention/query_norm"), norm(k, own, "attention/key_norm")
            q, k = (
                torch.cat(
                    [t[:, :, :1], rotated(t[:, :, 1:17], 1e4, 4), rotated(t[:, :, 17:], 100.0, 2)],
                    2,
                )
                for t in (q, k)
            )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        y = torch.einsum("bhnc,hcd->bnd", weights @ v, own["attention/out/kernel"])
        x = x + own["attention_scale/scale"] * (y + own["attention/out/bias"])
        y = norm(x, own, "mlp_norm")
        y = torch.nn.functional.gelu(y @ own["mlp/up/kernel"] + own["mlp/up/bias"])
        x = x + own["mlp_scale/scale"] * (y @ own["mlp/down/kernel"] + own["mlp/down/bias"])
    return norm(x, p, "encoder/norm")[:, 0] @ p["head/kernel"] + p["head/bias"]


def lamb(p, grads, moments, step, rate):
    """apex's FusedLAMB as DeiT III sets it: the norm of all gradients clipped to 1, β3 = 1 - β1, bias correction,
    decoupled decay 0.05 inside the trust ratio, which only parameters with decay have.
    """
    length = torch.sqrt(sum((g**2).sum() for g in grads.values()))
    for name, g in grads.items():
        g = g / torch.clamp(length, min=1.0)
        m, v = moments.setdefault(name, [torch.zeros_like(g), torch.zeros_like(g)])
        m.mul_(0.9).add_(0.1 * g)
        v.mul_(0.999).add_(0.001 * g * g)
        update = (m / (1 - 0.9**step)) / (torch.sqrt(v / (1 - 0.999**step)) + 1e-8)
        if name.endswith("kernel"):
            update = update + 0.05 * p[name]
            axes = tuple(range(int("/layers/" in name), g.ndim))
            ratio = torch.sqrt(
                (p[name] ** 2).sum(axes, keepdim=True) / (update**2).sum(axes, keepdim=True)
            )
            update = ratio * update
        p[name] = p[name] - rate * update


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        pytest.param("configs/deit3.py:S/16", {}, id="deit3"),
        pytest.param(
            "configs/vit5.py:S/16", {"rope_grid": (4, 4)}, id="vit5", marks=pytest.mark.slow
        ),
    ],
)
def test_ten_steps_are_those_of_the_authors_formulas(recipe, model):
    config = small(recipe, **model)
    before, after, rates = ours(config)
    # The rate: linear over the warm-up, then a cosine to 1e-5.
    expected = [4e-3 * min(i / 3, 1) for i in range(4)]
    expected += [
        1e-5 + (4e-3 - 1e-5) * (1 + math.cos(math.pi * (i - 3) / 7)) / 2 for i in range(4, 10)
    ]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    p = {name: torch.tensor(value, dtype=torch.float64) for name, value in before.items()}
    mean, std = (torch.tensor(x, dtype=torch.float64) for x in (config.data.mean, config.data.std))
    moments = {}
    for step, batch in enumerate(batches(), 1):
        images = (torch.tensor(batch["image"], dtype=torch.float64) / 255 - mean) / std
        targets = torch.tensor(batch["label"] > 0, dtype=torch.float64)
        leaves = {name: value.detach().requires_grad_() for name, value in p.items()}
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(leaves, images), targets)
        grads = dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))
        lamb(p, grads, moments, step, rates[step - 1])
    for name, value in p.items():
        assert np.abs(after[name] - before[name]).max() > 1e-5, f"{name} was not trained"
        np.testing.assert_allclose(after[name], value.detach().numpy(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("size", "pixels", "rate", "drop_path", "millions"),  # of parameters, as timm counts deit3_*_224
    [
        ("S/16", 224, 4e-3, 0.05, 22.06), ("B/16", 192, 3e-3, 0.2, 86.59),
        ("L/16", 192, 3e-3, 0.45, 304.37), ("H/14", 160, 3e-3, 0.6, 632.13),
    ],
)  # fmt: skip
def test_deit3_is_that_of_its_authors(size, pixels, rate, drop_path, millions):
    runs = load_recipe(f"configs/deit3.py:{size}")
    config, last = runs["pretrain"], runs[list(runs)[-1]]
    model = config.model
    assert (config.data.image_size, config.optim.lr, model.drop_path) == (pixels, rate, drop_path)
    assert (config.duration, config.batch_size, config.optim.name) == ("800 epochs", 2048, "lamb")
    assert (model.drop_path_by, config.objective.loss, config.data.repeats) == (
        "constant",
        "binary",
        3,
    )
    assert last.data.image_size == 224 and ("at_224" in runs) == (size != "S/16")
    if size != "S/16":
        assert (last.init_from, last.init_reset, last.optim.lr) == ("pretrain", (), 1e-5)
        assert last.data.repeats == 1 and not last.augment.three_augment
    last.init_from = ""
    count = registry.count_parameters(model_config_of(resolve(last), 1000))
    assert round(count / 1e6, 2) == millions


@pytest.mark.parametrize(
    ("size", "epochs", "parameters"),
    [("S/16", 800, 22_039_144), ("B/16", 800, 86_543_080), ("L/16", 400, 304_258_024)],
)
def test_vit5_is_that_of_its_authors(size, epochs, parameters):
    runs = load_recipe(f"configs/vit5.py:{size}")
    assert runs["pretrain"].duration == f"{epochs} epochs" and runs["pretrain"].optim.ema == 0.99996
    last = runs["at_224"]
    last.init_from = ""
    assert registry.count_parameters(model_config_of(resolve(last), 1000)) == parameters
    assert last.model.rope_grid == (runs["pretrain"].data.image_size // 16,) * 2


def test_the_best_recipe_is_the_most_accurate_that_the_hours_allow():
    chosen = {
        "S/16,11": (90, "sincos2d"), "S/16,99": (400, "none"), "S/16": (800, "learned"), "B/16,150": (400, "none"),
        "B/16,295": (800, "learned"), "L/16,535": (400, "learned"),
    }  # fmt: skip
    for argument, (epochs, position) in chosen.items():
        first = next(iter(load_recipe(f"configs/best.py:{argument}").values()))
        assert (first.duration, first.model.position or "learned") == (
            f"{epochs} epochs",
            position,
        ), argument
