"""Self-distillation without labels: DINO, iBOT and DINOv2 (arXiv 2104.14294, 2111.07832, 2304.07193;
facebookresearch/dinov2).

A student sees several views of an image, and learns to say of each what a teacher, its own moving
average, says of the two large ones (the global views), as probabilities of learned prototypes. Patches of
one global view are masked for the student, which says what the teacher does of them. KoLeo keeps the
class tokens of different images apart.

Where it is not as the authors' code: half of the global views are masked there too, but any half; here
one of the two of each image, so that the masked patches of an image stay on its device. Sinkhorn-Knopp
takes the whole batch, as theirs; so does KoLeo, which compares the images of a device there: what is
learned would depend on how many devices there are. `koleo_images` compares as many as theirs did. With
`config.accumulate` both take one part of the batch; the centre moves once a step, by all parts. One norm is
clipped, that of all gradients; there those of backbone and heads apart.

DINOv3 (2508.10104) continues with Gram anchoring, see `gram`, and with views of several sizes
(`config.data.view_sizes`): a program is compiled for each.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.data.several_views import AGAIN
from vit_jax.models.resized import resized
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig
from vit_jax.objectives.contract import (
    Batch,
    GramTeacher,
    Learner,
    MovingAverage,
    Objective,
    ObjectiveContext,
)
from vit_jax.objectives.dino import block_masks, gram, losses
from vit_jax.objectives.dino.options import DinoOptions
from vit_jax.objectives.dino.views import ViewModels, check_models, models_of

_CENTRES = ("centre", "patch_centre")
_EQUAL = 1e-3  # nats that teacher outputs differ by, below which they are all the same


class DinoModules(nnx.Module):
    """Heads, the embedding of a masked patch, centres of the teacher's logits, and for how many steps in a
    row all of the teacher's outputs have been equal.
    """

    def __init__(self, width: int, options: DinoOptions, dtype: jnp.dtype, rngs: nnx.Rngs):
        def head():
            return losses.Head(
                width,
                hidden=options.head_hidden,
                bottleneck=options.bottleneck,
                prototypes=options.prototypes,
                std=options.head_std,
                dtype=dtype,
                rngs=rngs,
            )

        self.head = head()
        if options.two_heads:
            self.patch_head = head()
        if options.patch_weight:
            self.mask = nnx.Param(jnp.zeros(width))
        if options.centering == "centre":
            self.centre = nnx.Variable(jnp.zeros(options.prototypes))
            if options.patch_weight:
                self.patch_centre = nnx.Variable(jnp.zeros(options.prototypes))
        self.equal_steps = nnx.Variable(jnp.int32(0))

    def logits(
        self,
        features: list[jax.Array],
        patches: list[jax.Array],
        *,
        frozen: jax.Array | bool = False,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Of class tokens and of patches, (B, N, D) each -> (B, N, K), by their heads or both by one."""
        if patches and hasattr(self, "patch_head"):
            return self.head(features, frozen=frozen), self.patch_head(patches, frozen=frozen)
        both = self.head([*features, *patches], frozen=frozen)
        return both[: len(features)], both[len(features) :]


