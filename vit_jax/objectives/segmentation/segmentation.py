"""Segmentation: the class of every pixel, by one of the heads in `heads.py`; with panoptic masks EoMT's
queries learn single things.

Beside what EoMT's authors publish (tue-mps/eomt): all losses are of each example by itself, theirs are divided
by the number of segments of a batch; pixels that do not count are no points of any mask, where theirs are points
outside of all; and of an image the `segments` largest classes are learned.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.data.labels.segments import MOST_PREDICTED
from vit_jax.models import layer_features, registry
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives.contract import Batch, Learner, Objective, ObjectiveContext
from vit_jax.objectives.segmentation import losses
from vit_jax.objectives.segmentation.heads import LinearHead, MultilevelHead, QueryHead

_POWER = 0.9  # of the annealing
_LEVELS = 4  # layers that are fused if none are named


@dataclasses.dataclass(frozen=True)
class SegmentationOptions:
    """What `config.objective` says for segmentation."""

    head: str = option(
        "eomt",
        "what reads maps off the model: queries in its last blocks (EoMT), a linear layer, or several layers fused",
        choices=("eomt", "linear", "multilevel"),
    )
    layers: tuple = option(
        (),
        "multilevel: layers that are fused, by number or name; (): four, evenly spaced, the last included",
    )
    width: int = option(256, "multilevel: channels of the fused map", minimum=1)
    queries: int = option(
        100, "eomt: how many queries there are", minimum=1, maximum=MOST_PREDICTED
    )
    blocks: int = option(4, "eomt: last blocks that queries go through", minimum=1)
    segments: int = option(
        40,
        "eomt: of an image at most this many classes are learned, the largest; of panoptic masks no image may have "
        "more segments",
        minimum=1,
    )
    enlarge: str = option(
        "scores",
        "eomt: what is enlarged to pixels; scores: sums over queries; masks: each query's, to the size of the model's "
        "images, before they are summed, as the authors do: better where things are small, slower",
        choices=("scores", "masks"),
    )
    points: int = option(12544, "eomt: points at which masks are compared, about", minimum=4)
    annealing: tuple = option(
        (1 / 6, 5 / 6),
        "eomt: from which to which share of the run masked attention is switched off, block by block",
        minimum=0,
        maximum=1,
        length=2,
    )
    mask_weight: float = option(5.0, "eomt: of the cross-entropy of masks", minimum=0)
    dice_weight: float = option(5.0, "eomt: of the dice loss of masks", minimum=0)
    class_weight: float = option(2.0, "eomt: of the cross-entropy of queries' classes", minimum=0)
    no_object: float = option(
        0.1, "eomt: in that cross-entropy, the weight of queries without a segment", above=0
    )


class Segmentation(Objective):
    """The class of every pixel. `accuracy` is that of pixels; of EoMT the parts of the loss of the last
    prediction are measured instead: `mask`, `dice` and `label`.
    """

    Options = SegmentationOptions
    needs_labels = False
    needs_masks = True
    mixes = False
    predicts_with_modules = True
    evaluator = "segmentation"

    def __init__(self, options: SegmentationOptions, context: ObjectiveContext):
        super().__init__(options, context)
        self.num_classes, self.table = context.num_classes, context.segments
        if options.head == "eomt":
            self._check_queries(context.model)
        else:
            _ = self.maps

    def _check_queries(self, model) -> None:
        if type(model) is not PublishedViTConfig or model.weighted_layers:
            raise ConfigError(
                "objective segmentation with head=eomt needs a ViT or a DeiT: set --config.objective.head=linear, or "
                "another model"
            )
        if model.position_place in ("layers", "shared"):
            raise ConfigError(
                "objective segmentation with head=eomt: queries have no position, so config.model.position_at must be "
                "'stem', and config.model.position not 'relative'"
            )
        if self.options.blocks > model.depth:
            raise ConfigError(
                f"config.objective.blocks = {self.options.blocks} must be at most {model.depth}, the model's blocks"
            )
        most, table = min(self.options.segments, self.options.queries), self.table
        if table is not None and table.most > most:
            raise ConfigError(
                f"{table.crowded} has {table.most} segments, and config.objective.segments = {self.options.segments}, "
                f"config.objective.queries = {self.options.queries}: set both to {table.most} or more"
            )
        low, high = self.options.annealing
        if low >= high:
            raise ConfigError(f"config.objective.annealing = {self.options.annealing} must rise")

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that the multilevel head reads; () for the others."""
        if self.options.head != "multilevel":
            return ()
        names = layer_features.layer_names(self.context.model)
        main = [name for name in names if name.startswith("blocks/")] or names
        spread = sorted({max(len(main) * (i + 1) // _LEVELS - 1, 0) for i in range(_LEVELS)})
        try:
            return layer_features.check_layers(self.context.model, self.options.layers or spread)
        except ConfigError as error:
            raise ConfigError(f"config.objective.layers: {error}") from error

    @functools.cached_property
    def maps(self) -> tuple[tuple[int, int, int], ...]:
        """(h, w, D) of what a head reads: of the last layer, or of `layers`."""
        config = self.context.model
        definition, weights = registry.abstract_weights(config)
        shape = (1, *config.height_width, config.channels)

        def read(weights: registry.Weights, images: jax.Array) -> list[jax.Array]:
            model = nnx.merge(definition, *weights)
            output, layers = layer_features.compute(model, images, self.layers, norm=False)
            return [x.map for x in layers or (layer_features.last(output, config),)]

        shapes = jax.eval_shape(read, weights, jax.ShapeDtypeStruct(shape, jnp.float32))
        return tuple(x.shape[1:] for x in shapes)

    def make_modules(self, rngs: nnx.Rngs) -> nnx.Module:
        model, classes, options = self.context.model, self.num_classes, self.options
        if options.head == "eomt":
            return QueryHead(model, classes, options.queries, options.blocks, rngs)
        widths = tuple(width for _, _, width in self.maps)
        if options.head == "linear":
            return LinearHead(*widths, classes, rngs)
        dtype = jnp.dtype(model.dtype)
        return MultilevelHead(self.layers, widths, options.width, classes, dtype, rngs)

    def targets(self, batch: Batch) -> Batch:
        """`label` (B, H, W) uint8, or uint16 of panoptic masks."""
        return {"label": batch["label"]}

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        images, labels = batch["image"], batch["label"]
        if self.options.head != "eomt":
            logits = learner.modules.logits(learner.model, images, training=True, rngs=rngs)
            loss, accuracy = losses.pixel_loss(logits, labels)
            accuracy = losses.of_counted(accuracy, labels)
            return losses.of_counted(loss, labels), {"accuracy": accuracy}
        key, loss_key = jax.random.split(rngs.dropout())
        predictions = learner.modules(
            learner.model, images, masked=self.masked(learner.step), key=key, rngs=rngs
        )
        masks, classes = (jnp.stack(x) for x in zip(*predictions, strict=True))
        parts = losses.query_loss(
            masks,
            classes,
            labels,
            loss_key,
            most=self.segments,
            points=self.points,
            weights=self.weights,
            things=self.things,
        )
        loss = sum(x.sum(0) for x in parts.values())
        metrics = {name: losses.of_counted(x[-1], labels) for name, x in parts.items()}
        return losses.of_counted(loss, labels), metrics

    @property
    def panoptic(self) -> bool:
        """Whether single things are found."""
        return self.table is not None and self.options.head == "eomt"

    def answers(self, learner: Learner, images: jax.Array) -> tuple[jax.Array, ...]:
        """What the trained model answers: scores (B, h, w, K) float32, of which the highest class counts; and if
        it is `panoptic`, probabilities of the queries' masks (B, h, w, Q) and classes (B, Q, K + 1).

        Args:
          images: (B, H, W, C), normalised.
        """
        if self.options.head != "eomt":
            return (learner.modules.scores(learner.model, images),)
        ((masks, classes),) = learner.modules(learner.model, images)
        size = images.shape[1:3] if self.options.enlarge == "masks" else None
        scores = learner.modules.joined(masks, classes, size)
        if not self.panoptic:
            return (scores,)
        return scores, jax.nn.sigmoid(jnp.moveaxis(masks, 1, -1)), jax.nn.softmax(classes)

    def masked(self, step: jax.Array) -> jax.Array:
        """(blocks,) the probability that a query attends to its own mask alone: from 1 to 0, in one block
        after the other.
        """
        options, total = self.options, self.context.total_steps
        low, high = options.annealing
        bounds = jnp.linspace(low * total, high * total, options.blocks + 1)
        done = (step - bounds[:-1]) / (bounds[1:] - bounds[:-1])
        return (1 - jnp.clip(done, 0, 1)) ** _POWER

    @property
    def segments(self) -> int:
        """Segments of an image that are learned at most."""
        possible = self.num_classes + self.things
        return min(self.options.segments, possible, self.options.queries)

    @property
    def things(self) -> int:
        """How many things an image has at most."""
        return self.table.most if self.table is not None else 0

    @property
    def points(self) -> losses.Points:
        """The points at which masks are compared, as many as the option says."""
        return losses.Points(self.options.points)

    @property
    def weights(self) -> losses.Weights:
        """The weights of the loss's parts, from the options."""
        options = self.options
        return losses.Weights(
            options.mask_weight, options.dice_weight, options.class_weight, options.no_object
        )

    def flops(self) -> int:
        predictions = self.options.blocks + 1 if self.options.head == "eomt" else 1
        return self.flops_of(predictions)

    def flops_of(self, predictions: int) -> int:
        """`flops` with so many of EoMT's predictions; the trained model makes one."""
        model, options = self.context.model, self.options
        forward = registry.count_flops(model)
        if options.head != "eomt":
            (height, width, channels), fused = self.maps[-1], options.width
            if options.head == "linear":
                return forward + 2 * height * width * channels * self.num_classes
            projected = sum(h * w * d * fused for h, w, d in self.maps)
            return (
                forward
                + 2 * projected
                + 32 * height * width * fused * (9 * fused + self.num_classes)
            )
        patches, width = model.grid[0] * model.grid[1], model.width
        tokens, queries = model.tokens, options.queries
        joined = model.block_flops(tokens + queries) - model.block_flops(tokens)
        enlarged = 4 ** max(1, model.patch.bit_length() - 3)
        # Each enlargement has products of 4 D² for a pixel that it gets: a geometric sum over them.
        upscale = 8 * patches * width**2 * (enlarged - 1) // 3
        read = 2 * queries * width * (3 * width + self.num_classes + 1 + enlarged * patches)
        return forward + joined * options.blocks // model.depth + predictions * (upscale + read)
