"""A model looks at images, and what is inspected is taken from it where it arises: of all images what
is small, layer by layer, so that never more than one layer's attention weights are held; of the few
that are shown, one image at a time, the weights of all layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.options import Data
from vit_jax.evaluation.forward import make_forward
from vit_jax.inspection import attention
from vit_jax.inspection.flow import flow
from vit_jax.inspection.health import effective_rank
from vit_jax.models import layer_features
from vit_jax.models.contract import ModelOutput
from vit_jax.models.layout import Layout, layouts
from vit_jax.models.registry import Weights

# A batch is looked at in so many parts, one after the other: beside one layer's weights, which inference
# holds too, what is made of them needs room.
PARTS = 8


@dataclasses.dataclass
class Stream:
    """The attention of one name, over all images.

    Attributes:
      layout: where its tokens are.
      distance: (L, n, H) pixels, see `attention.attention_distance`; `renormalised` and `with_class`
        are its variants (the latter `None` without a class token).
      entropy, logit_range: (L, n, H), see there.
      read: (L, n, H, patches) what is read of every patch (`attention.attention_read`), of the images shown.
      rollout: (L, n, patches), the same of the rollout, of the images shown; `None` of attention in
        rows or columns alone.
      mean_read, mean_rollout: (L, patches), averages over heads and all images.
      chosen: (L, n, H, patches) the attention of the chosen patch, of the images shown.
    """

    layout: Layout
    distance: np.ndarray
    renormalised: np.ndarray
    with_class: np.ndarray | None
    entropy: np.ndarray
    logit_range: np.ndarray
    read: np.ndarray
    mean_read: np.ndarray
    chosen: np.ndarray
    rollout: np.ndarray | None
    mean_rollout: np.ndarray | None

    @property
    def negative(self) -> np.ndarray:
        """(L,) whether weights of a layer are below 0, as re-attention's may be: such are no shares, and
        distances and maps averaged with them no measure.
        """
        return np.isnan(self.entropy).any((1, 2))


@dataclasses.dataclass
class Observed:
    """What a model did with images.

    Attributes:
      streams: by the name of the attention; {} where there is none.
      norms: (L, n, T) of the tokens after every block, by name of the blocks; {} without blocks.
      channels: (L, D) standard deviation of each channel over tokens and images, by the same names.
      tokens: (shown, patches, D) after the last norm.
      logits: (n, classes); `None` without a head.
    """

    streams: dict[str, Stream]
    norms: dict[str, np.ndarray]
    channels: dict[str, np.ndarray]
    tokens: np.ndarray
    logits: np.ndarray | None


def summary(all_layouts: dict[str, Layout], chosen: tuple[float, float] = (0.5, 0.5)) -> Callable:
    """The function that a model captures with: of one layer, what `observe` keeps.

    Args:
      all_layouts: see `layout.layouts`.
      chosen: the place, as shares of height and width, of the patch whose attention is kept.
    """

    def of_layer(captured: dict[str, jax.Array]) -> dict[str, jax.Array]:
        kept = {}
        for name, array in captured.items():
            if name in all_layouts:
                of_weights = _of_weights(array.astype(jnp.float32), all_layouts[name], chosen)
                kept |= {f"{name}.{key}": value for key, value in of_weights.items()}
            elif name.endswith("blocks"):
                x = array.astype(jnp.float32)
                kept[f"{name}.norm"] = jnp.linalg.norm(x, axis=-1)
                kept[f"{name}.sum"], kept[f"{name}.square"] = x.sum(1), (x * x).sum(1)
        return kept

    return of_layer


def _of_weights(
    weights: jax.Array, layout: Layout, chosen: tuple[float, float]
) -> dict[str, jax.Array]:
    """Of weights (B, H, T, T), or (B, rows, H, T, T) of attention in rows, that of one layer."""
    where, grid, size = {"class_token": layout.class_token}, layout.grid, layout.size
    in_lines = weights.ndim == 5
    summaries = {
        "distance": attention.attention_distance(weights, grid, size),
        "renormalised": attention.attention_distance(weights, grid, size, renormalise=True),
        "entropy": attention.entropy(weights),
        "logit_range": attention.logit_range(weights),
        "read": attention.attention_read(weights, grid, **where),
        "chosen": weights[..., -layout.patches + _index(chosen, grid), -layout.patches :],
    }
    if layout.class_token:
        summaries["with_class"] = attention.attention_distance(weights, grid, size, with_class=True)
    if in_lines:  # rows, or columns, of an image count as one
        return {
            name: x.max(1) if name == "logit_range" else x.mean(1) for name, x in summaries.items()
        }
    return summaries | {"mean": weights.mean(1)}


def _index(chosen: tuple[float, float], grid: tuple[int, int]) -> int:
    row, column = (
        min(int(share * count), count - 1) for share, count in zip(chosen, grid, strict=True)
    )
    return row * grid[1] + column


def observe(
    definition, weights: Weights, config, data: Data, batches: Iterable[np.ndarray], *, shown: int,
    chosen: tuple[float, float] = (0.5, 0.5),
) -> Observed:  # fmt: skip
    """Runs a model on images.

    Args:
      definition, weights: from `registry.split`.
      config: the family's.
      data: that section of a config; `mean` and `std` are used.
      batches: images (B, H, W, C) uint8, as they come; only the last may have fewer than the first.
      shown: of how many images, the first, maps are kept.
      chosen: see `summary`.
    """
    all_layouts = layouts(config)
    look = make_look(definition, config, data, chosen)
    pieces: dict[str, list[np.ndarray]] = {}
    means: dict[str, np.ndarray] = {}
    tokens = []
    logits = []
    count = 0
    rows = 0
    for batch in batches:
        start = count
        real = len(batch)
        rows = rows or real
        count += real
        # One shape, one compilation.
        padded = np.concatenate([batch, np.repeat(batch[:1], rows - real, axis=0)])
        output = jax.device_get(look(weights, padded))
        if output["logits"] is not None:
            logits.append(output["logits"][:real])
        tokens.append(output["tokens"][: min(real, max(shown - start, 0))])
        for name, array in output["found"].items():
            array = array[:, :real]
            if name.endswith((".read", ".rollout", ".chosen")):
                total = array.astype(np.float64).sum(1)
                means[name] = means.get(name, 0) + total
                array = array[:, : max(shown - start, 0)]
            elif name.endswith((".sum", ".square")):
                means[name] = means.get(name, 0) + array.astype(np.float64).sum(1)
                continue
            pieces.setdefault(name, []).append(array)
    whole = {name: np.concatenate(arrays, axis=1) for name, arrays in pieces.items()}
    return Observed(
        streams={
            name: _stream(name, layout, whole, means, count)
            for name, layout in all_layouts.items()
            if f"{name}.distance" in whole
        },
        norms={n.removesuffix(".norm"): x for n, x in whole.items() if n.endswith(".norm")},
        channels={
            name.removesuffix(".sum"): _deviation(name.removesuffix(".sum"), means, whole)
            for name in means
            if name.endswith(".sum")
        },
        tokens=np.concatenate(tokens),
        logits=np.concatenate(logits) if logits else None,
    )


def make_look(definition, config, data: Data, chosen: tuple[float, float] = (0.5, 0.5)) -> Callable:
    """`look(weights, images)`, compiled: uint8 (B, H, W, C) to `found`, arrays (L, B, …) by name, and
    the model's `logits` and patch `tokens`.
    """
    all_layouts = layouts(config)
    forward = make_forward(definition, config, data, capture=summary(all_layouts, chosen))

    def of_part(weights: Weights, images: jax.Array) -> dict:
        output: ModelOutput = forward(weights, images)
        # What families capture once, not layer by layer, is not looked at.
        arrays = {n: x for n, x in output.intermediates.items() if "." in n and x.ndim > 1}
        for name, layout in all_layouts.items():
            if f"{name}.mean" in arrays:
                read = functools.partial(
                    attention.attention_read, grid=layout.grid, class_token=layout.class_token
                )
                arrays[f"{name}.rollout"] = attention.rollout(arrays.pop(f"{name}.mean"), read)
        patches = layer_features.last(output, config).patches
        return {"found": arrays, "logits": output.logits, "tokens": patches.astype(jnp.float32)}

    @jax.jit
    def look(weights: Weights, images: jax.Array) -> dict:
        count = max(n for n in range(1, PARTS + 1) if len(images) % n == 0)
        parts = images.reshape(count, -1, *images.shape[1:])
        output = jax.lax.map(functools.partial(of_part, weights), parts)

        def joined(x: jax.Array, axis: int) -> jax.Array:
            """(parts, …, b, …) with the images at `axis` of a part: (…, B, …)."""
            x = jnp.moveaxis(x, 0, axis)
            return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

        return {
            name: jax.tree.map(lambda x, axis=axis: joined(x, axis), output[name])
            for name, axis in (("found", 1), ("logits", 0), ("tokens", 0))
        }

    return look


@dataclasses.dataclass
class Details:
    """What is taken from all layers' weights at once, of the images shown.

    Attributes:
      similarity: (L, L) between layers, averaged over images, by the name of the attention.
      ranks: (L, images) effective rank of the patches after every block, by the name of the blocks.
      flow: (images, patches) to each patch, if it is wanted and there is attention.
    """

    similarity: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    ranks: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    flow: np.ndarray | None = None


def details(
    definition, weights: Weights, config, data: Data, images: np.ndarray, *, with_flow: bool = False
) -> Details:
    """Runs a model on images, one at a time.

    Args:
      definition, weights, config, data: see `observe`.
      images: (n, H, W, C) uint8, few.
      with_flow: also attention flow, which takes minutes for an image of 196 patches.
    """
    all_layouts = layouts(config)
    forward = make_forward(definition, config, data, capture=True)
    look = jax.jit(lambda weights, images: forward(weights, images).intermediates)
    similar: dict[str, list] = {}
    ranks: dict[str, list] = {}
    flows = []
    for image in images:
        captured = jax.device_get(look(weights, image[None]))
        for name, array in captured.items():
            if name in all_layouts:
                similar.setdefault(name, []).append(np.asarray(attention.similarity(array)))
            elif name.endswith("blocks"):
                patches = _layout_of(name, all_layouts).patches
                of_layers = [effective_rank(layer[0, -patches:]) for layer in array]
                ranks.setdefault(name, []).append(of_layers)
        if with_flow and "attention" in captured:
            layout, means = all_layouts["attention"], captured["attention"][:, 0].mean(1)
            flows.append(flow(means)[-layout.patches :])
    return Details(
        similarity={name: np.mean(arrays, axis=0) for name, arrays in similar.items()},
        ranks={name: np.array(arrays).T for name, arrays in ranks.items()},
        flow=np.array(flows) if flows else None,
    )


def for_inspection(config):
    """The model's config, computed layer by layer in a loop, which compiles fastest and holds least, and
    in float32.
    """
    return dataclasses.replace(config, unroll=1, remat="none", dtype="float32")


def _layout_of(blocks: str, all_layouts: dict[str, Layout]) -> Layout:
    """Of the tokens that blocks give: `small_blocks` has those of `small_attention`."""
    return all_layouts[blocks.removesuffix("blocks") + "attention"]


def _stream(name: str, layout: Layout, whole: dict, means: dict, count: int) -> Stream:
    def get(key: str) -> np.ndarray | None:
        return whole.get(f"{name}.{key}")

    rollout = means.get(f"{name}.rollout")
    return Stream(
        layout=layout,
        distance=get("distance"),
        renormalised=get("renormalised"),
        with_class=get("with_class"),
        entropy=get("entropy"),
        logit_range=get("logit_range"),
        read=get("read"),
        mean_read=(means[f"{name}.read"] / count).mean(1),
        chosen=get("chosen"),
        rollout=get("rollout"),
        mean_rollout=None if rollout is None else rollout / count,
    )


def _deviation(name: str, means: dict, whole: dict) -> np.ndarray:
    norms = whole[f"{name}.norm"]
    count = norms.shape[1] * norms.shape[2]
    mean = means[f"{name}.sum"] / count
    return np.sqrt(np.maximum(means[f"{name}.square"] / count - mean**2, 0))
