"""A ViT's train step as it is written by hand in JAX, with the loss, optimizer and parameters of
ours: what `step_peers.py` puts beside it.
"""

import jax
import jax.numpy as jnp
import optax


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


def plain_attention(q, k, v):
    """softmax(q kᵀ / √C) v as one would write it; on NVIDIA GPUs in 16 bits by `jax.nn.dot_product_attention`, which
    takes even token counts in training.
    """
    if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16:
        tokens = q.shape[1]
        lengths = jnp.full(len(q), tokens, jnp.int32) if tokens % 2 else None
        q, k, v = (jnp.pad(x, ((0, 0), (0, tokens % 2), (0, 0), (0, 0))) for x in (q, k, v))
        how = dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)[:, :tokens]
    a = jnp.einsum("bqhc,bkhc->bhqk", q / q.shape[-1] ** 0.5, k)
    a = jax.nn.softmax(a.astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhc->bqhc", a, v)


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
        y = plain_attention(q, k, v)
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
