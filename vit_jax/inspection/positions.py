"""How alike the positions of patches are: a grid of grids (ViT Fig. 7 centre, Fig. 10), and what comes
nearest to it where positions are of another kind.
"""

from collections.abc import Iterator

import jax
import numpy as np
from flax import traverse_util

from vit_jax.base import patterns
from vit_jax.inspection.contract import InspectionContext, Section, spread
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.grid_positions import Learned, Sincos2d
from vit_jax.models.positions import ComputedPosition, Position, kind_of, of
from vit_jax.models.table_positions import joined
from vit_jax.pictures import tiles

_MOST_TABLES, _MOST_TILES = 4, 16  # pictures; tiles in a row or column of one


def similarity(table: np.ndarray) -> np.ndarray:
    """The cosine of each row of a table (n, D) with each: (n, n) float64."""
    table = table.astype(np.float64)
    length = np.linalg.norm(table, axis=-1, keepdims=True)
    table = table / np.where(length > 0, length, 1)
    return table @ table.T


def offsets(table: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Of a table of distances in the row of all patches (2n - 1, C), the cosine of each distance with
    distance 0, spread out to rows and columns: (2h - 1, 2w - 1) float64.
    """
    rows, columns = grid
    zero = rows * columns - 1
    down, across = np.arange(1 - rows, rows), np.arange(1 - columns, columns)
    return similarity(table)[zero][down[:, None] * columns + across + zero]


def tables(context: InspectionContext) -> Iterator[tuple[str, str, np.ndarray, tuple[int, int]]]:
    """(name, what it is, the table, grid) of all positions of a model: rows of patches (n, D), of distances
    (2n - 1, C), biases of distances down and across ((2h - 1)(2w - 1), heads).
    """
    named = {}
    for part in context.weights:
        named |= patterns.named(part)
    for name, array in named.items():
        words = name.split("/")
        if "position" not in words or words[-1] in ("y", "tokens") or "/mlp/" in name:
            continue
        network = _network(context.config, words)
        kind = _kind_of(network)
        if not kind.shown_by or issubclass(kind, ComputedPosition):
            continue
        grid = getattr(network, "position_grid", None) or network.grid
        if words[-1] == "x":
            stem = name.removesuffix("/x")
            array = _joined(array, named[f"{stem}/y"], getattr(kind, "summed", False))
            words = words[:-1]
        if words[-1] == "frequencies":
            words = words[:-1]
            array = _made(network, named, "/".join(words))
        layers = array if patterns.is_stacked(name) else array[None]
        for number in spread(len(layers), _MOST_TABLES):
            table = layers[number].reshape(-1, array.shape[-1])
            label = _in_words(words) + (f", layer {number + 1}" if len(layers) > 1 else "")
            rows, columns = grid
            if kind.shown_by == "patches":
                table = table[-rows * columns :]
            elif kind.shown_by == "biases":
                table = table[: (2 * rows - 1) * (2 * columns - 1)]
            yield label, kind.shown_by, table, tuple(grid)
    if issubclass(_kind_of(context.config), ComputedPosition):
        yield from _computed(context.config, named)


def inspect(context: InspectionContext) -> Section:
    """A picture for each table, of several layers for some."""
    section = Section("Similarity of positions", "")
    kinds = set()
    for label, kind, table, grid in tables(context):
        kinds.add(kind)
        key = "".join(c if c.isalnum() else "_" for c in label)
        rows, columns = grid
        if kind == "distances":
            similarities = offsets(table, grid)
            picture = tiles.matrix(
                f"Similarity of relative positions to distance 0 ({label})",
                similarities, tiles.Bar(-1, 1, "cosine", "diverging"),
                x="patches to the right", y="patches down", first=(1 - rows, 1 - columns),
            )  # fmt: skip
        elif kind == "biases":
            similarities = table.mean(axis=1).reshape(2 * rows - 1, 2 * columns - 1)
            most = float(np.abs(similarities).max()) or 1.0
            picture = tiles.matrix(
                f"Bias of attention's logits, mean of the heads ({label})",
                similarities, tiles.Bar(-most, most, "bias", "diverging"),
                x="patches to the right", y="patches down", first=(1 - rows, 1 - columns),
            )  # fmt: skip
        else:
            similarities = similarity(table).reshape(rows, columns, rows, columns)
            down, across = _thinned(rows), _thinned(columns)
            shown = [similarities[row, column] for row in down for column in across]
            picture = tiles.draw_tiles(
                f"Similarity of each patch's position with all others ({label})",
                shown, columns=len(across), side=max(14, 560 // max(len(down), len(across))), gap=4,
                bar=tiles.Bar(-1, 1, "cosine", "diverging"), x="column of the patch", y="row of the patch",
                rows_named=[f"{row + 1}" for row in down], columns_named=[f"{column + 1}" for column in across],
            )  # fmt: skip
        section.figures[f"positions_{key}"] = picture
        section.numbers[key] = similarities
    texts = {
        "patches": (
            "A tile for each patch, at its place: how alike its position is to that of every other. "
            "A patch's own place is red; a trained table shows its row and column."
        ),
        "distances": (
            "Relative positions have no table of patches: the picture shows, for each distance down "
            "and across, how alike its embedding is to that of distance 0, in the middle."
        ),
        "biases": (
            "Positions are a number added to attention's logits for each distance from key to query, down and "
            "across: the picture shows its mean over the heads."
        ),
    }
    section.text = " ".join(texts[kind] for kind in sorted(kinds)) or (
        "No meaning here: this model has no position embeddings of patches."
    )
    return section


def _kind_of(network: ClassifierConfig) -> type[Position]:
    """The kind of positions; families whose config has no option for that have a learned table."""
    return kind_of(network.position) if hasattr(network, "position") else Learned


def _in_words(words: list[str]) -> str:
    """What the parameter of a table of positions is called in a title: 'large branch', 'exit 2', 'encoder'."""
    places = [word.replace("_", " ") for word in words if word not in ("position", "layers")]
    return ", ".join(places) or "learned table"


def _network(config: ClassifierConfig, words: list[str]) -> ClassifierConfig:
    """The config of the part of a model that a parameter belongs to."""
    for word in words:
        if word in getattr(config, "branches", {}):
            return config.branches[word]
        if word.startswith("exit_") and hasattr(config, "networks"):
            return config.networks[int(word.removeprefix("exit_")) - 1]
    return config


def _joined(x: np.ndarray, y: np.ndarray, summed: bool) -> np.ndarray:
    if x.ndim == 3:
        return joined(x, y, summed=summed)
    return np.stack([joined(*axes, summed=summed) for axes in zip(x, y, strict=True)])


def _computed(
    config: ClassifierConfig, named: dict[str, np.ndarray]
) -> Iterator[tuple[str, str, np.ndarray, tuple[int, int]]]:
    """As `tables`, of positions that are a function of row and column."""
    label = f"{config.position} positions"
    if issubclass(_kind_of(config), Sincos2d):
        label = "fixed sines and cosines"
    stem = "encoder/layers/position" if config.position_place == "layers" else "position"
    made = _made(config, named, stem)
    layers = made if patterns.is_stacked(f"{stem}/") else made[None]
    for number in spread(len(layers), _MOST_TABLES):
        (table,) = layers[number]
        in_layer = f", layer {number + 1}" if len(layers) > 1 else ""
        yield f"{label}{in_layer}", "patches", table, tuple(config.grid)


def _made(network: ClassifierConfig, named: dict[str, np.ndarray], stem: str) -> np.ndarray:
    """The table that parameters below a name make, (1, rows, D); in layers (layers, 1, rows, D)."""
    start = f"{stem}/"
    flat = {name.removeprefix(start): x for name, x in named.items() if name.startswith(start)}
    params = traverse_util.unflatten_dict(flat, sep="/") if flat else named.get(stem)
    if not patterns.is_stacked(start):
        return of(network).as_learned(params)
    count = len(jax.tree.leaves(params)[0])
    in_layers = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(count)]
    return np.stack([of(network).as_learned(of_layer) for of_layer in in_layers])


def _thinned(count: int) -> range:
    return range(0, count, -(-count // _MOST_TILES))
