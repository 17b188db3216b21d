"""Whether layers do their work, as pictures: norms of tokens and outliers, entropy and logits of
attention, silent channels, effective rank.
"""

import numpy as np

from vit_jax.inspection import health
from vit_jax.inspection.contract import InspectionContext, Section
from vit_jax.pictures import style
from vit_jax.pictures.plot import Plot


def inspect(context: InspectionContext) -> Section:
    """Norms, outliers, entropy, logits, silent channels and ranks over depth."""
    section = Section("Health of the layers", "")
    observed = context.observed
    count = context.count
    if not observed.norms:
        section.text = "No meaning here: this family gives maps of several sizes, and no tokens after every block."
        return section
    texts = [f"Mean over {count} images (ranks over {context.shown})."]
    for name, norms in observed.norms.items():
        texts.append(_of_blocks(context, section, name, norms))
    for name, stream in observed.streams.items():
        title, depths = name.replace("_", " "), np.arange(1, len(stream.entropy) + 1)
        section.numbers |= {f"{name}/entropy": stream.entropy, f"{name}/range": stream.logit_range}
        even = np.log(stream.layout.patches)
        plot = _over_heads(
            f"Entropy of {title}, a dot for each head", "entropy [nats]", stream.entropy
        )
        plot.line([1, len(depths)], [even, even], style.GREY, "all patches alike", width=1)
        section.figures[f"{name}_entropy"] = plot.image()
        section.figures[f"{name}_logits"] = _over_heads(
            f"Largest logit above the mean logit of its query, {title}",
            "logits [nats]", stream.logit_range,
        ).image()  # fmt: skip
        if np.isnan(stream.entropy).any():
            texts.append(
                f"Where re-attention, or a difference of two attentions, makes weights of {title} negative they are no "
                "distribution, and entropy and logits have no meaning."
            )
    texts.append(
        "Entropy near 0 is attention to single tokens, which with growing logits precedes training "
        "that diverges; tokens of outlying norm are places that models without registers use as memory."
    )
    section.text = " ".join(texts)
    return section


def _of_blocks(context: InspectionContext, section: Section, name: str, norms: np.ndarray) -> str:
    title, layers = name.replace("_", " "), len(norms)
    layout = f"{name.removesuffix('blocks')}attention"
    patches = _patches(context, layout, norms.shape[-1])
    depths, of_patches = np.arange(1, layers + 1), norms[..., -patches:]
    flat = of_patches.reshape(layers, -1).astype(np.float64)
    plot = Plot(
        f"Norm of tokens after each of the {title}", x="layer", whole=True, y="norm", from_zero=True
    )
    plot.band(depths, flat.min(1), flat.max(1), style.COLOURS[0], "patches, smallest to largest")
    plot.line(depths, np.median(flat, axis=1), style.COLOURS[0], "patches, median")
    learned = norms[..., : norms.shape[-1] - patches]
    if learned.size:
        plot.line(depths, learned.mean((1, 2)), style.COLOURS[1], "learned tokens, mean")
    share = health.outliers(of_patches).reshape(layers, -1).mean(1)
    still, ranks = health.silent(context.observed.channels[name]), context.details.ranks[name]
    section.figures |= {f"{name}_norms": plot.image()}
    small = {
        "outliers": (
            f"Patches of more than {health.OUTLIER:g} times the median norm",
            "share of patches [%]",
            100 * share,
        ),
        "rank": (f"Effective rank of {patches} patches", "effective rank", ranks.mean(1)),
        "silent": (
            f"Silent channels: deviation below {health.SILENT:g} of the median",
            "channels",
            still,
        ),
    }
    for key, (words, unit, values) in small.items():
        if not values.any():  # The text says so.
            continue
        small_plot = Plot(f"{words}, {title}", x="layer", whole=True, y=unit, size=(400, 200))
        small_plot.line(depths, values, style.COLOURS[0])
        small_plot.dots(depths, values, style.COLOURS[0])
        section.figures[f"{name}_{key}"] = small_plot.image()
    section.numbers |= {
        f"{name}/norms": norms, f"{name}/outliers": share, f"{name}/silent": still, f"{name}/ranks": ranks,
    }  # fmt: skip
    most = int(share.argmax())
    return (
        f"{title.capitalize()}: outlier tokens at most {share[most]:.2%} of patches (layer {most + 1}); "
        f"silent channels after the last layer: {int(still[-1])} of {context.observed.channels[name].shape[1]}; "
        f"effective rank {ranks[0].mean():.1f} in layer 1, {ranks[-1].mean():.1f} in the last."
    )


def _patches(context: InspectionContext, attention: str, tokens: int) -> int:
    stream = context.observed.streams.get(attention)
    if stream is not None:
        return stream.layout.patches
    return min(context.grid[0] * context.grid[1], tokens)


def _over_heads(title: str, unit: str, values: np.ndarray) -> Plot:
    """Dots of (L, n, H), averaged over images."""
    mean = values.astype(np.float64).mean(1)
    layers, heads = mean.shape
    plot = Plot(title, x="layer", whole=True, y=unit, x_limits=(0.5, layers + 0.5), from_zero=True)
    plot.dots(np.repeat(np.arange(1, layers + 1), heads), mean.ravel(), style.COLOURS[0], "a head")
    plot.line(np.arange(1, layers + 1), mean.mean(1), style.COLOURS[1], "mean of heads")
    return plot
