"""A weighted sum of objectives over one model: images and texts beside the features of other models, or masked patches.

A term is any objective but one of masks, a guest's too. It brings its parameters, its fixed teachers or one moving
average, and what it needs of a batch (`targets`). Terms that are an `OutputTerm` share one forward pass; each other one
sees the images its own way, and has a forward pass of its own. If a term learns from labels the model has a head and is
judged by it. Beside a term of several views (`config.data.views`) the others see one of them, which it does not see.

A term that has not begun costs nothing but that shared pass, and its own parameters rest. If it has state (running
moments), that moves from the first step on. The term with a moving average waits, state and all: until it begins the
average is the student, and its steps count from there.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax import objectives
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest, option
from vit_jax.base.settings import named_entries
from vit_jax.data import texts
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import (
    Batch,
    FromCheckpoint,
    Learner,
    MovingAverage,
    Objective,
    ObjectiveContext,
    SavedObjective,
)
from vit_jax.objectives.image_text.image_text import ImageText, TokenOptions
from vit_jax.objectives.output_term import OutputTerm, forward
from vit_jax.objectives.sum.later import has_state, run_if
from vit_jax.objectives.supervised import Supervised

_OPTION = "config.objective.terms"


@dataclasses.dataclass(frozen=True)
class SumOptions(TokenOptions):
    """What `config.objective` says for a sum; of its term image_text also what its tokens are."""

    tokenizer: str = option("", "as of image_text, if that is a term; '': it is none")
    terms: tuple = option(
        (),
        "(name, options) of objectives; besides their own options weight (1) and start, a duration before which a term "
        "does not count: (('image_text', {}), ('features', {'teachers': ('RUN',), 'weight': 0.5, 'start': '80%'}))",
    )
    rest: bool = option(
        True,
        "whether a late term's own parameters rest until its start, without decay, and their optimizer counts from "
        "there; runs of earlier versions keep False",
    )
    view: int = option(
        0,
        "beside a term of several views: which of config.data.views the other terms see; that term sees the rest",
        minimum=0,
    )

    @property
    def loss(self) -> str:
        """The cross-entropy of the term with labels, by which logits become probabilities."""
        given = dict(_named(self.terms))
        known = (name for name in given if name in objectives.OBJECTIVES)
        labelled = (name for name in known if _kind(name).needs_labels)
        return given.get(next(labelled, ""), {}).get("loss", "softmax")


@dataclasses.dataclass(frozen=True)
class Term:
    """A term of the sum.

    Attributes:
      name: its objective's.
      objective: what is learned.
      weight: of its loss.
      start: the step at which it begins.
      teachers: which of the sum's fixed teachers are its own.
    """

    name: str
    objective: Objective
    weight: float
    start: int
    teachers: slice


class SupervisedOutput(Supervised, OutputTerm):
    """Classification, of the forward pass that it shares. `Supervised` is no `OutputTerm`, so that runs without a sum
    do not load what reads layers.
    """


class SumModules(nnx.Module):
    """What each term owns, by its name."""

    def __init__(self, terms: Mapping[str, nnx.Module]):
        self.terms = nnx.Dict(dict(terms))


class Sum(Objective):
    """The loss. Metrics: of each term its `loss`, and its own, after its name: `features_loss`; before it begins 0."""

    Options = SumOptions
    needs_labels = False
    mixes = False

    @classmethod
    def variant(cls, options: SumOptions) -> type["Sum"]:
        kinds = [_kind(name) for name, _ in _named(options.terms) if name in objectives.OBJECTIVES]
        views = any(kind.needs_views for kind in kinds)
        if any(issubclass(kind, ImageText) for kind in kinds):
            return TextSumOfViews if views else TextSum
        if not any(kind.needs_labels for kind in kinds):
            return SumOfViews if views else cls
        if views:
            return LabelledSumOfViews
        return MixedSum if all(kind.mixes for kind in kinds) else LabelledSum

    def __init__(self, options: SumOptions, context: ObjectiveContext):
        super().__init__(options, context)
        if not options.terms:
            raise ConfigError(
                f"objective sum needs terms: set --{_OPTION}=\"(('image_text',{{}}),('masked_patches',{{}}))\""
            )
        self._view = self._own_view()
        terms, teachers = [], 0
        for name, given in _named(options.terms):
            terms.append(self._term(name, given, teachers))
            teachers = terms[-1].teachers.stop
        self.terms, names = tuple(terms), [term.name for term in terms]
        if len(set(names)) < len(names):
            raise ConfigError(f"{_OPTION}: {', '.join(names)}: each objective can be a term once")
        if bool(options.tokenizer) != ("image_text" in names):
            wrong = "the term image_text needs a tokenizer: set it to bytes, or a file"
            wrong = "no term learns from texts: leave it out" if options.tokenizer else wrong
            raise ConfigError(f"config.objective.tokenizer = {options.tokenizer!r}: {wrong}")
        averages = [t for t in terms if isinstance(t.objective.teacher(), MovingAverage)]
        if len(averages) > 1 or (averages and teachers):
            raise ConfigError(
                f"{_OPTION}: {averages[0].name} has a moving average as its teacher, beside which no other term can "
                "have a teacher"
            )
        self._average = averages[0] if averages else None
        self.shared = tuple(t for t in self.terms if isinstance(t.objective, OutputTerm))
        if len({t.objective.fixed_model for t in self.shared}) > 1:
            raise ConfigError(
                f"{_OPTION}: config.objective.image_blocks of image_text computes the image tower as in evaluation, "
                "which no other term does: set it to 0"
            )
        layers = (name for term in self.shared for name in term.objective.layers)
        self.layers = tuple(dict.fromkeys(layers))

    def _term(self, name: str, given: dict[str, Any], first: int) -> Term:
        """A term, as the options say; `first` is the number of its first fixed teacher."""
        if name not in objectives.OBJECTIVES:
            hint = nearest(name, objectives.OBJECTIVES)
            raise ConfigError(f"{_OPTION}: {name!r} is no objective{hint}")
        kind = _kind(name)
        if kind.needs_masks or issubclass(kind, Sum):
            raise ConfigError(
                f"{_OPTION}: {name} cannot be a term: it learns from masks, or is a sum"
            )
        if kind.needs_labels and isinstance(self, TextSum):
            raise ConfigError(
                f"{_OPTION}: {name} learns from labels, and image_text from captions, which no data has together"
            )
        weight, start = given.pop("weight", 1.0), given.pop("start", "0 steps")
        if not isinstance(weight, (int, float)) or not weight >= 0:
            raise ConfigError(
                f"{_OPTION}: {name}: weight = {weight!r} must be a number of at least 0"
            )
        try:
            start = self.context.to_steps(start)
        except ConfigError as error:
            raise ConfigError(f"{_OPTION}: {name}: start = {start!r}: {error}") from error
        term_options = schema.checked_options(
            kind.Options, given, f"{_OPTION}: {name}", "config.objective."
        )
        options = kind.Options(**term_options)
        if issubclass(kind.Options, TokenOptions):
            tokens = {f.name: getattr(self.options, f.name) for f in schema.options(TokenOptions)}
            if twice := [field for field in tokens if field in given]:
                raise ConfigError(
                    f"{_OPTION}: {name}: {twice[0]} is an option of the sum: set config.objective.{twice[0]}"
                )
            options = dataclasses.replace(options, **tokens)
        without = dataclasses.replace(self.context, teachers=(), **self._views_of(kind))
        objective = kind(options, without)
        source = objective.teacher()
        if isinstance(source, MovingAverage) and start:
            remaining = max(self.context.total_steps - start, 1)
            objective = kind(options, dataclasses.replace(without, total_steps=remaining))
        if objective.gram_teacher():
            raise ConfigError(
                f"{_OPTION}: {name}: a sum keeps no earlier weights for Gram anchoring: set gram_weight to 0"
            )
        count = len(source) if isinstance(source, tuple) else isinstance(source, FromCheckpoint)
        teachers = slice(first, first + count)
        if given_teachers := self.context.teachers[teachers]:
            objective = kind(options, dataclasses.replace(without, teachers=given_teachers))
        return Term(name, objective, float(weight), start, teachers)

    def _own_view(self) -> str:
        """The view that terms of one image see, by its name in a batch; '' where images have one view."""
        if not self.needs_views:
            return ""
        name, views = f"image_{self.options.view}", (self.context.views, *self.context.other_views)
        model = self.context.model
        wanted = (1, *model.height_width, model.channels)
        if any(of_batch.get(name) != wanted for of_batch in views):
            raise ConfigError(
                f"config.objective.view = {self.options.view}: of config.data.views this one must be there once, with "
                "config.data.image_size in all steps: the terms that learn from one image see it"
            )
        return name

    def _views_of(self, kind: type[Objective]) -> dict[str, Any]:
        """What of a term's context says which views it sees."""
        if not kind.needs_views:
            return {"views": {}, "other_views": ()}
        seen, *others = (
            {name: shape for name, shape in views.items() if name != self._view}
            for views in (self.context.views, *self.context.other_views)
        )
        return {"views": seen, "other_views": tuple(others)}

    def check_effects(self) -> None:
        total = self.context.total_steps
        for term in self.terms:
            if term.start >= total:
                raise ConfigError(
                    f"{_OPTION}: {term.name} starts at step {term.start}, and the run has {total}: it would train "
                    "nothing; set an earlier start, a longer config.duration, or leave it out"
                )
            term.objective.check_effects()
        if not any(term.weight for term in self.terms):
            names = ", ".join(term.name for term in self.terms)
            raise ConfigError(
                f"{_OPTION}: all weights ({names}) are 0, and nothing would be trained: set one above 0"
            )

    @classmethod
    def resolve(cls, config: Any, options: Any) -> Any:
        return texts.for_run(config, options)

    def make_modules(self, rngs: nnx.Rngs) -> SumModules:
        made = {term.name: term.objective.make_modules(rngs) for term in self.terms}
        return SumModules({name: modules for name, modules in made.items() if modules is not None})

    def continue_from(
        self, saved: SavedObjective, like: Weights
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Each term continues as it says: with that term of a sum, or with what was trained by it alone."""
        taken, reset = {}, {}
        for term in self.terms:
            parts, before = _of_term(like, term.name), saved
            if issubclass(saved.kind, Sum):
                before = dataclasses.replace(
                    saved,
                    kind=type(term.objective),
                    read=lambda name=term.name: _of_term(saved.read(), name),
                )
            both = term.objective.continue_from(before, parts)
            for names, of_term in zip((taken, reset), both, strict=True):
                names |= {f"terms/{term.name}/{name}": value for name, value in of_term.items()}
        return taken, reset

    def teacher(self) -> tuple[FromCheckpoint, ...] | MovingAverage | None:
        if self._average:
            average, start = self._average.objective.teacher(), self._average.start
            if not start:
                return average
            return MovingAverage(
                lambda step: jnp.where(
                    step < start, 0.0, average.momentum(jnp.maximum(step - start, 0))
                )
            )
        sources = [term.objective.teacher() for term in self.terms]
        flat = [
            s for source in sources for s in (source if isinstance(source, tuple) else (source,))
        ]
        return tuple(source for source in flat if source is not None) or None

    def targets(self, batch: Batch) -> Batch:
        merged = {}
        for term in self.terms:
            merged |= term.objective.targets(batch)
        return merged

    def flops(self) -> int:
        """Operations of an image's forward passes; the shared one counts once."""
        of_model = registry.count_flops(self.context.model)
        total = sum(term.objective.flops() for term in self.terms)
        return total - max(len(self.shared) - 1, 0) * of_model

    def warning(self, metrics: dict[str, float]) -> str:
        warnings = (
            term.objective.warning(
                {n.removeprefix(f"{term.name}_"): value for n, value in metrics.items()}
            )
            for term in self.terms
        )
        return " ".join(text for text in warnings if text)

    def text_term(self, modules: SumModules | None) -> tuple[ImageText, nnx.Module | None] | None:
        """The term that compares images with texts, and what it owns; `None` if there is none."""
        for term in self.terms:
            if isinstance(term.objective, ImageText):
                return term.objective, modules and modules.terms[term.name]
        return None

    def __call__(self, learner: Learner, batch: Batch, rngs: nnx.Rngs):
        seen, views = None, batch
        if self._view in batch:
            batch = batch | {"image": batch[self._view][:, 0]}
        if self.shared:
            fixed = self.shared[0].objective.fixed_model
            seen = forward(learner.model, batch["image"], self.layers, fixed=fixed, rngs=rngs)
        loss, metrics = 0.0, {}
        for term in self.terms:
            given = views if term.objective.needs_views else batch
            of_term, own_metrics, observed = self._loss(term, learner, seen, given, rngs.dropout())
            if observed:
                learner.observed[term.name] = observed
            weight = jnp.where(learner.step >= term.start, term.weight, 0.0)
            loss += weight * of_term
            own_metrics = {"loss": of_term} | own_metrics
            metrics |= {f"{term.name}_{name}": value for name, value in own_metrics.items()}
        return loss, metrics

    def starts(self) -> Mapping[str, int]:
        if not self.options.rest:
            return {}
        return {f"terms/{term.name}/": term.start for term in self.terms if term.start}

    def update_state(
        self, modules: SumModules, observed: dict[str, Any], step: jax.Array
    ) -> dict[str, jax.Array]:
        """Moves the state of each term; a term that waits for its start keeps it until then."""
        metrics = {}
        for term in self.terms:
            if term.name not in observed:
                continue

            def move(modules: nnx.Module | None, term: Term = term) -> dict[str, jax.Array]:
                term_step = self._step_of(term, step)
                return term.objective.update_state(modules, observed[term.name], term_step)

            moved = self._run(term, step, move, modules.terms.get(term.name))
            metrics |= {f"{term.name}_{name}": value for name, value in moved.items()}
        return metrics

    def _loss(
        self, term: Term, learner: Learner, seen: tuple | None, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, Any]]:
        """Loss and metrics of a term, and what it has observed; zeros before it begins."""
        modules = learner.modules.terms.get(term.name)
        teacher = self._teacher_of(term, learner)
        step = self._step_of(term, learner.step)

        def run(
            modules: nnx.Module | None,
        ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, Any]]:
            rngs, objective = nnx.Rngs(dropout=key), term.objective
            of_term = learner.replace(modules=modules, teacher=teacher, step=step, observed={})
            if isinstance(objective, OutputTerm):
                output, layers = seen
                read = tuple(layers[self.layers.index(name)] for name in objective.layers)
                loss, metrics = objective.of_output(of_term, output, read, batch, rngs)
            else:
                loss, metrics = objective(of_term, batch, rngs)
            return loss, metrics, of_term.observed

        return self._run(term, learner.step, run, modules)

    def _step_of(self, term: Term, step: jax.Array) -> jax.Array:
        """The step that a term counts; one with a moving average counts from its start."""
        return step - term.start if term is self._average else step

    def _run(self, term: Term, step: jax.Array, run: Callable, modules: nnx.Module | None) -> Any:
        """What `run(own)` gives; zeros, and no change of `own`, while a term waits for its start."""
        waits = term.start and (term is self._average or not has_state(modules))
        return run_if(step >= term.start, run, modules) if waits else run(modules)

    def _teacher_of(self, term: Term, learner: Learner) -> Any:
        """A term's part of the sum's teachers, as it would have them alone."""
        if term is self._average:
            average = learner.teacher
            return dataclasses.replace(average, modules=average.modules.terms.get(term.name))
        source = term.objective.teacher()
        if source is None:
            return None
        teachers = learner.teacher[term.teachers]
        return teachers if isinstance(source, tuple) else teachers[0]


class TextSum(Sum):
    """Some term compares images with texts."""

    evaluates_with_modules = True
    evaluator = ImageText.evaluator


class LabelledSum(Sum):
    """Some term learns from labels."""

    needs_labels = True


class MixedSum(LabelledSum):
    """All terms learn from mixed images too."""

    mixes = True


class SumOfViews(Sum):
    """Some term learns from several views."""

    needs_views = True


class TextSumOfViews(TextSum):
    """One from texts, one from several views."""

    needs_views = True


class LabelledSumOfViews(LabelledSum):
    """One from labels, one from several views."""

    needs_views = True


def _named(terms: tuple) -> list[tuple[str, dict[str, Any]]]:
    """(name, options) of terms; some are a name alone."""
    return named_entries("objective.terms", terms)


def _kind(name: str) -> type[Objective]:
    """The objective of a term."""
    kind = objectives.OBJECTIVES[name]
    return SupervisedOutput if kind is Supervised else kind


def _of_term(weights: Weights, name: str) -> Weights:
    """What a term owns, of what a sum does."""
    params, variables = (tree.get("terms", {}).get(name, {}) for tree in weights)
    return Weights(params, variables)
