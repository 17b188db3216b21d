"""Our train step beside a plain one written by hand in JAX: the same ViT, loss, AdamW and batch, in
turn in one process.

    python tests/benchmarks/plain_step.py [--model=ViT-Ti/16] [--batch_size=8] [--dtype=float32]
    [--rounds=5]

Prints a line for each and, last, one JSON object with the ratio of the median step times (above 1:
ours is faster).
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import parallel
from vit_jax.benchmark import context
from vit_jax.config import default_config
from vit_jax.models import registry
from vit_jax.training import state as states
from vit_jax.training.assembly import assemble
from vit_jax.training.step import compile_train_step


def plain_init(key, config):
    """Parameters as a plain dict with a list of layers; random where it does not matter for speed."""
    d, m, h = config.width, config.mlp_dim, config.heads

    def kernel(key, *shape):
        return 0.02 * jax.random.normal(key, shape)

    def layer(key):
        k = jax.random.split(key, 6)
        norm = {"scale": jnp.ones(d), "bias": jnp.zeros(d)}
        projections = {
            n: {"w": kernel(k[i], d, h, d // h), "b": jnp.zeros((h, d // h))}
            for i, n in enumerate("qkv")
        }
        out = {"w": kernel(k[3], h, d // h, d), "b": jnp.zeros(d)}
        mlp = {
            "up": {"w": kernel(k[4], d, m), "b": jnp.zeros(m)},
            "down": {"w": kernel(k[5], m, d), "b": jnp.zeros(d)},
        }
        return {"norm1": norm, "norm2": dict(norm), "out": out, **projections, **mlp}

    keys = jax.random.split(key, config.depth + 3)
    return {
        "patch": {"w": kernel(keys[0], config.patch, config.patch, 3, d), "b": jnp.zeros(d)},
        "class": jnp.zeros((1, 1, d)),
        "position": kernel(keys[1], 1, config.tokens, d),
        "layers": [layer(k) for k in keys[3:]],
        "norm": {"scale": jnp.ones(d), "bias": jnp.zeros(d)},
        "head": {"w": jnp.zeros((d, config.num_classes)), "b": jnp.zeros(config.num_classes)},
    }


def plain_forward(p, images, config, dtype):
    """The model as one would write it on a page."""
    p = jax.tree.map(lambda x: x.astype(dtype), p)

    def norm(x, w):
        x32 = x.astype(jnp.float32)
        mean, var = x32.mean(-1, keepdims=True), x32.var(-1, keepdims=True)
        return ((x32 - mean) * jax.lax.rsqrt(var + config.epsilon)).astype(dtype) * w["scale"] + w[
            "bias"
        ]

    stride = (config.patch, config.patch)
    x = jax.lax.conv_general_dilated(
        images.astype(dtype),
        p["patch"]["w"],
        stride,
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = x.reshape(x.shape[0], -1, config.width) + p["patch"]["b"]
    x = (
        jnp.concatenate([jnp.broadcast_to(p["class"], (x.shape[0], 1, config.width)), x], 1)
        + p["position"]
    )
    for w in p["layers"]:
        y = norm(x, w["norm1"])
        q, k, v = (jnp.einsum("bnd,dhc->bnhc", y, w[n]["w"]) + w[n]["b"] for n in "qkv")
        a = jnp.einsum("bqhc,bkhc->bhqk", q / q.shape[-1] ** 0.5, k)
        a = jax.nn.softmax(a.astype(jnp.float32)).astype(dtype)
        y = jnp.einsum("bhqk,bkhc->bqhc", a, v)
        x = x + jnp.einsum("bqhc,hcd->bqd", y, w["out"]["w"]) + w["out"]["b"]
        y = norm(x, w["norm2"]) @ w["up"]["w"] + w["up"]["b"]
        y = jax.nn.gelu(y, approximate=config.activation == "gelu_tanh")
        x = x + y @ w["down"]["w"] + w["down"]["b"]
    x = norm(x, p["norm"])[:, 0]
    return (x @ p["head"]["w"] + p["head"]["b"]).astype(jnp.float32)


def plain_step(config, optimizer, dtype):
    """(first parameters and optimizer state, compiled step)."""

    def loss_of(params, images, labels):
        logits = plain_forward(params, images, config, dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(state, batch):
        params, opt_state = state
        images = batch["image"].astype(jnp.float32) / 127.5 - 1
        loss, grads = jax.value_and_grad(loss_of)(params, images, batch["label"])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = jax.tree.map(
        jnp.copy, plain_init(jax.random.key(0), config)
    )  # no buffer twice: they are donated
    return (params, optimizer.init(params)), jax.jit(step, donate_argnums=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ViT-Ti/16")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--unroll", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5, help="of three steps each, in turn")
    flags = parser.parse_args()

    config = default_config()
    config.update_from_flattened_dict({
        "model.name": flags.model, "model.dtype": flags.dtype, "model.unroll": flags.unroll, "augment.flip": False,
        "data.image_size": flags.image_size, "batch_size": flags.batch_size, "duration": "1000 steps",
        "optim.weight_decay": 0.1,
    })  # fmt: skip
    assembly = assemble(config, num_classes=1000, examples_per_epoch=1000)
    mesh = parallel.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
    random = np.random.default_rng(0)
    size = (flags.batch_size, flags.image_size, flags.image_size, 3)
    batch = {
        "image": random.integers(0, 256, size, np.uint8),
        "label": random.integers(0, 1000, size[0], np.int32),
    }
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, parallel.batch_sharding(mesh))
        like = assembly.abstract_state(mesh)
        ours = compile_train_step(assembly.train_step, states.shardings_of(like), mesh)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1))
        plain_state, plain = plain_step(assembly.model_config, optimizer, jnp.dtype(flags.dtype))
        runs = {
            "ours": [ours, states.create(assembly.init, 0, like), []],
            "plain": [plain, plain_state, []],
        }
        count = sum(x.size for x in jax.tree.leaves(plain_state[0]))
        assert count == registry.count_parameters(assembly.model_config), "not the same model"
        compile_seconds = {}
        for name, run in runs.items():
            began = time.perf_counter()
            run[1], metrics = run[0](run[1], batch)
            jax.block_until_ready(metrics)
            compile_seconds[name] = time.perf_counter() - began
        for _ in range(flags.rounds):
            for run in runs.values():
                for _ in range(3):
                    began = time.perf_counter()
                    run[1], metrics = run[0](run[1], batch)
                    jax.block_until_ready(metrics)
                    run[2].append(time.perf_counter() - began)
    medians = {name: statistics.median(run[2]) for name, run in runs.items()}
    for name, seconds in medians.items():
        print(
            f"{name:<6} {seconds:.4f} s a step, {flags.batch_size / seconds:.1f} images/s, "
            f"first {compile_seconds[name]:.1f} s"
        )
    ratio = medians["plain"] / medians["ours"]
    print(
        json.dumps(
            vars(flags) | {"seconds": medians, "first": compile_seconds, "ratio": ratio} | context()
        )
    )


if __name__ == "__main__":
    main()