class Dino(Objective):
    """The sum of DINO's, iBOT's and KoLeo's losses. Metrics: each of these; `teacher_entropy`, the mean of
    the teacher's probabilities' in nats; `teacher_information`, by how much less that is than the entropy of
    their mean: 0 if the teacher says the same of all images; `collapsed_steps`, for how long it has.
    """

    Options = DinoOptions
    needs_labels = False
    mixes = False
    needs_views = True

    def __init__(self, options: DinoOptions, context: ObjectiveContext):
        super().__init__(options, context)
        model = context.model
        if type(model) is not PublishedViTConfig:
            raise ConfigError("objective dino needs a ViT or a DeiT, whose patches can be masked")
        self.views = models_of(context, with_gram=options.gram_weight > 0)
        low, high = options.mask_shares
        if low > high or (options.patch_weight and not all(map(self._most_masked, self.views))):
            raise ConfigError(
                f"config.objective.mask_shares = {options.mask_shares} of {math.prod(model.grid)} patches must rise, "
                "and leave some to predict"
            )
        compared = options.koleo_images or context.batch_size
        if options.koleo and (compared < 2 or context.batch_size % compared):
            raise ConfigError(
                f"KoLeo compares images with each other: config.batch_size / accumulate = {context.batch_size} "
                f"must be split into two or more at a time (config.objective.koleo_images = "
                f"{options.koleo_images}); or set config.objective.koleo to 0"
            )
        self.warmup = context.to_steps(options.temperature_warmup)
        self.frozen = context.to_steps(options.frozen_prototypes)
        self.gram_start = context.to_steps(options.gram_start)
        self.gram_refresh = context.to_steps(options.gram_refresh)

    def check_effects(self) -> None:
        total = self.context.total_steps
        if self.options.gram_weight and self.gram_start >= total:
            raise ConfigError(
                f"config.objective.gram_start = {self.options.gram_start!r} is step {self.gram_start}, and the run has "
                f"{total}: Gram anchoring would never begin; set an earlier start, a longer config.duration, or "
                "gram_weight to 0"
            )

    def make_modules(self, rngs: nnx.Rngs) -> DinoModules:
        model = self.context.model
        check_models(model, self.views, self.options.view_resize)
        width = model.representation or model.width
        if self.options.patch_weight and width != model.width:
            raise ConfigError(
                "objective dino reads patches as it does class tokens: set model.representation to 0"
            )
        return DinoModules(width, self.options, jnp.dtype(model.dtype), rngs)

    def teacher(self) -> MovingAverage:
        begin, end = self.options.momentum

        def momentum(step: jax.Array) -> jax.Array:
            done = jnp.minimum(step / self.context.total_steps, 1)
            return end - (end - begin) * (1 + jnp.cos(jnp.pi * done)) / 2

        return MovingAverage(momentum)

    def gram_teacher(self) -> GramTeacher | None:
        """The Gram teacher, and the steps at which it takes the teacher's weights; `None` without Gram anchoring."""
        options, start, every = self.options, self.gram_start, self.gram_refresh
        if not options.gram_weight:
            return None

        def is_due(step: jax.Array) -> jax.Array:
            steps = step - start
            begins = (steps == 0) & (not options.gram_teacher)
            if not every:
                return begins
            last = every * options.gram_refreshes
            return begins | ((steps > 0) & (steps % every == 0) & (steps <= last))

        return GramTeacher("config.objective.gram_teacher", options.gram_teacher, is_due)

    def temperature(self, step: jax.Array) -> jax.Array:
        """The teacher's."""
        begin, end = self.options.teacher_temperature
        return begin + (end - begin) * jnp.minimum(step / max(self.warmup, 1), 1)

    def flops(self) -> int:
        """Operations of an image's forward passes; the teachers', which have no backward pass, count a third. The mean
        over sizes of views.
        """
        model, options = self.context.model, self.options
        width, hidden, bottleneck = model.width, options.head_hidden, options.bottleneck
        head = 2 * (
            width * hidden + hidden**2 + hidden * bottleneck + bottleneck * options.prototypes
        )

        def of_views(views: ViewModels) -> int:
            masked = self._most_masked(views) if options.patch_weight else 0
            both = 2 * views.model.flops() + (2 + masked) * head
            local = sum(
                self.context.views[name][0] * (config.flops() + head)
                for name, config in views.local.items()
            )
            anchored = 2 * views.gram.flops() // 3 if views.gram else 0
            return both + local + both // 3 + anchored

        return sum(map(of_views, self.views)) // len(self.views)

    def warning(self, metrics: dict[str, float]) -> str:
        if metrics.get("collapsed_steps", 0) < self.options.collapse_steps:
            return ""
        return (
            f"The teacher has given the same output for every image for {self.options.collapse_steps} steps and more: "
            "nothing is learned any more. Start again with a lower config.optim.lr, a longer warm-up, a higher "
            "config.objective.momentum, or config.objective.centering=sinkhorn"
        )

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        if "image" in batch:
            return self._held_out(learner, batch["image"])
        options = self.options
        modules = learner.modules
        teacher = learner.teacher
        views = self._views_in(batch)
        images = jnp.concatenate([batch[name] for name in views.names], axis=1)
        masks = None
        if options.patch_weight:
            masks = self._masks(rngs.dropout(), len(images), views)
        model, taught_by = (self._at(owner.model, views.model) for owner in (learner, teacher))
        taught, taught_patches = _look(taught_by, images)
        features, patches = _look(model, images, masks, modules, rngs)
        of_local = [
            _look(self._at(learner.model, config), batch[name], rngs=rngs)[0]
            for name, config in views.local.items()
        ]
        hidden = self._hidden(masks, views) if options.patch_weight else lambda _: []
        (logits,), patch_logits = jax.lax.stop_gradient(
            teacher.modules.logits([taught], hidden(taught_patches))
        )
        (predicted, *of_local), predicted_patches = modules.logits(
            [features, *of_local], hidden(patches), frozen=learner.step < self.frozen
        )
        probabilities = self._probabilities(learner, logits, "centre")
        loss = dino = losses.class_token_loss(
            probabilities, predicted, of_local, options.student_temperature
        )
        metrics = {"dino_loss": dino}
        if options.patch_weight:
            (present,) = hidden(masks[..., None])
            present = present[..., 0].astype(jnp.float32)
            of_patches = self._probabilities(learner, *patch_logits, "patch_centre", present)
            # The mean over both global views, of which one has no mask.
            metrics["ibot_loss"] = 0.5 * losses.patch_loss(
                of_patches, *predicted_patches, present, options.student_temperature
            )
            loss += options.patch_weight * metrics["ibot_loss"]
        if options.gram_weight:
            metrics["gram_loss"] = self._gram(learner, batch, images, patches, views)
            weight = jnp.where(learner.step >= self.gram_start, options.gram_weight, 0.0)
            loss += weight * metrics["gram_loss"]
        if options.koleo:
            groups = features.swapaxes(0, 1)
            compared = options.koleo_images or len(images)
            groups = groups.reshape(2, -1, compared, features.shape[-1])
            metrics["koleo_loss"] = losses.koleo(groups).reshape(2, -1).sum(0)
            loss += options.koleo * metrics["koleo_loss"]
        entropies = _entropy(probabilities).mean(1)
        learner.observed["teacher"] = {
            "mean": probabilities.mean((0, 1)),
            "entropy": entropies.mean(),
        }
        return loss, metrics | {"teacher_entropy": entropies}

    def update_state(
        self, modules: DinoModules, observed: dict[str, Any], step: jax.Array
    ) -> dict[str, jax.Array]:
        """Moves the centres, and counts the steps in a row with equal outputs of the teacher."""
        for name in _CENTRES:
            if name in observed:
                centre = getattr(modules, name)
                momentum = self.options.centre_momentum
                centre[...] = losses.moved_centre(centre[...], observed[name], momentum)
        teacher = observed["teacher"]
        information = _entropy(teacher["mean"].mean(0)) - teacher["entropy"].mean(0)
        modules.equal_steps[...] = jnp.where(information < _EQUAL, modules.equal_steps[...] + 1, 0)
        return {
            "teacher_information": information,
            "collapsed_steps": modules.equal_steps[...].astype(jnp.float32),
        }

    def _views_in(self, batch: Batch) -> ViewModels:
        """The sizes that the views of a batch have."""
        return next(views for views in self.views if views.are_in(batch))

    def _at(self, model: nnx.Module, config: PublishedViTConfig) -> nnx.Module:
        """The model at the image size of a config."""
        student = self.context.model
        return (
            model
            if config == student
            else resized(model, student, config, self.options.view_resize)
        )

    def _most_masked(self, views: ViewModels) -> int:
        """Patches of a global view that can be masked."""
        return int(self.options.mask_shares[1] * math.prod(views.model.grid))

    def _gram(
        self,
        learner: Learner,
        batch: Batch,
        images: jax.Array,
        patches: jax.Array,
        views: ViewModels,
    ) -> jax.Array:
        """The loss of Gram anchoring (B,), the mean over global views.

        Args:
          images: the global views (B, 2, H, W, C), which the Gram teacher sees unless they are cut for it once more.
          patches: of the student, (B, 2, N, D).
        """
        names = [name + AGAIN for name in views.names]
        if names[0] in batch:
            images = jnp.concatenate([batch[name] for name in names], axis=1)
        _, earlier = _look(self._at(learner.gram_teacher, views.gram), images)
        earlier = gram.resized(jax.lax.stop_gradient(earlier), views.gram.grid, views.model.grid)
        return gram.loss(patches, earlier).mean(1)

    def _hidden(
        self, masks: jax.Array, views: ViewModels
    ) -> Callable[[jax.Array], list[jax.Array]]:
        """Of tokens (B, 2, N, D), those in masks (B, 2, N): (B, M, D), as many as there can be, those that
        are there first; a list of it.
        """
        which = masks.any(-1).argmax(1)[:, None, None, None]  # of the two views
        places = jnp.argsort(~masks.any(1), axis=1, stable=True)
        places = places[:, : self._most_masked(views), None]

        def hidden(x: jax.Array) -> list[jax.Array]:
            x = jnp.take_along_axis(x, which, axis=1)[:, 0]
            return [jnp.take_along_axis(x, places, axis=1)]

        return hidden

    def _probabilities(
        self, learner: Learner, logits: jax.Array, centre: str, present: jax.Array | None = None
    ) -> jax.Array:
        """The teacher's probabilities for its logits (…, K), by the centre of this name. Rows that are not `present`
        (…) are padding.
        """
        temperature = self.temperature(learner.step)
        if self.options.centering == "sinkhorn":
            return losses.sinkhorn(logits, temperature, present)
        learner.observed[centre] = losses.sum_of_logits(logits, present)
        return losses.centred(logits, getattr(learner.modules, centre)[...], temperature)

    def _masks(self, key: jax.Array, batch: int, views: ViewModels) -> jax.Array:
        """(B, 2, N) bool: of each image one of the two global views is masked, by shares that are spread
        evenly over `mask_shares` and dealt to the images at random.
        """
        which_key, deal_key, share_key, mask_key = jax.random.split(key, 4)
        rank = jax.random.permutation(deal_key, batch) + jax.random.uniform(share_key, (batch,))
        (low, high), grid = self.options.mask_shares, views.model.grid
        counts = jnp.floor(math.prod(grid) * (low + (high - low) * rank / batch)).astype(jnp.int32)
        masks = block_masks.draw(mask_key, counts, grid)
        first = jax.random.bernoulli(which_key, shape=(batch, 1))
        return jnp.stack([masks & first, masks & ~first], axis=1)

    def _held_out(self, learner: Learner, images: jax.Array):
        """The cross-entropy of teacher and student on images (B, H, W, C) that no view was cut from: an
        example's own, whatever others are in the batch.
        """
        images = images[:, None]
        modules = learner.modules
        teacher = learner.teacher
        (logits,) = teacher.modules.head([_look(teacher.model, images)[0]])
        centre = modules.centre[...] if self.options.centering == "centre" else 0.0
        probabilities = losses.centred(logits, centre, self.temperature(learner.step))
        (student,) = modules.head([_look(learner.model, images)[0]])
        temperature = self.options.student_temperature
        loss = losses.cross_entropy(probabilities, student, temperature)[:, 0]
        return loss, {}


def _entropy(p: jax.Array) -> jax.Array:
    """(…, K) -> (…), in nats."""
    return -jnp.sum(p * jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny)), axis=-1)


def _look(
    model: nnx.Module,
    images: jax.Array,
    masks: jax.Array | None = None,
    modules: DinoModules | None = None,
    rngs: nnx.Rngs | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Features (B, V, D) and patches (B, V, N, D) of views (B, V, H, W, C).

    Args:
      masks: (B, V, N) bool, patches in whose place is `own.mask`.
      rngs: of a student; without, nothing is random.
    """
    call = {"deterministic": rngs is None, "rngs": rngs}
    x = model.patches(images.reshape(-1, *images.shape[2:]), **call)
    count = x.shape[1]
    if masks is not None:
        x = jnp.where(masks.reshape(-1, count, 1), modules.mask[...].astype(x.dtype), x)
    tokens, _ = model.encode(model.add_positions(x), **call)
    features = model.forward_head(tokens, {}).features
    return tuple(y.reshape(*images.shape[:2], *y.shape[1:]) for y in (features, tokens[:, -count:]))
